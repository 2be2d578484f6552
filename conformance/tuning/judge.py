"""The judge that the suite installs for tuners: it finds the Subject of a candidate's implementation."""

from attest.conformance.judging.candidates.judge import judge_candidate
from attest.conformance.subjects.auto import declared_by
from attest.kernels.operations.judging import CandidateCall, Judgement


def judge(call: CandidateCall) -> Judgement:
    """Return whether a candidate is right, as `judge_candidate` does, by the Subjects of our own kernels."""
    return judge_candidate(call, declared_by)
