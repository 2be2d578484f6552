"""The groups of a `KernelSpec` that a checked call decides: one function for each."""

import math

import jax

from attest.kernels.call.call import Call
from attest.kernels.contract import Settings
from attest.kernels.numerics.exponents import LOG2E, LOWEST
from attest.kernels.numerics.philox import least_kept
from attest.kernels.triton.blocks import BlockSizes
from attest.kernels.triton.spec import Dropout, Logits, PairAxes, Shape, Softmax

# A scale from here on is multiplied with before anything else.
_LARGEST_UNIT = 2.0**100
# Bits from which on a weight relative to a rounded reference leaves what P is cast to: it is within 2**16 of
# what it should be in rows of 2**29 bits, within 2**4 in those of 2**27.
_HUGE_BITS = {"float32": 2.0**29, "bfloat16": 2.0**29, "float16": 2.0**27}


def describe_shape(call: Call, sizes: BlockSizes) -> Shape:
    """Return the sizes of a call and of its tiles."""
    _, q_length, heads, head_dim = call.query.shape
    k_length, k_heads, value_dim = call.value.shape[1:]
    return Shape(
        head_dim=head_dim,
        value_dim=value_dim,
        k_heads=k_heads,
        group=heads // k_heads,
        block_q=sizes.q,
        block_k=sizes.k,
        even_q=q_length % sizes.q == 0,
        even_k=k_length % sizes.k == 0,
        aligned_k=k_length % 16 == 0,
    )


def describe_logits(settings: Settings, call: Call) -> Logits:
    """Return how the logits of a call are computed."""
    cap, scale, slopes = call.logits_soft_cap, call.softmax_scale, call.alibi_slopes
    # The scale can wait for the exponent where nothing comes between, and where it keeps the order of logits;
    # in bits it must be finite.
    between = (call.bias, cap, slopes)
    folded = (
        all(x is None for x in between) and settings.logits_dtype == "float32" and 0 < scale < _LARGEST_UNIT
    )
    nats = scale if folded else cap or 1.0
    return Logits(
        scale=1.0 if folded else scale,
        unit=nats * LOG2E,
        nats=nats,
        cap=cap or 0.0,
        dtype=settings.logits_dtype,
        precision=settings.precision,
        bias=describe_pairs(call.bias),
        alibi=slopes is not None,
        slopes_by_batch=slopes is not None and slopes.shape[0] > 1,
    )


def describe_pairs(x: jax.Array | None) -> PairAxes | None:
    """Return which axes of a mask or a bias are not broadcast; None without one."""
    return None if x is None else PairAxes(*(size > 1 for size in x.shape))


def describe_dropout(call: Call) -> Dropout | None:
    """Return how pairs are dropped; None where none is."""
    if call.dropout_seed is None:
        return None
    return Dropout(
        threshold=least_kept(call.dropout_prob),
        kept_scale=1.0 / (1.0 - call.dropout_prob),
        by_batch="b" not in call.dropout_shared,
        by_head="h" not in call.dropout_shared,
    )


def describe_softmax(settings: Settings, call: Call, unit: float) -> Softmax:
    """Return the softmax of the forward kernel; `row_unit` says what the largest possible logits need."""
    power = 2.0 ** math.floor(math.log2(unit / LOG2E))
    sinks = call.softmax_aux
    return Softmax(
        power=power,
        huge=_HUGE_BITS[call.query.dtype.name],
        lowest=LOWEST / max(power, 1.0),
        sinks=0 if sinks is None else sinks.shape[-1],
        sinks_by_head=sinks is not None and sinks.shape[0] > 1,
        normalize=settings.normalize_output,
    )
