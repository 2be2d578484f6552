"""Expectations: declared failures as TOML entries, each with a reason and a public link.

An entry names a subject, a check and a condition on the case. A FAIL that it describes becomes XFAIL. A PASS
in its place is XPASS, which fails the run. An entry that matches nothing in a complete run also fails it.
docs/how-to/expectations.md has the fields.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import msgspec

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.checks import all_checks
from attest.conformance.clauses import CLAUSES
from attest.conformance.files import read_bytes
from attest.conformance.record import Result, Verdict
from attest.conformance.running.plan import profile_names
from attest.conformance.sizes import sizes
from attest.conformance.subject import BACKENDS
from attest.conformance.text import sentence
from attest.conformance.typed import convert, decode_toml

FOLDER = Path(__file__).parents[1] / "expectations"

_LINKS = ("https://", "http://", "docs/")
_CASE_FIELDS = tuple(f.name for f in fields(Case))

Shows = Literal["always", "sometimes"]
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=sizes().string_characters)]


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One [[expect]] table; docs/how-to/expectations.md explains the keys."""

    subject: Text
    check: Text
    reason: Text
    link: Text
    when: dict[str, Any] = {}
    outputs: tuple[Text, ...] = ()
    message_contains: str = ""
    shows: Shows = "always"
    profiles: tuple[Text, ...] = ()
    backends: tuple[Text, ...] = ()
    clauses: tuple[Text, ...] = ()


class _Switches(msgspec.Struct):
    """The conditions on a case's features."""

    features: tuple[Text, ...] = ()
    without: tuple[Text, ...] = ()


@dataclass(frozen=True)
class Expectation:
    """One expected failure.

    subject, check: as in the verdict. reason: why it fails, in a sentence.
    link: the public report, or a page of docs/.
    case: fields of the Case and the values that they must have: one, any of a list, or {min, max}.
    features: all on in the case. without: all off.
    outputs: no other output may be wrong; any if empty. message_contains: text of the verdict's message.
    shows: "always": every such case fails; "sometimes": one in a run is enough.
    profiles: in these, the entry must match a result; in others, it may.
    backends: of JAX, where the failure is known; any if empty.
    clauses: those that the failure breaks; if empty, those that its causes point to.
    """

    subject: str
    check: str
    reason: str
    link: str
    case: Mapping[str, Any] = field(default_factory=dict[str, Any])
    features: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    outputs: frozenset[str] = frozenset()
    message_contains: str = ""
    shows: Shows = "always"
    profiles: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()

    def covers(self, result: Result) -> bool:
        """Return whether this is about the result's subject, check and case."""
        case = result.case
        return (
            (self.subject, self.check) == (result.subject, result.check)
            and self.features <= case.features
            and not self.without & case.features
            and all(_holds(wanted, case, name) for name, wanted in self.case.items())
        )

    def describes(self, result: Result) -> bool:
        """Return whether a failing result is the failure that this expects."""
        wrong = {m.output for m in result.measurements if m.broken}
        return (
            self.covers(result)
            and self.message_contains in result.message
            and (not self.outputs or (bool(wrong) and wrong <= self.outputs))
        )

    @property
    def title(self) -> str:
        """The entry in a few words, for problems."""
        return f"{self.subject}, {self.check}: {self.reason}"


def load_expectations(extra: Sequence[Path] = ()) -> tuple[Expectation, ...]:
    """Return the entries for this machine's backend: the project's, and those of further files and folders.

    Raises ValueError with one sentence: the file, the entry and what is wrong with it.
    """
    found: list[Expectation] = []
    for path in [FOLDER, *extra]:
        if not os.path.exists(path):  # pathlib raises for names that are too long
            raise ValueError(sentence(f"{path}: no such file or folder of expectations"))
        named = not path.is_dir()
        for file in [path] if named else sorted(path.glob("*.toml")):
            found.extend(_read(file, named))
    for number, entry in enumerate(found):
        if entry in found[:number]:
            raise ValueError(sentence(f"expectation {entry.title!r} appears twice: remove one"))
    return tuple(entry for entry in found if not entry.backends or jax.default_backend() in entry.backends)


def expect(result: Result, expectations: Iterable[Expectation]) -> Result:
    """Apply the expectations to a result: FAIL may become XFAIL, PASS may become XPASS."""
    if result.verdict is Verdict.FAIL:
        for entry in expectations:
            if entry.describes(result):
                message = f"expected: {entry.reason}; found: {result.message}"
                return replace(
                    result, verdict=Verdict.XFAIL, message=message, link=entry.link, breaks=entry.clauses
                )
    if result.verdict is Verdict.PASS:
        for entry in expectations:
            if entry.shows == "always" and entry.covers(result):
                message = (
                    f"passes, but was expected to fail: {entry.reason}; remove or narrow the expectation"
                )
                return replace(result, verdict=Verdict.XPASS, message=message, link=entry.link)
    return result


