"""What the XLA kernels declare is what they do."""

from dataclasses import replace

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import find

FLASH = find("xla.flash_attention")
# Values of one sign: each partial sum over keys is larger than the one before.
LONG = Case(family="uniform", head_dim=18, kv_heads=2, q_heads=2, q_len=6, kv_len=1024, tiling=-1)


def test_a_small_problem_sums_over_all_keys_at_once() -> None:
    assert judge(FLASH, LONG, ["forward"])[0].verdict is Verdict.PASS
    blocked = replace(FLASH, numerics=lambda *of: replace(FLASH.numerics(*of), dot_keys=None))
    (found,) = judge(blocked, LONG, ["forward"])
    assert found.verdict is Verdict.FAIL
    assert found.message == "outside the error model: out (z)"


def test_with_block_sizes_of_its_own_it_sums_block_by_block() -> None:
    for tiling in (0, 1):
        assert FLASH.numerics("float32", FLASH.tilings[tiling]).dot_keys is None
        assert judge(FLASH, replace(LONG, tiling=tiling), ["forward"])[0].verdict is Verdict.PASS
