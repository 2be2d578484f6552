"""The shell of every flash kernel: its signature, its checks and its differentiation.

A backend supplies a forward and a backward pass over a checked `Call`; everything else is here, so that the
same words refuse the same calls and the same function is differentiated the same way everywhere.

The papers' symbols: S = scaled logits, P = probabilities, O = output, L = lse, dS and dP their cotangents,
Delta = rowsum(dO * O).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.arguments import Call, check_call
from attest.kernels.options import check_dtype, check_flag, refuse, shown
from attest.kernels.varying import vary_together


@dataclass(frozen=True)
class Settings:
    """What is static beside the call itself; block sizes and precision are what the backend makes them."""

    forward: Any
    backward: Any
    normalize_output: bool
    precision: Any
    logits_dtype: str


type ForwardPass = Callable[[Settings, Call], tuple[jax.Array, jax.Array, Any]]
type BackwardPass = Callable[[Settings, Call, jax.Array, jax.Array, Any, jax.Array, jax.Array], Call]


@dataclass(frozen=True)
class Passes:
    """What a backend supplies.

    check_forward, check_backward: from fwd_params and bwd_params as given to what `Settings` holds.
    check_precision: likewise from precision. All three raise ValueError naming the argument.
    forward: out, lse, and what else its backward pass keeps: at least the maximum over visible keys alone,
        [B, Hq, Sq] float32, -inf where a row sees none.
    backward: from the call, what forward returned and the cotangents of out and lse to the cotangents of the
        call's float arrays, in the arrays' own dtypes (S14, S15); see `attest.kernels.cotangents`.
    numerics: the paragraph of the docstring that states the arithmetic.
    """

    check_forward: Callable[[Any], Any]
    check_backward: Callable[[Any], Any]
    check_precision: Callable[[Any], Any]
    forward: ForwardPass
    backward: BackwardPass
    numerics: str


def flash_kernels(passes: Passes):
    """(flash_attention, flash_attention_with_lse) of a backend, of one signature."""

    # One jitted entry: an eager call compiles once per signature instead of retracing on every call.
    @partial(jax.jit, static_argnums=0)
    def attend(settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
        batch, q_length, q_heads, _ = call.query.shape
        if batch == 0:
            empty = jnp.zeros((0, q_length, q_heads, call.value.shape[3]), call.query.dtype)
            return empty, jnp.zeros((0, q_heads, q_length), jnp.float32)
        return _differentiable(passes, settings, vary_together(call))

    def flash_attention_with_lse(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        attention_mask: jax.Array | None = None,
        bias: jax.Array | None = None,
        softmax_scale: float | None = None,
        dropout_prob: float = 0.0,
        causal: bool = False,
        dropout_seed: int | jax.Array | None = None,
        cum_seqlens_q: jax.Array | None = None,
        cum_seqlens_k: jax.Array | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        fwd_params: Any = None,
        bwd_params: Any = None,
        logits_soft_cap: float | None = None,
        softmax_aux: jax.Array | None = None,
        normalize_output: bool = True,
        precision: Any = None,
        logits_dtype: Any = None,
        *,
        q_segment_ids: jax.Array | None = None,
        kv_segment_ids: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attention in O(length) memory: out [B, Sq, Hq, Dv], lse [B, Hq, Sq] float32 (natural logarithm).

        Args:
            query: [B, Sq, Hq, D]; key: [B, Sk, Hkv, D]; value: [B, Sk, Hkv, Dv]; one dtype of float32,
                bfloat16, float16.
            attention_mask: [B or 1, Hq or 1, Sq, Sk] bool or integer, non-zero may attend (S5).
            bias: [B or 1, Hq or 1, Sq or 1, Sk] float, added to the scaled logits before the cap (S2); -inf
                hides.
            softmax_scale: static; 1 / sqrt(D) by default (S1).
            dropout_prob, dropout_seed: S12; the seed is an int in [0, 2**64) or a uint32 [2] of its low and
                high words.
            causal, sliding_window: bottom-right aligned, per sequence under lengths (S6, S7).
            cum_seqlens_q, cum_seqlens_k: [n + 1] int32 or int64; packed where B is 1, padded where B is n
                (S9).
            fwd_params, bwd_params: the block sizes of the two passes, which results do not depend on beyond
                rounding (S18); None lets the kernel choose.
            logits_soft_cap: cap * tanh(logits / cap) (S3).
            softmax_aux: float sink logits (S11): [1, num_sinks], which all heads share, or [Hq, num_sinks];
                [num_sinks] is shared too, and refused where it could be one sink a head.
            normalize_output: False returns the numerator sum_j exp(t_j - m) v_j instead, m being the row
                maximum over the visible capped logits and the sinks. In differentiation m is a constant, so
                it equals out * exp(lse - stop_gradient(m)).
            precision: that of every dot; see the numerics.
            logits_dtype: the scaled dot products are rounded to it before bias, cap and softmax; float32 by
                default. Gradients pass through that rounding unchanged.
            q_segment_ids, kv_segment_ids: [B, Sq], [B, Sk] integer, negative is padding (S8).

        Rows that see no key: out 0, gradients 0, lse -inf, or logsumexp of the sinks unless the row is
        padding, when it is -inf (S9 to S11). A hidden key contributes nothing, NaN and inf included (S4); a
        visible non-finite value makes the channels it belongs to NaN in the rows that give it weight.

        Differentiable once in reverse mode, in query, key, value, bias and softmax_aux, for cotangents of out
        and lse.

        Raises: ValueError naming the argument (S20).
        """
        call = check_call(
            query,
            key,
            value,
            attention_mask=attention_mask,
            bias=bias,
            softmax_scale=softmax_scale,
            dropout_prob=dropout_prob,
            causal=causal,
            dropout_seed=dropout_seed,
            cum_seqlens_q=cum_seqlens_q,
            cum_seqlens_k=cum_seqlens_k,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
        )
        settings = Settings(
            forward=passes.check_forward(fwd_params),
            backward=passes.check_backward(bwd_params),
            normalize_output=check_flag("normalize_output", normalize_output),
            precision=passes.check_precision(precision),
            logits_dtype="float32" if logits_dtype is None else check_dtype("logits_dtype", logits_dtype),
        )
        return attend(settings, call)

    assert flash_attention_with_lse.__doc__ is not None
    flash_attention_with_lse.__doc__ += f"\n{passes.numerics}"
    return _without_lse(flash_attention_with_lse), flash_attention_with_lse


