"""The Subjects of ring attention: their tilings are devices and strategies, with one answer."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import Subject, Tiling, discover, find
from attest.conformance.subjects import ring
from attest.kernels.call.positions import KEY_GROUP
from attest.kernels.ring.arguments import STRATEGIES

DEVICES = 8
here = pytest.mark.process(devices=DEVICES, PJRT_NPROC="64")
OUTSIDE, INSIDE = find("ring.xla"), find("ring.xla.inside")
RINGS = (OUTSIDE, INSIDE)
# What several devices must agree on: order, ids, sinks, dropped pairs, heads that share keys.
CASE = Case(
    q_len=16, kv_len=32, q_heads=4, kv_heads=2, head_dim=4, causal=True, segments=2, sinks=1, dropout=0.3
)


def test_every_kernel_has_a_ring_from_outside_and_inside() -> None:
    names = {name for name in discover() if name.startswith("ring.")}
    on_cpus = ("xla", "triton.interpret", "pallas.tpu_interpret")
    on_gpus = ("triton.cuda", "pallas.mosaic_gpu", "triton.cuda.4_gpus", "pallas.mosaic_gpu.4_gpus")
    kernels = (*on_cpus, *on_gpus)
    assert names == {f"ring.{kernel}{way}" for kernel in kernels for way in ("", ".inside")}


@pytest.mark.parametrize("kernel", ["triton.cuda", "pallas.mosaic_gpu"])
def test_a_ring_of_gpus_runs_on_two_of_them_and_another_on_four(kernel: str) -> None:
    for name, most in ((kernel, 2), (f"{kernel}.4_gpus", 4)):
        tilings = [tiling.options for way in ("", ".inside") for tiling in find(f"ring.{name}{way}").tilings]
        assert max(options["devices"] for options in tilings) == most
        assert {options["strategy"] for options in tilings} == set(STRATEGIES)


@pytest.mark.parametrize("devices", [1, pytest.param(DEVICES, marks=here)])
def test_a_ring_needs_its_devices(devices: int) -> None:
    there = jax.local_device_count()
    assert there >= devices
    reason = None if there >= DEVICES else f"needs a process with {DEVICES} devices, and JAX has {there}"
    assert [subject.ready() for subject in RINGS] == [reason, reason]


@pytest.mark.parametrize("kernel", ["triton.cuda", "pallas.mosaic_gpu", "triton.interpret"])
def test_pieces_on_other_kernels_have_the_keys_that_dropout_draws_at_once(kernel: str) -> None:
    subject = find(f"ring.{kernel}.inside")
    for tiling in subject.tilings:
        pieces = tiling.options["devices"] * (2 if tiling.options["strategy"] == "zigzag" else 1)
        assert subject.limits.length_multiple % (pieces * KEY_GROUP) == 0
        assert tiling.options["devices"] <= (DEVICES if subject.backend == "cpu" else 4)


@pytest.mark.parametrize("subject", RINGS, ids=lambda subject: subject.name)
def test_the_tilings_have_every_strategy(subject: Subject) -> None:
    assert {tiling.options["strategy"] for tiling in subject.tilings} == set(STRATEGIES)
    assert len({tuple(tiling.options.items()) for tiling in subject.tilings}) == len(subject.tilings)
    most = max(2 * t.options["devices"] for t in subject.tilings if t.options["strategy"] == "zigzag")
    assert subject is OUTSIDE or subject.limits.length_multiple % most == 0


def test_the_quick_profile_has_every_feature_and_choice_of_a_ring() -> None:
    for subject in RINGS:
        planned = [case for task in tasks(subject, load_profile("quick"), 0) for case, _ in task.cases]
        assert {feature for case in planned for feature in case.features} == subject.features
        assert {case.tiling for case in planned} >= set(range(len(subject.tilings)))


def test_a_ring_declares_a_merge_for_each_piece_of_the_keys() -> None:
    declared = find("xla.flash_attention").numerics("bfloat16", Tiling({}, 256, 256))
    splits = {("ring", 4): 4, ("zigzag", 4): 8, ("all_gather", 4): 1, ("ulysses", 4): 1}
    for (strategy, devices), count in splits.items():
        numerics = OUTSIDE.numerics("bfloat16", Tiling({"devices": devices, "strategy": strategy}))
        assert numerics == replace(declared, splits=count)


@pytest.mark.parametrize(
    ("heads", "key_heads", "strategy"),
    [(4, 2, "ulysses"), (4, 1, "ulysses"), (4, 4, "ulysses"), (3, 3, "all_gather"), (2, 1, "all_gather")],
)
def test_heads_that_devices_cannot_share_out_are_gathered(heads: int, key_heads: int, strategy: str) -> None:
    assert ring._possible("ulysses", 4, heads, key_heads) == strategy
    assert ring._possible("zigzag", 4, heads, key_heads) == "zigzag"


def test_inside_the_columns_of_a_bias_are_split_and_the_rows_of_a_mask() -> None:
    pairs, one_row = jnp.zeros((1, 2, 16, 16)), jnp.zeros((16, 1))
    assert ring._spec(pairs, ring._SPLIT["bias"]) == P(None, None, None, "sequence")
    assert ring._spec(pairs, ring._SPLIT["attention_mask"]) == P(None, None, "sequence", None)
    assert ring._spec(one_row, ring._SPLIT["bias"]) == P("sequence", None)
    assert ring._spec(jnp.zeros((1, 1)), ring._SPLIT["bias"]) == P(None, None)


@here
@pytest.mark.parametrize("subject", RINGS, ids=lambda subject: subject.name)
def test_every_choice_gives_the_same_answer(subject: Subject) -> None:
    for tiling in range(len(subject.tilings)):
        found = judge(subject, replace(CASE, tiling=tiling), ("forward", "lse", "gradients"))
        assert {result.verdict for result in found} == {Verdict.PASS}, subject.tilings[tiling].options
