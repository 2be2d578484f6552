"""The continuation of a run that was cut short: the calls that it has judged, and the keys of calls."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from attest.conformance.record import JudgedCall
from attest.conformance.running.choice import Draw

_DIGITS = 20  # of the hash of a call: two calls of 10^9 share it with a probability of 10^-6


@dataclass(frozen=True)
class Before:
    """The calls that an earlier part of a run has judged."""

    calls: tuple[JudgedCall, ...] = ()

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the calls, as of `call_key`."""
        return frozenset(call.key for call in self.calls)


def call_key(subject: str, draw: Draw, checks: Sequence[str]) -> str:
    """Return the key of a call of a plan: the same in every run with the same cases."""
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
