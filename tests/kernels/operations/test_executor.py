"""The executor and the functions: what they compute is what the public function computes."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import attest
from attest.kernels import operations, xla
from attest.kernels.operations import (
    Attention,
    AttentionConfig,
    ConfigSelectorChain,
    Executor,
    FlashAttention,
    FlashAttentionConfig,
    FwdParams,
    MaskInfo,
    create_default_executor,
    overlay_cache,
)
from tests.kernels.kernel_cases import normal, qkv
from tests.kernels.operations.toy import first_refused

SIZES = xla.Config(xla.ChunkSizes(16, 32), xla.ChunkSizes(32, 16))
QKV = qkv(2, 40, 40, 4, 2, 16, 16)


def same(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_the_examples_of_the_page_run_as_written():
    query, key, value = QKV
    mask_info = MaskInfo.from_segments(jnp.zeros((2, 40), int))
    executor = create_default_executor()
    out = executor(FlashAttention(), query, key, value, causal=True, softmax_scale=0.125)
    same(out, attest.flash_attention(query, key, value, causal=True, softmax_scale=0.125))
    out, weights = operations.attention(query, key, value, mask_info=mask_info, causal=True)
    assert weights.shape == (2, 4, 40, 40)
    same(out, xla.attention(query, key, value, mask_info=mask_info, causal=True)[0])


def test_positional_arguments_are_in_the_order_of_ejkernel():
    query, key, value = QKV
    bias, sinks = normal(1, 4, 40, 40), normal(4, 2)
    cum = jnp.array([0, 33, 60])
    same(
        operations.flash_attention(query, key, value, bias, cum, cum, sinks),
        attest.flash_attention(
            query, key, value, bias=bias, cum_seqlens_q=cum, cum_seqlens_k=cum, softmax_aux=sinks
        ),
    )
    rng = jax.random.key(3)
    drops: Any = {"dropout_prob": 0.3, "deterministic": False}
    same(
        operations.attention(query, key, value, bias, rng, sinks, **drops),
        xla.attention(query, key, value, bias=bias, dropout_rng=rng, softmax_aux=sinks, **drops),
    )


def test_the_program_is_that_of_the_public_function():
    query, key, value = QKV
    options: Any = {"causal": True, "logits_soft_cap": 3.0}

    def program(call):
        return str(jax.make_jaxpr(jax.grad(lambda q: call(q, key, value, **options).sum()))(query))

    assert program(operations.flash_attention) == program(attest.flash_attention)


def test_transforms_go_through():
    query, key, value = QKV
    ours, plain = (
        partial(call, causal=True) for call in (operations.flash_attention, attest.flash_attention)
    )

    def loss(call, q):
        return (call(q, key, value) ** 2).sum()

    def scanned(call):
        return lax.scan(lambda q, _: (call(q, key, value), None), query, length=2)[0]

    for transformed in (
        lambda call: jax.jit(call)(query, key, value),
        lambda call: jax.grad(partial(loss, call))(query),
        lambda call: jax.grad(jax.checkpoint(partial(loss, call)))(query),
        lambda call: jax.vmap(lambda q: call(q[None], key[:1], value[:1]))(query),
        scanned,
    ):
        same(transformed(ours), transformed(plain))


def test_the_config_that_is_given_is_the_one_that_runs(monkeypatch):
    """By cfg, by an overlay, and by the memory cache; and no other one under the policy "heuristics"."""
    query, key, value = QKV
    seen: list[Any] = []
    real = attest.kernels.attention.flash_attention

    def spy(*args: Any, **options: Any) -> Any:
        seen.append(options.get("config"))
        return real(*args, **options)

    monkeypatch.setattr(attest.kernels.attention, "flash_attention", spy)
    executor = create_default_executor()
    call = partial(executor, FlashAttention(), query, key, value)
    given = FlashAttentionConfig(config=SIZES)
    call(cfg=given)
    with overlay_cache({"flash_attention": given}):
        call()
    call()
    inv = operations.executor.invocation(FlashAttention(), (), {"query": query, "key": key, "value": value})
    executor.chooser.cache.put(*inv.key, given)
    call()
    assert seen == [SIZES, SIZES, None, SIZES]


def test_neutral_sizes_become_those_of_the_implementation():
    query, key, value = QKV
    executor = create_default_executor()
    cfg = FlashAttentionConfig(FwdParams(q_blocksize=16, num_warps=4))
    explained = executor.explain(FlashAttention(), query, key, value, cfg=cfg)
    assert explained.complete.config.forward == xla.ChunkSizes(16, 256)
    assert explained.unused == ("fwd_params.num_warps: xla has no such size",)
    assert "unused: fwd_params.num_warps" in str(explained)
    same(
        executor(FlashAttention(), query, key, value, cfg=cfg),
        attest.flash_attention(query, key, value, config=xla.Config(xla.ChunkSizes(16, 256))),
    )
    named = FlashAttentionConfig(FwdParams(num_warps=4), platform="xla")
    with pytest.raises(ValueError, match=r"fwd_params.num_warps: got 4; expected 'xla' to choose it"):
        executor(FlashAttention(), query, key, value, cfg=named)


def test_a_tuned_call_runs_with_the_winner_and_another_process_reads_it(monkeypatch):
    monkeypatch.setattr(attest.kernels.configs.tunable, "MOST_CANDIDATES", 1)
    query, key, value = qkv(1, 300, 300, 1, 1, 8, 8)
    executor, judged = first_refused()
    record = executor.tune(FlashAttention(), query, key, value, causal=True)
    assert record.candidates[0].verdict == "wrong"
    winner = record.winner()
    assert winner.config in [x.config.config for x in record.candidates[1:]]
    assert executor.choose_config(FlashAttention(), query, key, value, causal=True) == winner
    assert create_default_executor().choose_config(FlashAttention(), query, key, value, causal=True) == winner
    assert judged[0].implementation == "xla"
    assert judged[0].backward
    assert isinstance(judged[0].arguments["query"], jax.ShapeDtypeStruct)
    assert judged[0].arguments["causal"] is True


def test_an_option_that_is_its_default_changes_no_key():
    """So that the functions, which pass all options on, find what was tuned for the operation."""
    plain = FlashAttention().prepare(*QKV, causal=True)
    zero = float("0")  # another object than the default
    assert FlashAttention().prepare(*QKV, causal=True, dropout_prob=zero) == plain
    assert FlashAttention().prepare(*QKV, causal=True, dropout_prob=False)[1]["dropout_prob"] is False


def test_judges_get_plain_arguments():
    """One batch dimension, no MaskInfo, an integer seed: what a judge without our types reads."""
    query, key, value = (x.reshape(1, *x.shape) for x in QKV)
    seed = jax.random.key(5)
    arguments = {
        "query": query, "key": key, "value": value, "dropout_prob": 0.2, "dropout_seed": seed,
        "mask_info": MaskInfo.from_segments(jnp.zeros((2, 40), int)).apply_causal(),
    }  # fmt: skip
    plain = FlashAttention().plain(arguments)
    assert plain["query"] == jax.ShapeDtypeStruct((2, 40, 4, 16), "float32")
    assert isinstance(plain["dropout_seed"], int)
    assert plain["causal"] is True
    assert "mask_info" not in plain
    arrays = dict(zip(("query", "key", "value"), QKV, strict=True))
    same(
        attest.flash_attention(**{**plain, **arrays}),
        attest.flash_attention(**arguments).reshape(QKV[0].shape),
    )


def test_compile_returns_a_program():
    query, key, value = QKV
    executor = create_default_executor()
    program = executor.compile(FlashAttention(), query, key, value, causal=True)
    same(
        program(query=query + 1, key=key, value=value),
        attest.flash_attention(query + 1, key, value, causal=True),
    )
    with pytest.raises(TypeError):
        program(query=query[:, 1:], key=key, value=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platform": "metal"}, "platform: got 'metal'; expected one of"),
        ({"platform": "cuda"}, "platform: got 'cuda'"),
        ({"platform": "pallas"}, "got 'pallas' and 'cpu'; expected a kernel of 'flash_attention'"),
        ({"cfg": AttentionConfig()}, "cfg: got a AttentionConfig; expected a FlashAttentionConfig"),
        ({"cfg": FlashAttentionConfig(backend="gpu")}, "backend: got 'gpu'; expected 'any' or 'cpu'"),
        (
            {"cfg": FlashAttentionConfig(platform="triton"), "platform": "xla"},
            "platform: got 'xla'; expected 'triton', the platform of cfg",
        ),
        ({"out_specs": jax.sharding.PartitionSpec()}, "mesh: got none beside out_specs; expected mesh"),
        ({"mesh": 3, "in_specs": (), "out_specs": ()}, "mesh: got a int; expected a jax.sharding.Mesh"),
        ({"dropout_prob": 0.1}, "dropout_seed: got None; expected a seed"),
    ],
)  # fmt: skip
def test_malformed_calls_are_one_sentence(options, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        operations.flash_attention(*QKV, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_unknown_arguments_are_refused():
    executor = Executor(ConfigSelectorChain())
    with pytest.raises(TypeError, match="speed: no such argument; expected some of query, key"):
        executor(FlashAttention(), *QKV, speed=3)
    with pytest.raises(TypeError, match="query: got it by position and by name"):
        executor(FlashAttention(), *QKV, query=QKV[0])


@pytest.mark.parametrize(
    ("op", "got"), [(FlashAttention, "the class FlashAttention"), (operations.flash_attention, "a function")]
)
def test_what_is_no_operation_is_refused(op, got):
    with pytest.raises(ValueError, match=f"op: got {got}; expected an operation, such as FlashAttention"):
        Executor()(op, *QKV)


def test_attention_says_what_it_does_not_use():
    executor = Executor[Any, Any]()
    cfg = AttentionConfig(block_q=64, num_warps=4)
    explained = executor.explain(Attention(), *QKV, cfg=cfg)
    assert [x.partition(":")[0] for x in explained.unused] == ["block_q", "num_warps"]
    same(executor(Attention(), *QKV, cfg=cfg), xla.attention(*QKV))
    with pytest.raises(ValueError, match="platform: got 'triton'; expected 'auto' or 'xla'"):
        operations.attention(*QKV, platform="triton")
    with pytest.raises(ValueError, match="cfg: got a FlashAttentionConfig; expected an AttentionConfig"):
        executor(Attention(), *QKV, cfg=FlashAttentionConfig())
