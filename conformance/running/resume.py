"""The continuation of a run that was cut short: what it has judged, and what tells two runs apart."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from attest.conformance.record import JudgedCall
from attest.conformance.running.choice import Draw

# Facts of the environment on which the results of a run depend.
FACTS = ("backend", "device", "platform", "processor", "python", "versions", "flags", "commit")
_DIGITS = 20  # of the hash of a call: two calls of 10^9 share it with a probability of 10^-6


@dataclass(frozen=True)
class Before:
    """The calls that an earlier part of a run has judged."""

    calls: tuple[JudgedCall, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """What names the calls."""
        return frozenset(call.judged for call in self.calls)


def call_key(subject: str, draw: Draw, checks: Sequence[str]) -> str:
    """Return what names a call of a plan in every run with the same cases."""
    content = json.dumps([subject, _plain(draw), *checks], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:_DIGITS]


def _plain(value: Any) -> Any:
    """Return a value as JSON data, the same in every process."""
    if is_dataclass(value):
        return [type(value).__name__, *(_plain(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(each) for each in value)
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return sorted([_plain(key), _plain(each)] for key, each in value.items())
    return value


def differing(got: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str] = FACTS) -> list[str]:
    """Return a clause for each fact that differs between two environments."""
    found: list[str] = []
    for name in names:
        one, other = got.get(name), expected.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            inner = differing(one, other, sorted(one.keys() | other.keys()))
            found += [f"{name}: {clause}" for clause in inner]
        elif one != other:
            found.append(f"{name}: got {one!r}, expected {other!r}")
    return found
