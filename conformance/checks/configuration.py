"""The choice of a configuration: the programs show that the intended one ran (S20).

A configuration decides block sizes, and these are in the program of a call. So each way in which a call may
get its configuration is compared with the kernel itself, called with the configuration that should run.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from attest.conformance.checks import Check, Finding
from attest.conformance.checks.implementation import passes
from attest.conformance.judging.trial import Trial
from attest.conformance.kinds import CONFIGURATION
from attest.conformance.record import Verdict
from attest.conformance.subject import Subject, Tiling

# Where an object is in memory, which differs between equal programs.
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _run(trial: Trial) -> Finding:
    @cache
    def program(call: Callable[..., Any]) -> str:
        subject = replace(trial.subject, call=call, tilings=(Tiling(),))
        return "\n".join(_ADDRESS.sub("", str(traced)) for traced in passes(subject, trial).values())

    wrong: list[str] = []
    for way in trial.subject.ways:
        meant = program(way.meant)
        others = {name: program(call) for name, call in way.others.items()}
        alike = [name for name, other in others.items() if other == meant]
        if alike:
            return Finding(
                Verdict.INCONCLUSIVE, message=f"{way.name}: {alike[0]} gives the program that is meant"
            )
        ran = program(way.call)
        if ran != meant:
            what = next((name for name, other in others.items() if other == ran), "another program")
            wrong.append(f"{way.name}: {what} ran, not the configuration that was meant")
    return Finding(Verdict.FAIL if wrong else Verdict.PASS, message="; ".join(wrong))


def _applies(subject: Subject) -> str | None:
    return None if subject.ways else "declares no ways in which a call gets its configuration"


CHECKS = (
    Check("configuration", kind=CONFIGURATION, clauses=lambda _trial: ("S20",), run=_run, applies=_applies),
)