def check_precision[T](precision: Any, known: Mapping[Any, T], advice: str) -> T:
    """What a backend makes of `precision`: None, a name or a `jax.lax.Precision` that it knows."""
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    try:
        return known[precision]
    except (KeyError, TypeError):
        refuse("precision", shown(precision), f"one of {', '.join(map(repr, known))}", advice)


def check_blocks(name: str, blocks: Any, expected: tuple[type, ...], advice: str) -> Any:
    """Block sizes as a call gives them: None, or of one of the types that are expected."""
    if blocks is not None and not isinstance(blocks, expected):
        refuse(name, f"a {type(blocks).__name__}", " or ".join(x.__name__ for x in expected), advice)
    return blocks


def without_pairs(call: Call) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What a forward pass returns where there is no query or no key: only the sinks speak (S10, S11)."""
    batch, q_length, q_heads, _ = call.query.shape
    out = jnp.zeros((batch, q_length, q_heads, call.value.shape[3]), call.query.dtype)
    nothing = jnp.full((batch, q_heads, q_length), -jnp.inf, jnp.float32)
    if call.softmax_aux is None:
        return out, nothing, nothing
    sinks = call.softmax_aux.astype(jnp.float32)
    lse = jax.nn.logsumexp(sinks, axis=-1)[None, :, None]
    return out, jnp.broadcast_to(lse, nothing.shape), nothing


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(passes: Passes, settings: Settings, call: Call) -> tuple[jax.Array, jax.Array]:
    out, lse, _ = passes.forward(settings, call)
    return out, lse


def _with_residuals(
    passes: Passes, settings: Settings, call: Call
) -> tuple[tuple[jax.Array, jax.Array], tuple[Call, jax.Array, jax.Array, Any]]:
    out, lse, kept = passes.forward(settings, call)
    return (out, lse), (call, out, lse, kept)


def _cotangents(
    passes: Passes,
    settings: Settings,
    residuals: tuple[Call, jax.Array, jax.Array, Any],
    cotangents: tuple[jax.Array, jax.Array],
) -> tuple[Call]:
    return (passes.backward(settings, *residuals, *cotangents),)


_differentiable.defvjp(_with_residuals, _cotangents)


def _without_lse[**P](
    with_lse: Callable[P, tuple[jax.Array, jax.Array]],
) -> Callable[P, jax.Array]:
    @wraps(with_lse)
    def flash_attention(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
        return with_lse(*args, **kwargs)[0]

    flash_attention.__name__ = flash_attention.__qualname__ = "flash_attention"
    flash_attention.__doc__ = (
        "`flash_attention_with_lse` without the lse: out [B, Sq, Hq, Dv], dtype of query."
    )
    # What help and editors show: `wraps` has taken over what the other returns.
    flash_attention.__annotations__ = {**with_lse.__annotations__, "return": jax.Array}
    shown = inspect.signature(with_lse)
    vars(flash_attention)["__signature__"] = shown.replace(return_annotation=jax.Array)
    return flash_attention
