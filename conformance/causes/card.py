"""The card of a cause: what is wrong and where, when it fails, and the line that replays it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.causes.group import Cause
from attest.conformance.clauses import CLAUSES
from attest.conformance.judging.failure import OUTSIDE, describe_case, replay_line, wrong_places
from attest.conformance.record import Measurement, Result, Verdict
from attest.conformance.text import plural

# Clauses of a card, the likeliest first.
_CLAUSES = 2
# Outputs whose wrong places a card lists.
_PLACED = 2
# Other checks that a card names.
_CHECKS = 4


@dataclass(frozen=True)
class Parts:
    """The parts of a card, for reports that lay them out; each text as in the card.

    details: the wrong places, or the rest of a message. clauses: number and rule. counts: how often the
    condition fails, or empty. several_blocks: replays the smallest failing case of several blocks, where that
    of `replay` has one; else empty. others: other checks that fail with it, or empty.
    """

    headline: str
    failures: str
    details: tuple[str, ...]
    clauses: tuple[str, ...]
    counts: str
    case: str
    replay: str
    several_blocks: str
    others: str


def parts(cause: Cause) -> Parts:
    """Return the parts of the card of a cause."""
    example, larger = cause.example, cause.of_several_blocks
    return Parts(
        headline=headline(cause),
        failures=plural(len(cause.results), "failure"),
        details=tuple(_message(example) if not cause.outputs else _numbers(cause)),
        clauses=tuple(f"{clause}: {CLAUSES[clause]}" for clause in _clauses(cause) if clause in CLAUSES),
        counts=cause.condition.sentence if cause.condition is not None else "",
        case=f"{_shown_case(example)}: {describe_case(example.case)}",
        replay=replay_line(example),
        several_blocks="" if larger is None else replay_line(larger),
        others=_other_checks(cause),
    )


def card(cause: Cause, number: int, count: int) -> str:
    """Return the card of a cause as plain text, without a newline at its end.

    number, count: which of the causes of its run it is.
    """
    shown = parts(cause)
    lines = [line for line in (strip(cause),) if line]
    lines += [*shown.details, *shown.clauses]
    lines += [shown.counts] if shown.counts else []
    lines += [shown.case, f"replay: {shown.replay}"]
    lines += [f"smallest of several blocks: {shown.several_blocks}"] if shown.several_blocks else []
    lines += [f"same cause: {shown.others}"] if shown.others else []
    title = f"CAUSE {number} of {count}, {shown.failures}: {cause.subject}: {shown.headline}"
    return "\n".join([title, *(f"  {line}" for line in lines)])


def strip(cause: Cause) -> str:
    """Return which outputs are wrong and the stage that they point to, in one line; empty without numbers."""
    outputs = "  ".join(f"{name} {'WRONG' if broken else 'OK'}" for name, broken in cause.outputs.items())
    return f"{outputs}  -> {cause.stage}" if cause.stage else outputs


def headline(cause: Cause) -> str:
    """Return a cause in a few words."""
    example = cause.example
    if not cause.outputs:
        first, _, _ = example.message.partition("\n")
        return f"{example.check} {first}" if example.verdict is Verdict.FAIL else f"{example.verdict} {first}"
    wrong = [name for name, broken in cause.outputs.items() if broken]
    words = f" {cause.condition.words}" if cause.condition is not None else ""
    how = "imprecise" if cause.of_precision else _how(cause)
    return f"{_joined(wrong)} {'is' if len(wrong) == 1 else 'are'} {how}{words}"


def _how(cause: Cause) -> str:
    worst = [m.worst for r in cause.results for m in r.measurements if m.broken and m.worst is not None]
    if worst and all(math.isnan(element.got) for element in worst):
        return "NaN"
    if worst and all(element.got == 0 for element in worst):
        return "0 in places"
    return "wrong"


def _message(example: Result) -> list[str]:
    _, *more = example.message.splitlines() or [""]
    return more


def _numbers(cause: Cause) -> list[str]:
    message = cause.example.message
    lines = [] if message.startswith(OUTSIDE) else message.splitlines()
    broken = [m for m in cause.example.measurements if m.broken]
    return lines + [_place(measurement) for measurement in broken[:_PLACED]]


def _place(measurement: Measurement) -> str:
    """Return the worst element of an output and where it is wrong, in one line."""
    name, worst = measurement.output, measurement.worst
    said: list[str] = []
    if measurement.wrong:
        said.append(wrong_places(measurement))
    said += measurement.fingerprints
    if worst is not None:
        index = ", ".join(map(str, worst.index))
        said.append(f"{name}[{index}] is {worst.got:.6g}, expected {worst.expected:.6g}")
    said.append(
        f"err/bound {measurement.worst_ratio:.3g}, rms ratio {measurement.rms_ratio:.3g}, "
        f"z {measurement.largest_z:.3g}, bias t {measurement.bias_t:.3g}"
    )
    return f"{name}: {'; '.join(said)}"


def _clauses(cause: Cause) -> Sequence[str]:
    """Return the likeliest clauses: of the condition, of the features of the simplest case, of the check."""
    example = cause.example
    if not cause.outputs:
        return example.clauses[:_CLAUSES]
    of_features = [ALL_FEATURES[name].clause for name in sorted(example.case.features)]
    of_condition = cause.condition.clauses if cause.condition is not None else ()
    likely = [*of_condition, *of_features] or example.clauses
    return tuple(dict.fromkeys(likely))[:_CLAUSES]


def _shown_case(example: Result) -> str:
    if not example.minimal:
        return f"case {example.case.id}"
    return "simplest failing case" if not example.cut else "simplest failing case found in the time"


def _other_checks(cause: Cause) -> str:
    tally = Counter(result.check for result in cause.results)
    tally[cause.example.check] -= 1
    named = [f"{check} {count}" for check, count in tally.most_common() if count]
    more = len(named) - _CHECKS
    return ", ".join(named[:_CHECKS]) + (f" and {plural(more, 'more check')}" if more > 0 else "")


def _joined(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
