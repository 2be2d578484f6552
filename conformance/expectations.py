"""Which failures are known: TOML entries, each with a reason and a public link, that must keep failing.

An entry names a subject, a check and a condition on the case. A FAIL that it describes becomes XFAIL; a
PASS in its place is XPASS, which fails the run; so does an entry that no result of a whole run shows.
docs/expectations.md has the fields.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax

from conformance.case import Case
from conformance.checks import all_checks
from conformance.features import FEATURES
from conformance.plan import profile_names
from conformance.record import Result, RunRecord, Verdict
from conformance.subject import BACKENDS

FOLDER = Path(__file__).parent / "expectations"

_SHOWS = ("always", "sometimes")
_LINKS = ("https://", "http://", "docs/")
_LISTS = ("features", "without", "outputs", "profiles", "backends")
_REQUIRED = ("subject", "check", "reason", "link")
_CASE_FIELDS = tuple(f.name for f in fields(Case))


@dataclass(frozen=True)
class Expectation:
    """One known failure.

    subject, check: whose. reason: why it fails, in a sentence. link: the public report, or a page of docs/.
    case: fields of the Case and the values that they must have: one, any of a list, or {min, max}.
    features: all on in the case. without: all off.
    outputs: nothing else may be wrong; any if empty. message_contains: so must the verdict's message.
    shows: "always": every such case fails; "sometimes": one in a run is enough.
    profiles: where it must show itself; in others it may.
    backends: of JAX, where the failure is known; any if empty.
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
    shows: str = "always"
    profiles: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()

    def covers(self, result: Result) -> bool:
        """Whether this is about the result's subject, check and case."""
        case = result.case
        return (
            (self.subject, self.check) == (result.subject, result.check)
            and self.features <= case.features
            and not self.without & case.features
            and all(_holds(wanted, case, name) for name, wanted in self.case.items())
        )

    def describes(self, result: Result) -> bool:
        """Whether a failing result is the failure that this expects."""
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
    """The project's entries that hold on this machine's backend, and those of further files and folders.

    Raises ValueError with one sentence: the file, the entry and what is wrong with it.
    """
    found: list[Expectation] = []
    for path in [FOLDER, *extra]:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder of expectations")
        for file in sorted(path.glob("*.toml")) if path.is_dir() else [path]:
            found.extend(_read(file))
    for number, entry in enumerate(found):
        if entry in found[:number]:
            raise ValueError(f"expectation {entry.title!r} is written twice")
    return tuple(entry for entry in found if not entry.backends or jax.default_backend() in entry.backends)


def expect(result: Result, expectations: Iterable[Expectation]) -> Result:
    """The verdict in the light of what is expected: FAIL may become XFAIL, PASS may become XPASS."""
    if result.verdict is Verdict.FAIL:
        for entry in expectations:
            if entry.describes(result):
                message = f"expected: {entry.reason}; found: {result.message}"
                return replace(result, verdict=Verdict.XFAIL, message=message, link=entry.link)
    if result.verdict is Verdict.PASS:
        for entry in expectations:
            if entry.shows == "always" and entry.covers(result):
                message = (
                    f"passes, but was expected to fail: {entry.reason}; remove or narrow the expectation"
                )
                return replace(result, verdict=Verdict.XPASS, message=message, link=entry.link)
    return result


def stale(record: RunRecord, expectations: Iterable[Expectation]) -> tuple[str, ...]:
    """A sentence for each entry that should have shown itself in the record and did not.

    Only a whole run can tell: one that was cut short, narrowed, or is one shard of several says nothing.
    """
    if not record.complete or record.narrowed or record.shard != (1, 1):
        return ()
    asked = {(result.subject, result.check) for result in record.results}
    return tuple(
        f"stale expectation, nothing in this run shows it: {entry.title}; remove or correct it"
        for entry in expectations
        if (entry.subject, entry.check) in asked
        and (not entry.profiles or record.profile in entry.profiles)
        and not any(_shown(entry, result) for result in record.results)
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


def _read(file: Path) -> list[Expectation]:
    try:
        data = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{file}: not readable as TOML: {error}") from error
    entries = data.get("expect", [])
    if set(data) - {"expect"} or not isinstance(entries, list):
        raise ValueError(f"{file}: got {sorted(data)}, expected a list of [[expect]] tables and nothing else")
    return [_entry(f"{file}, entry {number}", entry) for number, entry in enumerate(entries, start=1)]


def _entry(where: str, table: Mapping[str, Any]) -> Expectation:
    values: dict[str, Any] = {name: value for name, value in table.items() if name != "when"}
    when: dict[str, Any] = dict(table.get("when", {}))
    for name in ("features", "without"):
        if name in when:
            values[name] = when.pop(name)
    for name, got, right, expected in _faults(values, when):
        if not right:
            raise ValueError(f"{where}, {name}: got {got!r}, expected {expected}")
    for name in ("features", "without", "outputs"):
        values[name] = frozenset(values.get(name, ()))
    for name in ("profiles", "backends"):
        values[name] = tuple(values.get(name, ()))
    return Expectation(**values, case=when)


def _faults(values: Mapping[str, Any], when: Mapping[str, Any]) -> Iterable[tuple[str, Any, bool, str]]:
    """(key, what was got, whether it is right, what was expected), the shape of each before its content."""
    known = [f.name for f in fields(Expectation) if f.name not in ("case", "features", "without")]
    for name, value in values.items():
        if name in _LISTS:
            right = isinstance(value, list) and all(isinstance(item, str) for item in value)
            yield name, value, right, "a list of strings"
        else:
            yield name, value, name in known, f"no such key: one of {', '.join([*known, 'when'])}"
            yield name, value, isinstance(value, str), "a string"
    for name in _REQUIRED:
        yield name, values.get(name), bool(values.get(name)), "a string that is not empty"
    yield (
        "check",
        values["check"],
        values["check"] in all_checks(),
        f"one of {', '.join(sorted(all_checks()))}",
    )
    link = values["link"]
    yield "link", link, link.startswith(_LINKS), "an address (https://...) or a page of docs/"
    shows = values.get("shows", "always")
    yield "shows", shows, shows in _SHOWS, f"one of {', '.join(_SHOWS)}"
    profiles = values.get("profiles", [])
    yield "profiles", profiles, set(profiles) <= set(profile_names()), f"some of {', '.join(profile_names())}"
    backends = values.get("backends", [])
    yield "backends", backends, set(backends) <= set(BACKENDS), f"some of {', '.join(BACKENDS)}"
    for name in ("features", "without"):
        named = values.get(name, [])
        yield f"when.{name}", named, set(named) <= set(FEATURES), f"some of {', '.join(FEATURES)}"
    for name, wanted in when.items():
        yield f"when.{name}", wanted, name in _CASE_FIELDS, "a field of Case, features or without"
        if isinstance(wanted, Mapping):
            right = bool(wanted) and set(wanted) <= {"min", "max"}
            yield f"when.{name}", wanted, right, "min, max or both"
