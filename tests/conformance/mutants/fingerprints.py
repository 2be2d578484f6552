"""Compares the fingerprints of planted defects with what the defects do.

    python -m tests.conformance.mutants.fingerprints

takes some minutes, and writes docs/evidence/fingerprints.json and the page beside it. Each defect is judged
on the cases that killed it in the standard profile. A fingerprint is right if fingerprints.toml lists its
kind for the defect, and wrong otherwise.
"""

import argparse
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.cases.case import Case, case_from_json
from attest.conformance.judging.trial import Trial
from attest.conformance.mutants.catalogue import load
from attest.conformance.mutants.clean_kernel import Planted, planted_kernel
from attest.conformance.mutants.clean_score import read_kills
from attest.conformance.record import ACCURACY
from attest.conformance.running.judge import judge_trial

TABLE = Path(__file__).parents[3] / "docs" / "evidence" / "fingerprints.json"
# That values are not finite says nothing of the reason.
_NOT_FINITE = "not finite"
# How the text of a fingerprint of each kind is found.
KINDS = {
    _NOT_FINITE: r"NaN|inf$",
    "0": r"is 0$",
    "bfloat16": r"number of bfloat16",
    "factor": r"the right one times",
    "shift": r"the right one of the",
    "truncated": r"truncated",
}
OUTCOMES = ("right", _NOT_FINITE, "none", "wrong")
_PAGE = """\
# Fingerprints of planted defects

Written by `python -m tests.conformance.mutants.fingerprints`.

A failure says what its wrong values have in common, if that is known. Such a *fingerprint* is, for example,
`every wrong value is 0`. This page compares fingerprints with what the defects of
`conformance/mutants/groups/clean_kernel.toml` do. Each defect is judged on the cases that killed it in the
standard profile with the seeds {seeds}.

The rules of fingerprints were first written without these defects. On the cases of seed 0, fingerprints of
17 defects misled: the channels of one row, for example, have a common factor whatever the mistake is. The
rules were mended on those cases. On other cases of the first 175 defects, two more misled: a constant
looked like the value of another row, and float16 numbers of few bits like rounded ones. These rules were
mended, too. So the table shows that no planted defect has a wrong fingerprint any more. It does not show how
often another defect has one.

`tests/conformance/mutants/fingerprints.toml` lists which fingerprints are right for a defect, by what it
does. 83 defects are newer than the rules. Their fingerprints were read one by one before they were listed.
All say what the defect does; two defects of sinks multiply a result by a constant only where the sinks
outweigh every key. That values are not finite is a fact, which is neither right nor wrong: in a poisoned
case, NaN shows that the kernel read a value on which nothing may depend.

| the fingerprints of a case | of {cases} cases of {defects} defects |
|---|---|
{outcomes}

| fingerprint | cases where all are right | cases where one is wrong |
|---|---|---|
{kinds}

All fingerprints of finite values:

| the defect | output | fingerprint |
|---|---|---|
{shown}
"""


@cache
def true_kinds() -> dict[str, list[str]]:
    """The kinds of fingerprints that say what a defect does, by its name."""
    return tomllib.loads(Path(__file__).with_name("fingerprints.toml").read_text(encoding="utf-8"))


def kind_of(text: str) -> str:
    """The kind of a fingerprint."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, text))


def shown(kernel: Planted, case: Case) -> dict[str, list[str]]:
    """The fingerprints of each output that is wrong, empty for one that has none."""
    trial = Trial(kernel.subject, case)
    # An INCONCLUSIVE verdict needs them, and shows no fingerprint.
    trial.__dict__["blind_spots"] = ()
    return {
        measured.output: list(measured.fingerprints)
        for result in judge_trial(trial, ACCURACY)
        for measured in result.measurements
        if measured.broken
    }


def outcome(name: str, found: Mapping[str, Sequence[str]]) -> str:
    """right, none or wrong; or not finite, if that is all that is said."""
    kinds = _kinds(found)
    if kinds <= {_NOT_FINITE}:
        return _NOT_FINITE if kinds else "none"
    return "right" if kinds <= {*true_kinds().get(name, ()), _NOT_FINITE} else "wrong"


def rows(names: Iterable[str], seeds: Iterable[int]) -> list[dict[str, Any]]:
    """The rows of the table: a defect on a case that killed it, where its numbers are wrong at all."""
    defects, kills = load("clean_kernel"), read_kills()
    found: list[dict[str, Any]] = []
    for name in names:
        if defects[name].compiled:
            continue
        with planted_kernel(defects[name]) as kernel:
            for seed in seeds:
                case = case_from_json(kills[name]["standard"][str(seed)]["case"])
                texts = shown(kernel, case)
                if texts:
                    row = {
                        "defect": name,
                        "seed": seed,
                        "shown": texts,
                        "outcome": outcome(name, texts),
                    }
                    found.append(row)
    return found


def page(found: Sequence[Mapping[str, Any]]) -> str:
    """The page about the rows of the table."""
    outcomes = Counter(row["outcome"] for row in found)
    seeds = " and ".join(str(seed) for seed in sorted({row["seed"] for row in found}))
    counted = Counter((kind, row["outcome"]) for row in found for kind in _kinds(row["shown"]))
    changes = {name: defect.change for name, defect in load("clean_kernel").items()}
    shown = sorted(
        {
            (changes[row["defect"]], output, text)
            for row in found
            for output, texts in row["shown"].items()
            for text in texts
            if kind_of(text) != _NOT_FINITE
        }
    )
    return _PAGE.format(
        seeds=seeds,
        cases=len(found),
        defects=len({row["defect"] for row in found}),
        outcomes="\n".join(f"| {outcome} | {outcomes[outcome]} |" for outcome in OUTCOMES),
        kinds="\n".join(
            f"| {kind} | {counted[kind, 'right']} | {counted[kind, 'wrong']} |"
            for kind in KINDS
            if kind != _NOT_FINITE
        ),
        shown="\n".join(f"| {' | '.join(row)} |" for row in shown),
    )


def _kinds(found: Mapping[str, Sequence[str]]) -> set[str]:
    return {kind_of(text) for texts in found.values() for text in texts}


def main(arguments: list[str]) -> int:
    """Write the table; 1 if a fingerprint is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="*", help="names of defects")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args(arguments)
    found = rows(options.only or sorted(load("clean_kernel")), options.seed)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    options.out.with_suffix(".md").write_text(page(found), encoding="utf-8")
    for result in OUTCOMES:
        those = [row for row in found if row["outcome"] == result]
        print(f"{result}: {len(those)} of {len(found)}")
    return int(any(row["outcome"] == "wrong" for row in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