@dataclass
class _Match:
    """The matches of one entry with the results so far.

    judged: whether one is of its check. covered: whether one is of its cases. shown: whether one matches.
    """

    entry: Expectation
    judged: bool = False
    covered: bool = False
    shown: bool = False


class Matches:
    """The entries that match results of a whole run, which are given one by one."""

    def __init__(self, expectations: Iterable[Expectation]) -> None:
        self._matches = tuple(_Match(entry) for entry in expectations)
        self._of: defaultdict[tuple[str, str], list[_Match]] = defaultdict(list)
        for match in self._matches:
            self._of[match.entry.subject, match.entry.check].append(match)

    def concern(self, subject: str, check: str) -> bool:
        """Return whether an entry is about a check of a subject; other results need not be given."""
        return (subject, check) in self._of

    def add(self, result: Result) -> None:
        """Note which entries match a result."""
        if not self.concern(result.subject, result.check):
            return
        for match in self._of[result.subject, result.check]:
            match.judged = True
            match.covered = match.covered or match.entry.covers(result)
            match.shown = match.shown or _shown(match.entry, result)

    def stale(self, profile: str) -> tuple[str, ...]:
        """Return a sentence for each entry that should match a result and does not.

        There is none for an entry that shows sometimes if the run has no case of it: the seed may draw none.
        """
        return tuple(
            f"stale expectation, no result matches it: {match.entry.title}; remove or correct it"
            for match in self._matches
            if match.judged
            and (match.entry.shows == "always" or match.covered)
            and (not match.entry.profiles or profile in match.entry.profiles)
            and not match.shown
        )


def _shown(entry: Expectation, result: Result) -> bool:
    if result.verdict is Verdict.XPASS:  # red already
        return entry.covers(result)
    return result.verdict is Verdict.XFAIL and entry.describes(result)


def _holds(wanted: Any, case: Case, name: str) -> bool:
    got = getattr(case, name)
    if isinstance(wanted, Mapping):
        if not isinstance(got, (int, float)):
            return False
        return wanted.get("min", got) <= got <= wanted.get("max", got)
    got = [list(item) if isinstance(item, tuple) else item for item in got] if isinstance(got, tuple) else got
    return got == wanted or (isinstance(wanted, list) and got in wanted)


def _read(file: Path, named: bool) -> list[Expectation]:
    content = read_bytes(file, sizes().expectations_bytes, "file of expectations", named=named)
    data = decode_toml(content, str(file))
    entries = data.get("expect", [])
    if set(data) - {"expect"} or not isinstance(entries, list):
        got = sentence(f"{file}: got {sorted(data)}")
        raise ValueError(f"{got}, expected a list of [[expect]] tables and nothing else")
    return [_entry(f"{file}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]


def _entry(where: str, table: object) -> Expectation:
    entry = convert(table, Entry, where)
    conditions = dict(entry.when)
    switches = convert(
        {name: conditions.pop(name) for name in ("features", "without") if name in conditions},
        _Switches,
        f"{where}, when",
    )
    for name, got, right, expected in _faults(entry, switches, conditions):
        if not right:
            raise ValueError(sentence(f"{where}, {name}: got {got!r}, expected {expected}"))
    return Expectation(
        subject=entry.subject,
        check=entry.check,
        reason=entry.reason,
        link=entry.link,
        case=conditions,
        features=frozenset(switches.features),
        without=frozenset(switches.without),
        outputs=frozenset(entry.outputs),
        message_contains=entry.message_contains,
        shows=entry.shows,
        profiles=entry.profiles,
        backends=entry.backends,
        clauses=entry.clauses,
    )


def _faults(
    entry: Entry, switches: _Switches, conditions: Mapping[str, Any]
) -> Iterable[tuple[str, object, bool, str]]:
    """Yield (key, what was got, whether it is right, what was expected) for rules beyond types."""
    known = {"check": all_checks(), "profiles": profile_names(), "backends": BACKENDS, "clauses": CLAUSES}
    for name, words in known.items():
        got = getattr(entry, name)
        named = {got} if isinstance(got, str) else set(got)
        yield name, got, named <= set(words), f"some of {', '.join(sorted(words))}"
    yield "link", entry.link, entry.link.startswith(_LINKS), "an address (https://...) or a page of docs/"
    for name in ("features", "without"):
        got = getattr(switches, name)
        yield f"when.{name}", got, set(got) <= set(ALL_FEATURES), f"some of {', '.join(ALL_FEATURES)}"
    for name, wanted in conditions.items():
        yield f"when.{name}", wanted, name in _CASE_FIELDS, "a field of Case, features or without"
        if isinstance(wanted, Mapping):
            yield f"when.{name}", wanted, _is_range(wanted), "min, max or both, as numbers"


def _is_range(wanted: Mapping[str, Any]) -> bool:
    numbers = all(isinstance(side, (int, float)) and not isinstance(side, bool) for side in wanted.values())
    return bool(wanted) and set(wanted) <= {"min", "max"} and numbers
