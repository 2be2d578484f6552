"""The text of scores: for a terminal, and as Markdown."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from attest.conformance.mutants.rivals import RULES, RivalScore
from attest.conformance.mutants.summary import Totals
from attest.conformance.mutants.verdict import Score
from attest.conformance.text import plural, shortened

_MESSAGE = 100  # characters


def line(score: Score, done: int, total: int) -> str:
    """Return one line about a score that has just been made."""
    if not score.killed:
        fate = "passed" if score.null else "survived"
    else:
        fate = f"killed by {score.check or score.how}: {shortened(' '.join(score.message.split()), _MESSAGE)}"
    counted = plural(score.results, "result")
    return f"{done}/{total} {score.name} (seed {score.seed}, {counted}): {fate}"


def text(found: Sequence[Totals], skipped: Mapping[str, str]) -> str:
    """Return what the command prints at its end."""
    return "\n".join(part for each in found for part in _paragraph(each)) + _skipped(skipped)


def lost(defect_class: str, names: Sequence[str]) -> str:
    """Return what the cases made for a class of defects were worth."""
    cases = f"the cases and sizes made for the class {defect_class}"
    if not names:
        return f"without {cases}, no defect is lost"
    return f"only {cases} kill {plural(len(names), 'defect')}: {', '.join(names)}"


def _paragraph(found: Totals) -> Iterator[str]:
    seeds = ", ".join(map(str, found.seeds))
    yield f"profile {found.profile}, {'seeds' if len(found.seeds) > 1 else 'seed'} {seeds}"
    if found.total:
        yield f"  defects killed with every seed: {found.killed} of {found.total}, {_percent(found)}"
    for name, of_name in found.survived.items():
        yield f"  survived: {name} (seed {', '.join(map(str, of_name))})"
    if found.null_total:
        yield f"  correct rewrites with something red: {len(found.null_killed)} of {found.null_total}"
    for name in found.null_killed:
        yield f"  false alarm: {name}"
    for title, counts in (("by", found.by_how), ("by check", found.by_check)):
        if counts:
            yield f"  kills {title}: " + ", ".join(f"{key} {count}" for key, count in counts.items())
    for name, (killed, every) in found.by_subject.items():
        yield f"  {name}: {killed} of {every}"
    if found.by_how:
        yield f"  median of results before the kill: {found.median_results}"


def _percent(found: Totals) -> str:
    share = 100 * found.killed / found.total
    return f"{share:.1f} % (95 % interval {100 * found.low:.1f} to {100 * found.high:.1f})"


def _skipped(skipped: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(skipped.items()):
        reasons.setdefault(reason, []).append(name)
    return "".join(f"\nnot scored here: {len(names)}, {reason}" for reason, names in reasons.items())


def markdown(found: Sequence[Totals], catalogue: Mapping[str, str], rivals: Sequence[RivalScore]) -> str:
    """Return the tables of the published score."""
    groups = ", ".join(f"{group} `{digits}`" for group, digits in sorted(catalogue.items()))
    lines = [f"Catalogue: {groups}. Written by `attest mutants --table`.", ""]
    lines += _table(
        ("profile", "seeds", "killed with every seed", "95 % interval", "correct rewrites that fail"),
        [
            (
                each.profile,
                ", ".join(map(str, each.seeds)),
                f"{each.killed} of {each.total}",
                f"{100 * each.low:.1f} % to {100 * each.high:.1f} %",
                f"{len(each.null_killed)} of {each.null_total}",
            )
            for each in found
        ],
    )
    if rivals:
        lines += ["", *_rivals(rivals)]
    for title, shares in (
        ("class", [each.by_class for each in found]),
        ("kernel", [each.by_subject for each in found]),
    ):
        if names := sorted({name for of_profile in shares for name in of_profile}):
            lines += ["", *_table((title, *(each.profile for each in found)), _counts(names, shares))]
    survivors = sorted({name for each in found for name in each.survived})
    if survivors:
        lines += ["", *_table(("survivor", *(each.profile for each in found)), _fates(survivors, found))]
    return "\n".join(lines) + "\n"


def _rivals(rivals: Sequence[RivalScore]) -> list[str]:
    defects = [each for each in rivals if not each.null]
    nulls = [each for each in rivals if each.null]
    rows = [
        (
            rule,
            f"{sum(rule in each.killed_by for each in defects)} of {len(defects)}",
            f"{sum(rule in each.killed_by for each in nulls)} of {len(nulls)}",
        )
        for rule in RULES
    ]
    return _table(("rule, on the same cases", "defects found", "correct rewrites that fail"), rows)


def _counts(
    names: Sequence[str], shares: Sequence[Mapping[str, tuple[int, int]]]
) -> Iterator[tuple[str, ...]]:
    for name in names:
        counts = [of_profile.get(name, (0, 0)) for of_profile in shares]
        yield (name, *(f"{killed} of {total}" for killed, total in counts))


def _fates(survivors: Sequence[str], found: Sequence[Totals]) -> Iterator[tuple[str, ...]]:
    for name in survivors:
        fates = [each.survived.get(name) for each in found]
        yield (f"`{name}`", *("killed" if x is None else f"survives seed {_listed(x)}" for x in fates))


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _table(head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [_row(head), _row(["---"] * len(head)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
