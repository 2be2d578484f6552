"""Configurations of operations: neutral block sizes, or those of one implementation, and where to run.

None of them changes results beyond rounding (S18).
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from attest.kernels.call.options import refuse, shown
from attest.kernels.choice.neutral_sizes import BwdParams, FwdParams
from attest.kernels.config import from_json as config_from_json
from attest.kernels.config import implementation_of
from attest.kernels.config import to_json as config_to_json
from attest.kernels.operations.platforms import check_backend, check_platform

_ADVICE = "Write it with to_json."


@dataclass(frozen=True)
class FlashAttentionConfig:
    """The configuration by which `FlashAttention` runs a call.

    fwd_params, bwd_params: neutral sizes. platform: "auto", "triton", "pallas", "xla", or the name of an
    implementation. backend: "any", or the hardware that the call must be on. config: the configuration of one
    implementation, exact, in place of fwd_params and bwd_params.

    A size that the implementation of an explicit platform does not have is refused; with "auto" it is left
    out, and `explain` names it.
    """

    fwd_params: FwdParams | None = None
    bwd_params: BwdParams | None = None
    platform: str = "auto"
    backend: str = "any"
    config: Any = None

    def __post_init__(self) -> None:
        for name, kind in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            value = getattr(self, name)
            if value is not None and type(value) is not kind:
                refuse(name, f"a {type(value).__name__}", kind.__name__, f"Build it as {kind.__name__}.")
            if value is not None and self.config is not None:
                refuse(name, "sizes beside a config", "one of them", "Put the sizes into the config.")
        object.__setattr__(self, "platform", check_platform(self.platform))
        object.__setattr__(self, "backend", check_backend(self.backend))
        if self.config is not None:
            name = implementation_of(self.config).name
            if self.platform not in ("auto", name) and not (
                self.platform == "pallas" and name in ("mosaic_gpu", "pallas_tpu")
            ):
                expected = f"'auto' or {name!r}, whose config it has"
                refuse("platform", repr(self.platform), expected, "Leave platform out.")

    def to_json(self) -> str:
        """Return the configuration as one line of JSON, equal for equal configurations."""
        given = {name: asdict(x) for name in ("fwd_params", "bwd_params") if (x := getattr(self, name))}
        given = {name: {key: n for key, n in x.items() if n is not None} for name, x in given.items()}
        config = {} if self.config is None else {"config": json.loads(config_to_json(self.config))}
        where = {"platform": self.platform, "backend": self.backend}
        return json.dumps({**given, **config, **where}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration that `to_json` wrote.

        Raises: ValueError for anything else, naming the field.
        """
        given = _object(text, cls)
        for name, kind in (("fwd_params", FwdParams), ("bwd_params", BwdParams)):
            if given.get(name) is not None:
                given[name] = kind(**_known(given[name], kind, name))
        if given.get("config") is not None:
            given["config"] = config_from_json(json.dumps(given["config"]))
        return cls(**given)


@dataclass(frozen=True)
class AttentionConfig:
    """The configuration by which `Attention` runs a call. It has one implementation, without blocks.

    block_q, block_k, num_warps and num_stages are accepted, since users of ejKernel give them, and have no
    effect; `explain` says so. platform: "auto" or "xla". backend: as in `FlashAttentionConfig`.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    platform: str = "auto"
    backend: str = "any"

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "num_warps", "num_stages"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, FwdParams(q_blocksize=value).q_blocksize)
        object.__setattr__(self, "platform", check_platform(self.platform))
        object.__setattr__(self, "backend", check_backend(self.backend))
        if self.platform not in ("auto", "xla"):
            refuse("platform", shown(self.platform), "'auto' or 'xla'", "Weights come from XLA alone.")

    def to_json(self) -> str:
        """Return the configuration as one line of JSON, equal for equal configurations."""
        return json.dumps({name: x for name, x in asdict(self).items() if x is not None}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the configuration that `to_json` wrote.

        Raises: ValueError for anything else, naming the field.
        """
        return cls(**_object(text, cls))


def _object(text: str, kind: Any) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        refuse("config", shown(text), f"JSON of a {kind.__name__} ({error})", _ADVICE)
    return _known(given, kind, "config")


def _known(given: Any, kind: Any, place: str) -> dict[str, Any]:
    names = [x.name for x in fields(kind)]
    if not isinstance(given, dict):
        refuse(place, shown(given), f"an object with fields among {', '.join(names)}", _ADVICE)
    for name in given:
        if name not in names:
            refuse(place, f"the field {shown(name)}", f"fields among {', '.join(names)}", _ADVICE)
    return dict(given)
