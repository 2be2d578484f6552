"""Configurations: the block sizes and launch options of one implementation, for a call or as JSON.

Each implementation has a frozen dataclass `Config` with the fields `forward` and `backward`, such as
`attest.kernels.triton.Config`. None, the default, lets the implementation choose. A configuration has no
effect on results beyond rounding (S18).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from attest.kernels.call.options import refuse, shown
from attest.kernels.configs.fields import read_fields
from attest.kernels.contract import Implementation
from attest.kernels.implementations import IMPLEMENTATIONS

_NAME = "implementation"
_ADVICE = "Write it with attest.kernels.config.to_json."


def implementation_of(
    config: Any, implementations: Sequence[Implementation] = IMPLEMENTATIONS
) -> Implementation:
    """Return the implementation that a configuration belongs to.

    Raises: ValueError if it belongs to none.
    """
    owner = next((x for x in implementations if type(config) is x.config()), None)
    if owner is None:
        names = " or ".join(x.name for x in implementations if x.config() is not None)
        expected = f"the Config of {names or 'no implementation: this one takes none'}"
        refuse("config", f"a {type(config).__name__}", expected, "Build it as that class.")
    return owner


def to_json(config: Any, implementations: Sequence[Implementation] = IMPLEMENTATIONS) -> str:
    """Return a configuration as one line of JSON: the name of its implementation, and its fields, sorted.

    Equal configurations have equal JSON, and `from_json` returns an equal configuration.

    Raises: ValueError if it belongs to no implementation.
    """
    name = implementation_of(config, implementations).name
    return json.dumps({_NAME: name, **asdict(config)}, sort_keys=True)


def from_json(text: str, implementations: Sequence[Implementation] = IMPLEMENTATIONS) -> Any:
    """Return the configuration that `to_json` wrote; fields with a default may be absent.

    Raises: ValueError for anything else. It names the implementation, the field, what was got and what is
    expected.
    """
    try:
        given = json.loads(text, object_pairs_hook=_without_repetition)
    except (TypeError, ValueError, RecursionError) as error:
        refuse("config", shown(text), f"JSON with each field once ({error})", _ADVICE)
    by_name = {x.name: cls for x in implementations if (cls := x.config()) is not None}
    if not isinstance(given, dict):
        refuse("config", shown(given), f"an object with the field {_NAME!r}", _ADVICE)
    name = given.pop(_NAME, None)
    if not isinstance(name, str) or name not in by_name:
        choices = ", ".join(map(repr, by_name))
        refuse(f"config, {_NAME}", shown(name), f"one of {choices}", _ADVICE)
    return read_fields(by_name[name], f"config of {name!r}", given)


def platform_of(config: Any, platform: object) -> str | Implementation:
    """Return the platform of a call with a configuration: that of the configuration.

    Raises: ValueError if the call names another one.
    """
    if isinstance(platform, Implementation):
        implementation_of(config, (platform,))
        return platform
    name = implementation_of(config).name
    if platform is not None and not (isinstance(platform, str) and platform == name):
        expected = f"that of platform={shown(platform)}, or no platform"
        refuse("config", f"a configuration of {name!r}", expected, "Leave platform out.")
    return name


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is there twice")
    return fields
