"""The judge of tuning candidates: right ones pass, planted defects do not."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest import flash_attention
from attest.conformance.tuning.judge import judge
from attest.kernels.operations.judging import CandidateCall, installed_judge
from tests.conformance.tuning.candidates import DEFECTS, candidate_call, correct, planted


@pytest.mark.parametrize("seed", range(2))
def test_a_right_candidate_passes(seed):
    judgement = judge(correct(seed))
    assert judgement.right, judgement.reason
    assert {"out", "dquery", "dkey", "dvalue"} <= set(judgement.statistics)


def test_many_right_candidates_pass():
    wrong = {seed: x.reason for seed in range(100, 200) if not (x := judge(correct(seed))).right}
    assert wrong == {}


@pytest.mark.parametrize("name", list(DEFECTS)[::4])
def test_a_wrong_candidate_does_not_pass(name):
    judgement = judge(planted(name, seed=1))
    assert not judgement.right
    assert not judgement.failed, judgement.reason


def test_none_of_a_thousand_wrong_candidates_passes():
    passed = [
        (name, seed) for name in DEFECTS for seed in range(1000, 1042) if judge(planted(name, seed)).right
    ]
    assert passed == []


LARGE = {
    "query": jax.ShapeDtypeStruct((1, 900, 4, 16), "bfloat16"),
    "key": jax.ShapeDtypeStruct((1, 900, 2, 16), "bfloat16"),
    "value": jax.ShapeDtypeStruct((1, 900, 2, 16), "bfloat16"),
    "bias": jax.ShapeDtypeStruct((1, 1, 1, 900), "float32"),
    "softmax_aux": jax.ShapeDtypeStruct((4, 1), "float32"),
    "causal": True,
    "dropout_prob": 0.2,
    "dropout_seed": 3,
}


def large(run) -> CandidateCall:
    return candidate_call(run, LARGE, 5)


def test_of_a_large_call_a_sample_is_judged_and_all_of_it_compared():
    judgement = judge(large(flash_attention))
    assert judgement.right, judgement.reason
    assert {"worst_ratio", "whole_ratio"} <= set(judgement.statistics["dkey"])
    assert set(judgement.statistics["dsoftmax_aux"]) == {"whole_ratio"}


@pytest.mark.parametrize("row", [500])
def test_one_row_of_a_large_call_is_enough(row):
    """Also where the sample misses it."""
    judgement = judge(large(lambda **given: flash_attention(**given).at[:, row, 1].set(jnp.nan)))
    assert not judgement.right
    assert judgement.reason.startswith("out is ")


def test_a_forward_call_is_judged_without_gradients():
    arguments = dict(correct(3).arguments)
    judgement = judge(candidate_call(flash_attention, arguments, 3, backward=False))
    assert judgement.right
    assert set(judgement.statistics) == {"out"}


def test_what_cannot_be_judged_says_so():
    call = correct(3)
    for arguments, reason in (
        ({"precision": "default"}, "precision: nobody declares the arithmetic of 'default'"),
        ({"dropout_prob": 1.5}, "the oracle does not take the call: dropout_prob"),
    ):
        judgement = judge(replace(call, arguments={**call.arguments, **arguments}))
        assert judgement.failed
        assert judgement.reason.startswith(reason)
    judgement = judge(replace(call, implementation="mosaic_gpu"))
    assert judgement.failed
    assert "nobody declares the arithmetic of 'mosaic_gpu' here" in judgement.reason


def test_other_bits_on_the_same_inputs_are_wrong():
    noise = iter(np.float32([0, 1e-6] * 9))

    def noisy(**given):
        shape = jax.ShapeDtypeStruct((), "float32")
        more = jax.pure_callback(lambda _: next(noise), shape, given["query"].reshape(-1)[0])
        return flash_attention(**given) + jax.lax.stop_gradient(more)

    call = correct(5)
    arguments = {name: x for name, x in call.arguments.items() if name in ("query", "key", "value")}
    wide = {name: jax.ShapeDtypeStruct(x.shape, "float32") for name, x in arguments.items()}
    judgement = judge(candidate_call(noisy, wide, 1, backward=False))
    assert judgement.reason == "out has other bits in a second call on the same inputs"


def test_the_judge_is_the_one_that_is_installed():
    installed_judge.cache_clear()
    assert installed_judge() in (judge, None)
