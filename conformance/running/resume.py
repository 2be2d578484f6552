"""The continuation of a run that was cut short: what it has judged, and whether this is the same run."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from attest.conformance.files import read_bytes
from attest.conformance.record import RunRecord
from attest.conformance.records.journal import JOURNAL_ENDING, JudgedCall, journal_path, read_calls
from attest.conformance.running.choice import Draw
from attest.conformance.sizes import sizes
from attest.conformance.text import sentence

# Facts of the environment on which the results of a run depend.
_FACTS = ("backend", "device", "platform", "processor", "python", "versions", "flags", "commit")
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


def before(record: Path, request: RunRecord) -> Before:
    """Return what a run had judged when it was cut short, from the journal beside its record.

    record: its path, or that of the journal. request: the record of the run that goes on, without results.
    Searches for simpler cases are left out: they are made again. Raises ValueError with one sentence if there
    is no journal, or if it is of another run.
    """
    path = record if record.name.endswith(JOURNAL_ENDING) else journal_path(record)
    if not os.path.exists(path):
        raise ValueError(
            f"{record}: there is no {path}, which a run with --json leaves if it is cut short: run it anew"
        )
    was, calls = read_calls(read_bytes(path, sizes().record_bytes, "journal"), str(path))
    differences = [
        f"{name}: got {getattr(was, name)!r}, expected {getattr(request, name)!r}"
        for name in ("profile", "seed", "shard", "narrowed")
        if getattr(was, name) != getattr(request, name)
    ]
    differences += differing(was.environment, request.environment, (*_FACTS, "block_sizes"))
    if differences:
        raise ValueError(sentence(f"{path}: it is of another run: {'; '.join(differences)}"))
    return Before(tuple(call for call in calls if call.judged))


def differing(
    got: Mapping[str, Any], expected: Mapping[str, Any], names: Iterable[str] = _FACTS
) -> list[str]:
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
