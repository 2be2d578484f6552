"""The Subjects of operations: one for each kernel and way; sharded ones run over the devices there are."""

from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from attest.conformance.cases.case import Case
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import Subject, discover, find
from attest.conformance.subjects import _explicit
from attest.conformance.subjects._explicit import over_devices
from attest.kernels.operations import FlashAttention, sharded

DEVICES = 8
here = pytest.mark.process(devices=DEVICES)
JUDGED = (
    "xla.flash_attention",
    "triton.interpret",
    "triton.cuda",
    "pallas.tpu_interpret",
    "pallas.mosaic_gpu",
)
SHARDED = find("operation.xla.flash_attention.sharded")
# Eight query heads on as many devices share a key head, so that its gradient is summed over all of them.
SHARED_KEYS = Case(
    dtype="bfloat16", q_len=5, kv_len=6, q_heads=8, kv_heads=1, head_dim=4, value_dim=6, causal=True
)


def test_every_kernel_is_judged_below_the_operation_in_every_way() -> None:
    named = {f"operation.{kernel}.{way}" for kernel in JUDGED for way in ("explicit", "tuned", "sharded")}
    assert named == {name for name in discover() if name.count(".") > 2 and name.startswith("operation.")}
    for name in named:
        subject, kernel = find(name), find(name.removeprefix("operation.").rpartition(".")[0])
        assert subject.features == kernel.features
        assert subject.dtypes == kernel.dtypes
        assert subject.ways


@pytest.mark.parametrize("devices", [1, pytest.param(DEVICES, marks=here)])
def test_sharded_calls_need_several_devices(devices: int) -> None:
    assert jax.local_device_count() >= devices
    reason = None if jax.local_device_count() > 1 else "needs a process with several devices"
    assert SHARDED.ready() == reason


def arguments(batch: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    def shape(*sizes: int) -> Any:
        return jax.ShapeDtypeStruct(sizes, "float32")

    arrays = {"query": shape(batch, 6, heads, 4), "key": shape(batch, 8, kv_heads, 4)}
    return {**arrays, "value": arrays["key"], **{name: shape(*sizes) for name, sizes in others.items()}}


@pytest.mark.parametrize(
    ("call", "parts", "specs"),
    [
        # Batch and heads divide; keys do not, and one bias is for all heads.
        (
            arguments(2, 4, 2, bias=(2, 1, 6, 8), softmax_aux=(4, 2)),
            (2, 4),
            {"query": P("batch", None, "heads", None), "key": P("batch", None, None, None),
             "bias": P("batch", None, None, None), "softmax_aux": P("heads", None)},
        ),
        # Nothing but the heads divides.
        (
            arguments(1, 8, 8, cum_seqlens_q=(3,), cum_seqlens_k=(3,)),
            (1, 8),
            {"key": P("batch", None, "heads", None), "cum_seqlens_q": P(None), "bias": None},
        ),
    ],
)  # fmt: skip
def test_batch_and_heads_are_spread_as_far_as_they_divide(
    call: dict[str, Any], parts: tuple[int, int], specs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_explicit, "_mesh", lambda parts: parts)
    monkeypatch.setattr(jax, "local_device_count", lambda: DEVICES)
    where = over_devices(call)
    assert where["mesh"] == parts
    order = ("query", "key", "value", "bias", "cum_seqlens_q", "cum_seqlens_k", "softmax_aux")
    found = dict(zip(order, where["in_specs"], strict=True))
    assert {name: found[name] for name in specs} == specs
    assert where["out_specs"] == found["query"]


def verdicts(subject: Subject, case: Case, *checks: str) -> dict[str, Verdict]:
    return {result.check: result.verdict for result in judge(subject, case, checks)}


@here
def test_gradients_of_what_devices_share_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(SHARDED, SHARED_KEYS, "forward", "gradients") == {
        "forward": Verdict.PASS,
        "gradients": Verdict.PASS,
    }
    monkeypatch.setattr(sharded, "_widened", lambda x: x)
    broken = replace(SHARDED)  # a program of its own
    assert verdicts(broken, SHARED_KEYS, "gradients") == {"gradients": Verdict.FAIL}


@here
def test_a_sharded_call_that_ignores_its_configuration_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = (
        case
        for task in tasks(SHARDED, load_profile("quick"), 0)
        for case, checks in task.cases
        if checks == ("configuration",)
    )
    assert verdicts(SHARDED, case, "configuration") == {"configuration": Verdict.PASS}
    original = FlashAttention.create_shard_map_wrapper

    def ignoring(self: Any, *args: Any, cfg: Any, **kwargs: Any) -> Any:
        return original(self, *args, cfg=type(cfg)(), **kwargs)

    monkeypatch.setattr(FlashAttention, "create_shard_map_wrapper", ignoring)
    (result,) = judge(SHARDED, case, ("configuration",))
    assert result.message.startswith("an explicit one over a mesh: the tables' choice ran")


@pytest.mark.process(devices=2, PJRT_NPROC="16")
def test_rules_of_vmap_are_interpreted_too() -> None:
    small = Case(dtype="float32", batch=2, q_len=4, kv_len=4, q_heads=2, kv_heads=2, alibi="entries")
    subject = find("operation.pallas.tpu_interpret.sharded")
    assert verdicts(subject, small, "transforms.vmap") == {"transforms.vmap": Verdict.PASS}
