"""The check of which implementation ran sees through transforms, in both passes, and judges `auto` itself."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from attest.conformance.cases.case import Case
from attest.conformance.checks.implementation import implementations
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, profile_names, tasks
from attest.conformance.subject import Subject, find
from attest.kernels.call.call import Call
from attest.kernels.choice import choose
from attest.kernels.contract import Backward, Capabilities, Forward, Implementation, Passes, Settings
from tests.toys import toy, toy_attention

CASE = Case(q_len=5, kv_len=5, head_dim=4, seed=3)


def verdict(subject: Subject, case: Case = CASE) -> Result:
    (result,) = judge(subject, case, ("implementation",))
    return result


def called_back(x: Any) -> Any:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def copied(source: Any, target: Any) -> None:
    target[...] = source[...]


def in_pallas(x: Any) -> Any:
    return pl.pallas_call(copied, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def in_mosaic_gpu(x: Any) -> Any:
    """Traced anywhere, and run on a GPU alone."""
    run: Any = plgpu.kernel(copied, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return run(x)


def through(forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Callable[..., Any]:
    """The toy, its output and its cotangent each handed through something, deep in a program."""

    @jax.custom_vjp
    def passed(x: Any) -> Any:
        return deep(forward)(x)

    passed.defvjp(lambda x: (passed(x), None), lambda _, cotangent: (deep(backward)(cotangent),))
    return lambda *arrays, **options: passed(toy_attention(*arrays, **options))


def deep(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @jax.jit
    def run(x: Any) -> Any:
        def turn(_: Any, x: Any) -> Any:
            return jax.lax.cond(x.sum() > 0, function, lambda x: x, x)

        return jax.checkpoint(lambda x: jax.lax.fori_loop(0, 2, turn, x))(x)

    return run


def plain(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("forward", "backward", "meant", "words"),
    [
        (plain, plain, "xla", None),
        (called_back, called_back, "triton", None),
        (in_pallas, in_pallas, "pallas_tpu", None),
        (in_mosaic_gpu, in_mosaic_gpu, "mosaic_gpu", None),
        (
            plain,
            plain,
            "triton",
            "triton should have run, but xla ran the forward pass, xla ran the backward pass",
        ),
        (called_back, called_back, "xla", "xla should have run, but triton ran the forward pass"),
        (in_pallas, in_pallas, "triton", "triton should have run, but pallas_tpu ran the forward pass"),
        (in_mosaic_gpu, in_mosaic_gpu, "xla", "xla should have run, but mosaic_gpu ran the forward pass"),
        (
            in_mosaic_gpu,
            in_pallas,
            "mosaic_gpu",
            "mosaic_gpu should have run, but pallas_tpu ran the backward pass",
        ),
        (
            in_mosaic_gpu,
            in_pallas,
            "pallas_tpu",
            "pallas_tpu should have run, but mosaic_gpu ran the forward pass",
        ),
        (in_mosaic_gpu, in_pallas, frozenset({"mosaic_gpu", "pallas_tpu"}), None),
        (
            in_mosaic_gpu,
            plain,
            frozenset({"mosaic_gpu", "triton"}),
            "mosaic_gpu or triton should have run, but xla ran the backward pass",
        ),
        (called_back, plain, "triton", "triton should have run, but xla ran the backward pass"),
        (plain, called_back, "xla", "xla should have run, but triton ran the backward pass"),
    ],
)
def test_another_implementation_than_was_meant_fails(
    forward: Callable[[Any], Any], backward: Callable[[Any], Any], meant: str, words: str | None
) -> None:
    result = verdict(toy(through(forward, backward), implementation=lambda _case: meant))
    assert result.verdict is (Verdict.PASS if words is None else Verdict.FAIL), result.message
    assert result.message.startswith(words or "")


def as_a_call(params: Any) -> Callable[[Any], Any]:
    return lambda x: pl.pallas_call(copied, jax.typeof(x), compiler_params=params)(x)


def on_a_mesh(x: Any) -> Any:
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    return pl.kernel(copied, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), mesh=mesh)(x)


@pytest.mark.parametrize(
    ("launch", "compiler"),
    [
        (in_mosaic_gpu, "mosaic_gpu"),
        (jax.vmap(in_mosaic_gpu), "mosaic_gpu"),
        (as_a_call(plgpu.CompilerParams()), "mosaic_gpu"),
        (as_a_call(pltpu.CompilerParams()), "pallas_tpu"),
        (as_a_call(None), "pallas_tpu"),
        (on_a_mesh, "pallas_tpu"),
    ],
)
def test_each_way_to_launch_a_pallas_kernel_is_known(launch: Callable[[Any], Any], compiler: str) -> None:
    program = jax.make_jaxpr(launch)(jnp.zeros((8, 128)))
    assert implementations(program) == {compiler}


def test_two_in_one_program_are_both_named() -> None:
    both = through(lambda x: in_pallas(called_back(x)), plain)
    result = verdict(toy(both, implementation=lambda _case: "triton"))
    assert result.verdict is Verdict.FAIL
    assert "pallas_tpu and triton ran the forward pass" in result.message


def test_what_is_meant_follows_the_case() -> None:
    subject = toy(implementation=lambda case: "triton" if case.causal else "xla")
    assert verdict(subject).verdict is Verdict.PASS
    assert verdict(subject, Case(q_len=5, kv_len=5, causal=True)).verdict is Verdict.FAIL


class Elsewhere:
    """The properties of a device that is not here."""

    def __init__(self, platform: str, compute_capability: str | None) -> None:
        self.platform = self.device_kind = platform
        if compute_capability is not None:
            self.compute_capability = compute_capability


CAPABILITIES = {"ampere": "8.0", "hopper": "9.0"}


def believe(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX and the Triton kernels believe in a device that is not here: calls are traced for it, no more."""
    capability = CAPABILITIES.get(device)
    platform = device if capability is None else "gpu"
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda: [Elsewhere(platform, capability)])
    if capability is not None:
        pytest.importorskip("jax_triton")
        for name in ("attest.kernels.triton.passes", "attest.kernels.triton.launch"):
            module = importlib.import_module(name)
            monkeypatch.setattr(module, "target_device", lambda: f"sm_{capability.replace('.', '')}")


