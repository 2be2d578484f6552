"""`mha` of `jax.experimental.pallas.ops.gpu.attention` on our kernels, with its signature.

The page docs/how-to/adapters-peers.md lists what differs.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax

from attest.kernels.adapters.segments import as_segments
from attest.kernels.adapters.shared import check_word, renamed, top_left
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import check_flag, check_scale, check_size, refuse
from attest.kernels.operations.functions import flash_attention

_NAMES = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True)
class BlockSizes:
    """Hold the block sizes of JAX's kernel, which have no effect here: our kernels choose their own."""

    block_q: int
    block_k: int
    block_q_dkv: int | None = None
    block_kv_dkv: int | None = None
    block_q_dq: int | None = None
    block_kv_dq: int | None = None

    @classmethod
    def get_default(cls) -> "BlockSizes":
        """Return JAX's default."""
        return cls(128, 128, 32, 32, 32, 32)


_DEFAULT_BLOCKS = BlockSizes.get_default()


def mha(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sm_scale: float = 1.0,
    causal: bool = False,
    block_sizes: Any = _DEFAULT_BLOCKS,
    backward_pass_impl: str = "triton",
    num_warps: int | None = None,
    num_stages: int = 2,
    grid: None = None,
    interpret: bool = False,
    debug: bool = False,
    return_residuals: bool = False,
) -> jax.Array | list[jax.Array]:
    """Compute attention as JAX's `mha` does: out [B, Sq, H, D], in the dtype of q.

    Args:
        q: [B, Sq, H, D] of float32, bfloat16 or float16.
        k: [B, Sk, H, D], the dtype of q.
        v: [B, Sk, H, D], the dtype of q.
        segment_ids: [B, Sk] integers; row i has the id of key i. A pair is visible if its ids are equal;
            negative ids are ids like others. Needs Sq <= Sk.
        sm_scale: of the logits.
        causal: whether query i sees only keys 0 to i: `q_offset=0` (S23), for any lengths.
        block_sizes: without effect, like backward_pass_impl, num_warps, num_stages, interpret and debug.
        backward_pass_impl: "triton" or "xla".
        num_warps: None or a positive integer.
        num_stages: a positive integer.
        grid: None.
        interpret: True or False.
        debug: True or False.
        return_residuals: whether to return [out, lse]: lse [B, H, Sq] float32, the logarithm to base 2 of
            the sum of exp over the visible logits, as in JAX. Here the two are differentiable.

    Lengths need not be multiples of blocks, k and v may have fewer heads than q, and v another head dim.
    Hidden keys contribute nothing, even NaN (S4).

    Raises: ValueError naming the argument.
    """
    _check_options(block_sizes, backward_pass_impl, num_warps, num_stages, grid)
    check_flag("interpret", interpret)
    check_flag("debug", debug)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_is_array(name, x)
        if x.ndim != 4:
            expected = "4 axes [batch, length, heads, head_dim]"
            refuse(name, f"shape {x.shape}", expected, "Add the axis, or map with jax.vmap.")
    arguments: dict[str, Any] = {
        "query": q,
        "key": k,
        "value": v,
        "softmax_scale": check_scale("sm_scale", sm_scale),
        "causal": causal,
        **_segments(segment_ids, q, k),
    }
    if check_flag("causal", causal):
        arguments["q_offset"] = top_left(q, k)
    with renamed(_NAMES):
        if not check_flag("return_residuals", return_residuals):
            return flash_attention(**arguments)
        out, lse = flash_attention_with_lse(**arguments)
    return [out, lse * lse.dtype.type(1 / math.log(2))]


def _segments(ids: Any, q: jax.Array, k: jax.Array) -> dict[str, Any]:
    """Return the segment ids of both sides; rows have those of the first keys."""
    if ids is None:
        return {}
    check_is_array("segment_ids", ids)
    batch, rows = q.shape[:2]
    if ids.shape != (batch, k.shape[1]) or rows > k.shape[1]:
        expected = f"({batch}, {k.shape[1]}), with at least as many keys as the {rows} queries"
        advice = "Use attest.flash_attention, which takes ids for queries and for keys."
        refuse("segment_ids", f"shape {ids.shape}", expected, advice)
    return as_segments("segment_ids", ids[:, :rows], "segment_ids", ids)


def _check_options(blocks: Any, backward: Any, warps: Any, stages: Any, grid: Any) -> None:
    """Refuse malformed values of what has no effect."""
    sizes = [getattr(blocks, name, None) for name in ("block_q", "block_k")]
    if any(type(size) is not int for size in sizes):
        expected = "an object with block_q and block_k"
        refuse("block_sizes", f"a {type(blocks).__name__}", expected, "Leave it out.")
    check_word("backward_pass_impl", backward, ("triton", "xla"), "Leave it out.")
    if warps is not None:
        check_size("num_warps", warps)
    check_size("num_stages", stages)
    if grid is not None:
        refuse("grid", f"a {type(grid).__name__}", "None", "Our kernels choose their grid: leave it out.")
