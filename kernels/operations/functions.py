"""The functions `flash_attention` and `attention`: operations with a default executor each."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from attest.kernels.annotations import (
    AlibiSlopes,
    AttentionMask,
    Bias,
    CumSeqlens,
    DropoutSeed,
    DropoutShared,
    Flag,
    Key,
    KVPositions,
    KVRange,
    KVSegmentIds,
    Number,
    Origin,
    Out,
    QOffset,
    QPositions,
    QSegmentIds,
    Query,
    RandomKey,
    Sinks,
    Size,
    SlidingWindow,
    Value,
    Weights,
)
from attest.kernels.arguments import by_name, with_arguments
from attest.kernels.call.options import NAMES_OF_FLAX, check_names_of_flax
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.attention import Attention
from attest.kernels.operations.configs import AttentionConfig, FlashAttentionConfig
from attest.kernels.operations.executor import Executor, create_default_executor
from attest.kernels.operations.flash_attention import FlashAttention
from attest.kernels.operations.policy import AutotunePolicy
from attest.kernels.operations.selector import ConfigSelectorChain

_FLASH_ATTENTION = FlashAttention()
_ATTENTION = Attention()


@cache
def default_executor() -> Executor[FlashAttentionConfig, Out]:
    """Return the executor of `flash_attention`: caches on disk and in memory, then the tables."""
    return create_default_executor()


@cache
def _attention_executor() -> Executor[AttentionConfig, tuple[Out, Weights]]:
    return Executor(ConfigSelectorChain(policy=AutotunePolicy(allow_autotune=False)))


@dataclass(frozen=True, eq=False)
class FlashAttentionArguments:
    """The arguments of one call of `flash_attention` as they were given."""

    query: Query
    key: Key
    value: Value
    bias: Bias | None = None
    cum_seqlens_q: CumSeqlens | None = None
    cum_seqlens_k: CumSeqlens | None = None
    softmax_aux: Sinks | None = None
    _: KW_ONLY
    mask_info: MaskInfo | None = None
    attention_mask: AttentionMask | None = None
    softmax_scale: Number | None = None
    dropout_prob: Number = 0.0
    causal: Flag = False
    dropout_seed: DropoutSeed | None = None
    sliding_window: SlidingWindow | None = None
    logits_soft_cap: Number | None = None
    normalize_output: Flag = True
    precision: Any = None
    logits_dtype: Any = None
    q_segment_ids: QSegmentIds | None = None
    kv_segment_ids: KVSegmentIds | None = None
    q_offset: QOffset | None = None
    q_positions: QPositions | None = None
    kv_positions: KVPositions | None = None
    kv_start: KVRange | None = None
    kv_end: KVRange | None = None
    alibi_slopes: AlibiSlopes | None = None
    dropout_shared: DropoutShared | None = None
    chunk_size: Size | None = None
    origin: Origin | None = None
    platform: str | None = None
    cfg: FlashAttentionConfig | None = None
    mesh: Mesh | None = None
    in_specs: Sequence[PartitionSpec | None] | None = None
    out_specs: PartitionSpec | None = None
    mask: None = None
    dropout_rng: None = None


@with_arguments(FlashAttentionArguments)
def flash_attention(arguments: FlashAttentionArguments) -> Out:
    """Compute flash attention with the configuration that fits the call: out [B, Sq, Hq, Dv].

    Arguments that `attest.flash_attention` has mean the same here; the order is that of ejKernel's function
    of this name.

    Args:
        platform: "auto", "triton", "pallas", "xla", or the name of an implementation.
        cfg: the configuration. By default the caches', if the call was tuned, else the tables' choice.
        mesh: a mesh whose axes split batch and heads by `jax.shard_map`.
        in_specs: with mesh; the specs of the seven first arguments, None for what is whole on each device.
        out_specs: with mesh; the spec of out.
        mask, dropout_rng: refused, as in `attest.flash_attention`.

    Raises: ValueError naming the argument; what `attest.flash_attention` raises.
    """
    check_names_of_flax(arguments.mask, arguments.dropout_rng)
    given = {name: x for name, x in by_name(arguments).items() if name not in NAMES_OF_FLAX}
    return default_executor()(_FLASH_ATTENTION, **given)


@dataclass(frozen=True, eq=False)
class WeightsArguments:
    """The arguments of one call of `attention` as they were given."""

    query: Query
    key: Key
    value: Value
    bias: Bias | None = None
    dropout_rng: RandomKey | None = None
    softmax_aux: Sinks | None = None
    _: KW_ONLY
    mask_info: MaskInfo | None = None
    attention_mask: AttentionMask | None = None
    init_bias: Callable[[], Bias] | None = None
    deterministic: Flag = True
    softmax_scale: Number | None = None
    logits_soft_cap: Number | None = None
    dtype: Any = None
    softmax_dtype: Any = None
    dropout_prob: Number = 0.0
    causal: Flag = False
    sliding_window: SlidingWindow | None = None
    dropout_seed: DropoutSeed | None = None
    cum_seqlens_q: CumSeqlens | None = None
    cum_seqlens_k: CumSeqlens | None = None
    q_segment_ids: QSegmentIds | None = None
    kv_segment_ids: KVSegmentIds | None = None
    q_offset: QOffset | None = None
    q_positions: QPositions | None = None
    kv_positions: KVPositions | None = None
    kv_start: KVRange | None = None
    kv_end: KVRange | None = None
    alibi_slopes: AlibiSlopes | None = None
    dropout_shared: DropoutShared | None = None
    chunk_size: Size | None = None
    origin: Origin | None = None
    platform: str | None = None
    cfg: AttentionConfig | None = None


@with_arguments(WeightsArguments)
def attention(arguments: WeightsArguments) -> tuple[Out, Weights]:
    """Compute attention and return its weights: out [B, Sq, Hq, Dv], weights [B, Hq, Sq, Sk].

    Arguments mean what they mean in `attest.kernels.xla.attention`, which computes it; the order is that of
    ejKernel's function of this name. Both results have `dtype`, that of query by default. platform is None,
    "auto" or "xla". Memory is O(Sq * Sk): where no weights are needed, `flash_attention` is the one to call.

    Raises: ValueError naming the argument.
    """
    return _attention_executor()(_ATTENTION, **by_name(arguments))
