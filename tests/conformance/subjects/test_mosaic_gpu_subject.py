"""The Hopper subject: run where it can be, its blocks the kernels' own, and asked enough."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.cases.build import build
from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.clauses import CLAUSES
from attest.conformance.drawing.production import load_production
from attest.conformance.judging.execute import call_of, differentiated, forward_and_gradients, to_jax
from attest.conformance.judging.trial import Trial
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import find
from attest.conformance.subjects.mosaic_gpu import FEWEST_KEYS, PRODUCTION_BLOCKS
from tests.conformance.subjects.crossed import blocks_crossed

SUBJECT = find("pallas.mosaic_gpu")
FUSED = find("pallas.mosaic_gpu.fused")


class Device:
    device_kind = "some device"

    def __init__(self, **described: Any) -> None:
        vars(self).update(described)


@pytest.mark.parametrize("described", [{}, {"compute_capability": "8.0"}, {"compute_capability": "gfx942"}])
def test_without_a_hopper_gpu_it_says_so(described: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(**described)])
    expected = "needs a GPU of compute capability 9.0, this machine has some device"
    assert SUBJECT.why_not_here("gpu") == expected
    assert SUBJECT.why_not_here("cpu") == "runs on gpu, this machine has cpu"


def test_with_one_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [Device(compute_capability="9.0")])
    assert SUBJECT.why_not_here("gpu") is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 256), (2, 2, 5, 1, 256)])
def test_arrays_of_any_rank_reach_the_kernel(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused, and why, is for the kernel to say, which also merges further batch dimensions."""
    from attest.kernels.pallas import mosaic_gpu

    def shapes(*arrays: Any, **_: Any) -> list[tuple[int, ...]]:
        return [x.shape for x in arrays]

    monkeypatch.setattr(mosaic_gpu, "flash_attention_with_lse", shapes)
    for subject in (SUBJECT, FUSED):
        for tiling in subject.tilings:
            got = subject.call(*(np.zeros(shape),) * 3, bias=np.zeros(shape[1:]), **tiling.options)
            assert got == [shape] * 3


def test_a_tiling_gives_every_kernel_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from attest.kernels.pallas import mosaic_gpu
    from attest.kernels.pallas.mosaic_gpu.blocks import Blocks

    given: list[dict[str, Any]] = []

    def spy(*_arrays: Any, **options: Any) -> None:
        given.append(options)

    monkeypatch.setattr(mosaic_gpu, "flash_attention_with_lse", spy)
    for tiling in SUBJECT.tilings:
        SUBJECT.call(*(np.zeros((1, 1, 1, 1)),) * 3, causal=True, **tiling.options)
    small, production = SUBJECT.tilings
    blocks, backward = given[0]["fwd_params"], given[0]["bwd_params"]
    assert isinstance(blocks, Blocks)
    assert (blocks.own, blocks.k) == (small.query_block, small.key_block)
    assert (backward.backward_query.own, backward.backward_query.step) == (small.query_block, small.key_block)
    for chosen in vars(backward).values():
        assert isinstance(chosen, mosaic_gpu.BackwardBlocks)
        assert chosen.step == FEWEST_KEYS
    assert backward.backward_key.separate
    assert given == [{"causal": True, "fwd_params": blocks, "bwd_params": backward}, {"causal": True}]
    assert (production.query_block, production.key_block) == PRODUCTION_BLOCKS


