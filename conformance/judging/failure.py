"""The text of a failure: what is wrong, and the line that replays it."""

import json
import shlex
from dataclasses import fields
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.clauses import CLAUSES
from attest.conformance.record import Element, Measurement, Result
from attest.conformance.text import plural

# The sentence for each judgement of the error model that breaks.
JUDGEMENTS = {
    "bound": "an element lies outside the proven error bound",
    "rms": "the typical error is larger than rounding can explain",
    "z": "the error of an element is too large for its predicted standard deviation",
    "bias": "on average, the results are further from zero or closer to it than rounding can explain",
    "semantics": "the error is larger than any loss of precision can explain: a clause is violated",
}

# The message of an output with broken judgements begins with it.
OUTSIDE = "outside the error model"

# Fields that the readable line describes in words.
_SHAPE = ("dtype", "batch", "q_len", "kv_len", "q_heads", "kv_heads", "head_dim", "value_dim")
_VALUES = ("family", "seed")


def explain(result: Result, replay: str | None = None) -> str:
    """Return everything about one verdict as plain text, without a newline at its end.

    replay: the line that replays it, if `attest replay` cannot find the subject.
    """
    lines = [f"{result.verdict} {result.subject}: {result.check}" + _how_small(result)]
    lines += result.message.splitlines()
    if result.link:
        lines.append(f"known: {result.link}")
    unknown = "see docs/reference/semantics.md"
    lines += [f"{clause}: {CLAUSES.get(clause, unknown)}" for clause in result.clauses]
    shown = [m for m in result.measurements if m.broken] or list(result.measurements)
    for measurement in shown:
        lines += _measured(measurement)
    lines.append(f"case {result.case.id}: {describe_case(result.case)}")
    lines.append(f"replay: {replay or replay_line(result)}")
    first, *rest = lines
    return "\n".join([first, *(f"  {line}" for line in rest)])


def wrong_places(measurement: Measurement) -> str:
    """Return how many elements of an output lie outside their bound, and where."""
    if measurement.wrong == measurement.size:
        return f"wrong everywhere ({plural(measurement.size, 'element')})"
    where = f": {', '.join(measurement.where)}" if measurement.where else ""
    return f"wrong in {measurement.wrong} of {plural(measurement.size, 'element')}{where}"


def replay_line(result: Result) -> str:
    """Return the command that judges this case again."""
    return replay_command(result.subject, result.case, result.check)


def replay_command(subject: str, case: Case, check: str | None) -> str:
    """Return the command that judges a case by one check, or by all checks of drawn cases if None.

    A subject `module:attribute` is an option of its own, so that the reader sees which module is imported:
    see `read_replay_request`.
    """
    request: dict[str, Any] = {"case": case.to_json()}
    if check is not None:
        request["check"] = check
    if ":" not in subject:
        request["subject"] = subject
    line = f"attest replay {shlex.quote(json.dumps(request, separators=(',', ':'), sort_keys=True))}"
    return line if "subject" in request else f"{line} --subject={shlex.quote(subject)}"


def describe_case(case: Case) -> str:
    """Return a case in one readable line: dtype, shapes, values, and what is switched on."""
    heads = f"{case.q_heads}" if case.q_heads == case.kv_heads else f"{case.q_heads} over {case.kv_heads}"
    width = f"{case.head_dim}" if case.value_dim is None else f"{case.head_dim} and {case.value_dim}"
    lengths = f"{plural(case.q_len, 'query', 'queries')} x {plural(case.kv_len, 'key')}"
    shape = f"{case.dtype}, batch {case.batch}, {lengths}"
    values = f"heads {heads}, head dim {width}, {case.family} values, seed {case.seed}"
    on = [_option(f.name, getattr(case, f.name)) for f in fields(Case) if _is_on(case, f.name, f.default)]
    return f"{shape}, {values}; {', '.join(on) if on else 'no option'}"


def _is_on(case: Case, name: str, default: Any) -> bool:
    return name not in (*_SHAPE, *_VALUES) and getattr(case, name) != default


def _option(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name}={json.dumps(value)}"


def _how_small(result: Result) -> str:
    return " (the simplest failing case that was found)" if result.minimal else ""


def _measured(measurement: Measurement) -> list[str]:
    numbers = (
        f"err/bound {measurement.worst_ratio:.3g}, rms ratio {measurement.rms_ratio:.3g}, "
        f"largest z {measurement.largest_z:.3g}, bias t {measurement.bias_t:.3g}, "
        f"{plural(measurement.elements, 'element')} compared"
    )
    lines = [f"{measurement.output}: {numbers}"]
    if measurement.wrong:
        lines.append(f"  {'; '.join([wrong_places(measurement), *measurement.fingerprints])}")
    lines += [f"  {JUDGEMENTS.get(name, name)} ({name})" for name in measurement.broken]
    if measurement.worst is not None:
        lines += [f"  {line}" for line in _worst(measurement.output, measurement.worst)]
    return lines


def _worst(output: str, worst: Element) -> list[str]:
    index = ", ".join(str(place) for place in worst.index)
    return [
        f"worst element {output}[{index}]",
        f"  got      {worst.got!r} ({worst.got_hex})",
        f"  expected {worst.expected!r} ({worst.expected_hex})",
    ]