@pytest.fixture(params=["ampere", "hopper", "tpu"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    believe(request.param, monkeypatch)
    return request.param


FEATURES = [
    {},
    {"causal": True, "soft_cap": 5.0},
    {"bias": "bhq", "dropout": 0.5, "sinks": 2, "lengths": ((2, 3), (2, 1))},
    {"mask": "1h", "segments": 2, "normalized": False},
]


def meant_for(device: str, case: Case) -> str:
    if device == "hopper" and case.dtype != "float32":
        return "mosaic_gpu"
    return "pallas_tpu" if device == "tpu" else "triton"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_our_kernels_are_known_by_their_launches(
    features: dict[str, Any], dtype: str, elsewhere: str
) -> None:
    """By the primitives of jax-triton and of Pallas, which say for what compiler; in both passes."""
    case = replace(CASE, **features, dtype=dtype)
    for meant, expected in ((meant_for(elsewhere, case), Verdict.PASS), ("xla", Verdict.FAIL)):
        result = verdict(replace(find("auto"), implementation=lambda _case, meant=meant: meant), case)
        assert result.verdict is expected, result.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_kernels_do_not_take_runs_in_xla(dtype: str, elsewhere: str) -> None:
    """A head dim of 257, by the choice; the subject is told to take it."""
    subject = replace(find("auto"), head_dims=(1, 300), implementation=lambda _case: "xla")
    result = verdict(subject, replace(CASE, head_dim=257, dtype=dtype))
    assert result.verdict is Verdict.PASS, result.message


def test_a_call_without_pairs_cannot_tell() -> None:
    result = verdict(toy(implementation=lambda _case: "triton"), Case(q_len=2, kv_len=0))
    assert result.verdict is Verdict.INCONCLUSIVE


def test_a_subject_that_names_none_is_not_asked() -> None:
    assert verdict(toy()).verdict is Verdict.UNSUPPORTED
    assert not any("implementation" in task.checks for task in tasks(toy(), load_profile("quick"), 0))


def test_a_subject_that_raises_is_blamed() -> None:
    def raises(*_arrays: Any, **_options: Any) -> Any:
        raise RuntimeError("no such kernel")

    result = verdict(toy(raises, implementation=lambda _case: "xla"))
    assert result.verdict is Verdict.FAIL
    assert "no such kernel" in result.message


@pytest.mark.parametrize(
    ("device", "meant"),
    [("cpu", "xla"), ("ampere", "triton"), ("hopper", "mosaic_gpu"), ("hopper", "triton")],
)
def test_a_choice_that_goes_wrong_is_seen(device: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `auto` itself: what should run is not asked of the code that chooses."""
    believe(device, monkeypatch)
    auto, case = find("auto"), replace(CASE, dtype="bfloat16")
    assert verdict(auto, case).verdict is Verdict.PASS
    wrong = Implementation(meant, Capabilities(), lambda: Passes(wrong_forward, wrong_backward))
    monkeypatch.setattr(choose, "IMPLEMENTATIONS", (wrong,))
    result = verdict(auto, case)
    assert result.verdict is Verdict.FAIL
    should = "mosaic_gpu or triton" if device == "hopper" else meant
    assert f"{should} should have run, but pallas_tpu ran the forward pass" in result.message


def wrong_forward(_settings: Settings, call: Call) -> Forward:
    """What the wrong choice runs."""
    batch, q_length, heads, _ = call.query.shape
    zeros = jnp.zeros((batch, heads, q_length), jnp.float32)
    return Forward(in_pallas(toy_attention(call.query, call.key, call.value)), zeros, zeros)


def wrong_backward(_settings: Settings, call: Call, _terms: Any, _kept: Any) -> Backward:
    return Backward(*(jnp.zeros_like(x) for x in (call.query, call.key, call.value)), None)


def test_auto_is_asked_each_feature_in_every_profile_that_judges_kernels() -> None:
    auto = find("auto")
    for name in profile_names():
        profile = load_profile(name)
        assert ("delegated" in profile.kinds) == ("drawn" in profile.kinds)
    quick = tuple(tasks(auto, load_profile("quick"), 0))
    held = [task.case for task in quick if {"implementation", "forward", "gradients"} <= set(task.checks)]
    assert {feature for case in held for feature in case.features} == auto.features
    assert {case.dtype for case in held} == set(auto.dtypes)
    assert len(quick) < 25


@pytest.mark.parametrize(("device", "subject"), [("cpu", "xla.flash_attention"), ("ampere", "triton.cuda")])
def test_auto_declares_the_arithmetic_of_what_should_run(
    device: str, subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    believe(device, monkeypatch)
    auto, kernel = find("auto"), find(subject)
    tiling = kernel.tilings[-1]
    for dtype in auto.dtypes:
        assert auto.numerics(dtype, auto.tilings[0]) == kernel.numerics(dtype, tiling)
    assert auto.ready() == kernel.ready()


def test_auto_declares_the_arithmetic_of_the_kernels_that_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper: of Triton in float32, in 16 bits of the Hopper kernels with the fewest keys of either."""
    believe("hopper", monkeypatch)
    auto, of_triton, of_hopper = find("auto"), find("triton.cuda"), find("pallas.mosaic_gpu")
    for dtype in auto.dtypes:
        mine = auto.numerics(dtype, auto.tilings[0])
        alone, other = (x.numerics(dtype, x.tilings[-1]) for x in (of_hopper, of_triton))
        if dtype == "float32":
            assert mine == other
        else:
            assert mine == replace(alone, key_block=other.key_block)
            assert (mine.exponential, mine.tanh) == (other.exponential, max(alone.tanh, other.tanh))


@pytest.mark.parametrize("device", ["cpu", "ampere", "hopper"])
def test_auto_says_what_should_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    believe(device, monkeypatch)
    auto = find("auto")
    assert auto.implementation is not None
    for dtype in auto.dtypes:
        for dropout in (0.0, 0.5):
            case = replace(CASE, dtype=dtype, dropout=dropout)
            meant = {"xla"} if device == "cpu" else {meant_for(device, case)}
            # On Hopper GPUs Triton computes what it is faster at.
            meant |= {"triton"} if device == "hopper" else set()
            assert auto.implementation(case) == meant


def test_auto_is_ready_where_all_that_should_run_are(monkeypatch: pytest.MonkeyPatch) -> None:
    believe("hopper", monkeypatch)
    auto = find("auto")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert auto.ready() is None
    monkeypatch.setattr("attest.conformance.subjects.triton.find_spec", lambda name: None)
    assert auto.ready() == find("triton.cuda").ready() == "needs the package triton, which is not installed"


def test_auto_says_where_it_declares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert find("auto").ready() == "declares no arithmetic for tpu"
