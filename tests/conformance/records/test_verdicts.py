"""Which verdicts fail a run."""

from attest.conformance.record import Verdict


def test_what_is_wrong_or_was_not_judged_fails_a_run() -> None:
    red = {verdict for verdict in Verdict if verdict.red}
    assert red == {Verdict.FAIL, Verdict.TIMEOUT, Verdict.ERROR, Verdict.XPASS}
