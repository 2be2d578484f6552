"""Workloads: the shape and the options of one attention call, and its inputs."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attest.conformance.cases.case import Case

DTYPE = "bfloat16"

type Inputs = dict[str, jax.Array]


@dataclass(frozen=True)
class Workload:
    """One attention call; features are off by default.

    length: queries. key_length: keys, as many as queries by default. key_heads: as many as query heads by
    default. value_dim: head_dim by default. causal: the last query is aligned with the last key.
    segment: length of the equal segments that each sequence is packed from. window: keys a query sees, itself
    and those before it. after: how many after it, of a window. chunk: positions in a chunk. sinks: sink
    logits a head. bias: one of [1, heads, length, key_length]. key_mask: a mask of padding keys, [batch, 1,
    1, key_length]. lengths: cumulative lengths of a padded batch, all of its queries and some of its keys.
    With either, a batch entry has from half of the keys to all. alibi: slopes of the heads. dtype: of all
    arrays but those of integers and slopes.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    key_length: int | None = None
    key_heads: int | None = None
    value_dim: int | None = None
    causal: bool = False
    segment: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: int = 0
    bias: bool = False
    dropout: float = 0.0
    after: int = 0
    chunk: int | None = None
    key_mask: bool = False
    lengths: bool = False
    alibi: bool = False
    dtype: str = DTYPE

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.key_length or self.length

    @property
    def key_lengths(self) -> np.ndarray:
        """The number of keys of each batch entry, without padding, [batch]."""
        if not (self.key_mask or self.lengths):
            return np.full(self.batch, self.keys)
        return np.random.default_rng(0).integers(self.keys // 2, self.keys + 1, self.batch)

    @property
    def shape(self) -> str:
        """The shape in words: batch x queries x keys, query heads on key heads, head dim."""
        heads = f"{self.heads} on {self.key_heads}" if self.key_heads else f"{self.heads}"
        tokens = f"{self.length}" if self.keys == self.length else f"{self.length}x{self.keys}"
        value = f"/{self.value_dim}" if self.value_dim else ""
        return f"{self.batch}x{tokens}, {heads}, {self.head_dim}{value}"

    @property
    def switched_on(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value not in (None, False, 0) and (name, value) != ("dtype", DTYPE)
        }

    @property
    def case(self) -> Case:
        """The case of the same shape and features, by which a Subject says whether it takes the workload."""
        return Case(
            dtype=self.dtype,
            batch=self.batch,
            q_len=self.length,
            kv_len=self.keys,
            q_heads=self.heads,
            kv_heads=self.key_heads or self.heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            causal=self.causal,
            window=None if self.window is None else (self.window - 1, self.after),
            segments=self.segment and -(-self.length // self.segment),
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            sinks_per_head=self.sinks > 0,
            bias="1hq" if self.bias else None,
            dropout=self.dropout,
            chunk_size=self.chunk,
            mask="b11k" if self.key_mask else None,
            lengths=tuple((self.length, int(x)) for x in self.key_lengths) if self.lengths else None,
            alibi="heads" if self.alibi else None,
        )


def options(workload: Workload, inputs: Inputs) -> dict[str, Any]:
    """Return the options that the workload switches on, under the names of docs/reference/semantics.md."""
    found: dict[str, Any] = {}
    if workload.causal:
        found["causal"] = True
    if workload.window is not None:
        found["sliding_window"] = (workload.window - 1, workload.after)
    if workload.chunk is not None:
        found["chunk_size"] = workload.chunk
    if workload.soft_cap is not None:
        found["logits_soft_cap"] = workload.soft_cap
    if workload.dropout:
        found |= {"dropout_prob": workload.dropout, "dropout_seed": inputs["seed"]}
    if workload.bias:
        found["bias"] = inputs["bias"]
    if workload.key_mask:
        found["attention_mask"] = inputs["mask"]
    if workload.lengths:
        found |= {"cum_seqlens_q": inputs["cum_q"], "cum_seqlens_k": inputs["cum_k"]}
    if workload.alibi:
        found["alibi_slopes"] = inputs["slopes"]
    if workload.sinks:
        found["softmax_aux"] = inputs["sinks"]
    if workload.segment is not None:
        found |= {"q_segment_ids": inputs["segments"], "kv_segment_ids": inputs["segments"]}
    return found


@partial(jax.jit, static_argnums=0)
def draw(workload: Workload) -> Inputs:
    """Return normal query, key, value and cotangent, and what the features need, made on the device."""
    names = ("query", "key", "value", "d_out", "bias", "sinks")
    seeds: dict[str, jax.Array] = dict(
        zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True)
    )
    queries, keys = (workload.batch, workload.length), (workload.batch, workload.keys)
    key_heads = workload.key_heads or workload.heads
    value_dim = workload.value_dim or workload.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "query": (*queries, workload.heads, workload.head_dim),
        "key": (*keys, key_heads, workload.head_dim),
        "value": (*keys, key_heads, value_dim),
        "d_out": (*queries, workload.heads, value_dim),
    }
    if workload.bias:
        shapes["bias"] = (1, workload.heads, workload.length, workload.keys)
    if workload.sinks:
        shapes["sinks"] = (workload.heads, workload.sinks)
    inputs = {name: jax.random.normal(seeds[name], shape, workload.dtype) for name, shape in shapes.items()}
    if workload.segment is not None:
        ids = jnp.arange(workload.length, dtype=jnp.int32) // workload.segment
        inputs["segments"] = jnp.broadcast_to(ids, queries)
    if workload.key_mask:
        shown = np.arange(workload.keys) < workload.key_lengths[:, None]
        inputs["mask"] = jnp.asarray(shown[:, None, None, :])
    if workload.lengths:
        each = np.arange(workload.batch + 1) * workload.length
        inputs["cum_q"] = jnp.asarray(each, jnp.int32)
        inputs["cum_k"] = jnp.asarray(np.cumsum([0, *workload.key_lengths]), jnp.int32)
    if workload.alibi:
        inputs["slopes"] = jnp.exp2(
            -8.0 * jnp.arange(1, workload.heads + 1, dtype=jnp.float32) / workload.heads
        )
    if workload.dropout:
        inputs["seed"] = jnp.array([7, 0], jnp.uint32)
    return inputs