@pytest.mark.parametrize(
    ("head_dim", "options", "step"),
    [
        (64, {}, 128),
        (40, {"causal": True}, 128),
        (128, {"causal": True, "logits_soft_cap": 3.0}, 64),
        (80, {}, None),
        (256, {}, None),
        (512, {}, None),
        (64, {"sliding_window": (1, 1)}, None),
        (64, {"bias": np.zeros((1, 1, 1, 3), np.float32)}, None),
        (64, {"no_such_option": 3}, None),
    ],
)
def test_one_subject_asks_for_the_fused_kernel_where_there_is_one(
    head_dim: int, options: dict[str, Any], step: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attest.kernels.pallas import mosaic_gpu

    given: list[Any] = []

    def spy(*_arrays: Any, bwd_params: Any = None, **_options: Any) -> None:
        given.append(None if bwd_params is None else bwd_params.backward_key)

    monkeypatch.setattr(mosaic_gpu, "flash_attention_with_lse", spy)
    FUSED.call(*(np.zeros((1, 3, 2, head_dim), np.float16),) * 3, **options)
    (chosen,) = given
    assert (None if chosen is None else (chosen.fused, chosen.step)) == (
        None if step is None else (True, step)
    )


def test_the_quick_gate_reaches_the_fused_kernel_with_each_feature_across_blocks() -> None:
    planned = tuple(tasks(FUSED, load_profile("quick"), seed=0))
    cases = [case for task in planned for case, names in task.cases if "gradients" in names]
    fused = [case for case in cases if not 64 < max(case.head_dim, case.value_dim or 0) <= 96]
    assert len(fused) >= 10
    assert frozenset().union(*(case.features for case in fused)) == FUSED.features
    (tiling,) = FUSED.tilings
    assert tiling.query_block is not None
    assert tiling.key_block is not None
    for causal in (False, True):
        across = [
            case
            for case in fused
            if case.q_len > tiling.query_block and case.kv_len > tiling.key_block and case.causal == causal
        ]
        assert across


def test_the_declared_blocks_are_those_of_the_kernels() -> None:
    from attest.kernels.pallas.mosaic_gpu.blocks import choose, choose_backward, head_dims

    chosen = choose(128, 128, ())
    assert (chosen.own, chosen.k) == PRODUCTION_BLOCKS
    steps: set[int] = set()
    for dims in head_dims():
        for work in ((), ("cap",), ("cap", "pairs", "ranges")):
            steps |= {choose(*dims, work).k, choose_backward("backward_query", *dims, work).step}
    assert min(steps) == FEWEST_KEYS
    assert all(SUBJECT.numerics("float16", tiling).key_block == FEWEST_KEYS for tiling in SUBJECT.tilings)


def test_the_small_blocks_fit_at_the_largest_head_dim() -> None:
    case = Case(dtype="bfloat16", q_len=70, kv_len=70, head_dim=SUBJECT.head_dims[1], bias="111")
    built = build(case, SUBJECT.semantics)
    call = call_of(built)
    run = jax.jit(forward_and_gradients(SUBJECT, 0, call.options, differentiated(SUBJECT, call)))
    cotangents = (jnp.asarray(built.cotangents.out), jnp.asarray(built.cotangents.lse))
    program = jax.export.export(run, platforms=["cuda"])(to_jax(call.arrays), *cotangents).mlir_module()
    for kernel in ("forward", "backward_query", "backward_key", "backward_bias"):
        assert f"flash_{kernel}" in program


def test_the_quick_gate_asks_all_that_it_declares() -> None:
    """Every clause of one device, in each dtype across blocks both ways."""
    checks = all_checks()
    planned = tuple(tasks(SUBJECT, load_profile("quick"), seed=0))
    covered = {
        clause
        for task in planned
        for case, names in task.cases
        for name in names
        for clause in checks[name].clauses(Trial(SUBJECT, case))
    }
    assert covered == set(CLAUSES) - {"S21"}
    held = [task.case for task in planned if "gradients" in task.checks]
    assert frozenset().union(*(case.features for case in held)) == SUBJECT.features
    for dtype in SUBJECT.dtypes:
        asked = [case for case in held if case.dtype == dtype]
        assert any(min(blocks_crossed(SUBJECT, case)) >= 2 for case in asked)
        assert any(case.kv_len >= 1024 for case in asked), "too short for the statistics of rounding errors"


def test_every_problem_of_production_size_that_it_declares_is_planned() -> None:
    planned = [task.case for task in tasks(SUBJECT, load_profile("production"), seed=0)]
    declared = [case for case in load_production() if case.dtype != "float32"]
    assert [replace(case, tiling=0) for case in planned] == declared
    assert {case.tiling for case in planned} == {len(SUBJECT.tilings) - 1}
