"""Judges one subject of this process until the first red result; what `package_score` runs with a mutant.

    python -m attest.conformance.mutants.killing SUBJECT PROFILE SEED CHECK

Cases of few features and few tokens come first, those of a check before others. It prints one JSON object:
how many results were judged, and the red one or null; or why the subject cannot run here.
"""

import json
import sys
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.judging.trial import Trial
from attest.conformance.mutants.verdict import decided_by
from attest.conformance.running.expectations import expect, load_expectations
from attest.conformance.running.judge import judge_trial
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import find


def first_kill(subject: str, profile: str, seed: int, check: str) -> dict[str, Any]:
    """Return what is printed."""
    import jax

    found = find(subject)
    reason = found.why_not_here(jax.default_backend())
    if reason is not None:
        return {"reason": reason}
    known = load_expectations()
    planned = [one for task in tasks(found, load_profile(profile), seed) for one in task.cases]
    results = 0
    for case, checks in sorted(planned, key=lambda one: _rank(one[0], check in one[1])):
        for asked in checks:
            results += 1
            (result,) = judge_trial(Trial(found, case), [asked])
            result = expect(result, known)
            if result.verdict.red:
                return {"results": results, "red": decided_by(result)}
    return {"results": results, "red": None}


def _rank(case: Case, near: bool) -> tuple[bool, int, int, str]:
    return not near, len(case.features), case.batch * case.q_heads * case.q_len * case.kv_len, case.id


if __name__ == "__main__":
    print(json.dumps(first_kill(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])))
