"""What the XLA kernels declare is what they do."""

import math
from dataclasses import replace

import pytest

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


@pytest.mark.found_outside
def test_pieces_in_float16_declare_that_large_gradients_of_logits_are_scaled_down() -> None:
    """Values of 60 and dropout of 0.9 take |dO| |V| past float16; small dS beside them then become 0."""
    pieces = find("xla.pieces")
    case = Case(
        dropout=0.9, dropout_seed=0, dtype="float16", family="offset", head_dim=64, kv_heads=2, kv_len=9,
        origin=(1, 2, 3, 8), q_heads=2, q_len=191, scale=3.3, seed=2883989443, segment_pattern="mixed",
        segments=3, sink_pattern="extreme", sinks=17, sinks_per_head=True, tiling=-1,
    )  # fmt: skip
    assert judge(pieces, case, ["gradients"])[0].verdict is Verdict.PASS
    silent = replace(pieces, numerics=lambda *of: replace(pieces.numerics(*of), d_logits_below=math.inf))
    (found,) = judge(silent, case, ["gradients"])
    assert found.message == "outside the error model: dquery (bound), dkey (bound)"
