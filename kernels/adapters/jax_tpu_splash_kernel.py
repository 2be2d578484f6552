"""The function that splash attention makes of a mask, on our kernels: `SplashAttentionKernel`."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax

from attest.kernels.adapters.segments import as_segments
from attest.kernels.adapters.shared import renamed
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import refuse
from attest.kernels.operations.functions import flash_attention

type Result = jax.Array | tuple[jax.Array, tuple[jax.Array]]

# JAX's names of what the kernels refuse.
NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attention_mask": "mask",
    "sliding_window": "mask",
    "chunk_size": "mask",
    "q_offset": "mask",
    "softmax_aux": "sinks",
    "logits_soft_cap": "attn_logits_soft_cap",
    "q_segment_ids": "segment_ids.q",
    "kv_segment_ids": "segment_ids.kv",
}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["mask"],
    meta_fields=["shape", "options", "is_mqa", "save_residuals"],
)
@dataclass(frozen=True, eq=False)
class SplashAttentionKernel:
    """A function of q, k and v with a mask, as a pytree.

    shape: of the mask, [heads, Sq, Sk]. mask: an array, if options do not say it.
    """

    mask: jax.Array | None
    shape: tuple[int, int, int]
    options: tuple[tuple[str, Any], ...]
    is_mqa: bool
    save_residuals: bool

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: Any = None, sinks: Any = None
    ) -> Result:
        """Compute attention: out [H, Sq, Dv], or with save_residuals (out, (lse,)), lse [H, Sq] float32.

        q: [H, Sq, D], already scaled. k, v: [Hkv, Sk, D] and [Hkv, Sk, Dv]; without heads in MQA.
        segment_ids: an object with q [Sq] and kv [Sk], integers. sinks: [H] float.

        Raises: ValueError naming the argument.
        """
        query, key, value = (x.swapaxes(0, 1) for x in self._with_heads(q, k, v))
        if self.shape != (q.shape[0], q.shape[1], key.shape[0]):
            expected = f"{(q.shape[0], q.shape[1], key.shape[0])}: heads, queries and keys"
            refuse("mask", f"shape {self.shape}", expected, "Make the kernel with a mask of these sizes.")
        given: dict[str, Any] = {"softmax_scale": 1.0, **dict(self.options), **_segments(segment_ids)}
        if self.mask is not None:
            given["attention_mask"] = self.mask
        if sinks is not None:
            check_is_array("sinks", sinks)
            if sinks.shape != (q.shape[0],):
                refuse("sinks", f"shape {sinks.shape}", f"({q.shape[0]},)", "Give each query head one.")
            given["softmax_aux"] = sinks[:, None]
        with renamed(NAMES):
            if not self.save_residuals:
                return flash_attention(query, key, value, **given).swapaxes(0, 1)
            out, lse = flash_attention_with_lse(query, key, value, **given)
        return out.swapaxes(0, 1), (lse,)

    def manual_sharding_spec(self, sharding: Any) -> NoReturn:
        """Refuse to split the mask by hand.

        Raises: NotImplementedError.
        """
        raise NotImplementedError(
            "manual_sharding_spec: got a call; expected none, since a part of a mask lacks its place in the "
            "whole. Call the kernel outside jax.shard_map, with q, k and v sharded by heads; for a sequence "
            "that is split over devices, use attest.kernels.ring.ring_attention."
        )

    def _with_heads(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Return the arrays, each with an axis of heads."""
        for name, x, axes in (("q", q, 3), ("k", k, 3 - self.is_mqa), ("v", v, 3 - self.is_mqa)):
            check_is_array(name, x)
            if x.ndim != axes:
                refuse(name, f"shape {x.shape}", f"{axes} axes", "Map a batch with jax.vmap.")
        return (q, k[None], v[None]) if self.is_mqa else (q, k, v)


def _segments(ids: Any) -> dict[str, Any]:
    if ids is None:
        return {}
    if not (hasattr(ids, "q") and hasattr(ids, "kv")):
        expected = "None, or SegmentIds with q and kv"
        refuse("segment_ids", f"a {type(ids).__name__}", expected, "Pass SegmentIds(q, kv).")
    return as_segments("segment_ids.q", ids.q, "segment_ids.kv", ids.kv)
