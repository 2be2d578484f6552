"""The arguments of an attention call in one record, and functions whose parameters are its fields."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import wraps
from inspect import Signature, signature
from typing import Any

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
    QOffset,
    QPositions,
    QSegmentIds,
    Query,
    Sinks,
    Size,
    SlidingWindow,
    Value,
)
from attest.kernels.call.call import Call, check_call
from attest.kernels.call.leading_axes import Leading, merged_arrays
from attest.kernels.contract import Implementation
from attest.kernels.masks.mask_info import MaskInfo


# Arrays do not compare to one bool.
@dataclass(frozen=True, eq=False)
class AttentionArguments:
    """The arguments of one call as they were given; see `attest.flash_attention` for their meaning."""

    query: Query
    key: Key
    value: Value
    attention_mask: AttentionMask | None = None
    bias: Bias | None = None
    softmax_scale: Number | None = None
    dropout_prob: Number = 0.0
    causal: Flag = False
    dropout_seed: DropoutSeed | None = None
    cum_seqlens_q: CumSeqlens | None = None
    cum_seqlens_k: CumSeqlens | None = None
    sliding_window: SlidingWindow | None = None
    fwd_params: Any = None
    bwd_params: Any = None
    logits_soft_cap: Number | None = None
    softmax_aux: Sinks | None = None
    normalize_output: Flag = True
    precision: Any = None
    logits_dtype: Any = None
    _: KW_ONLY
    q_segment_ids: QSegmentIds | None = None
    kv_segment_ids: KVSegmentIds | None = None
    q_offset: QOffset | None = None
    q_positions: QPositions | None = None
    kv_positions: KVPositions | None = None
    origin: Origin | None = None
    chunk_size: Size | None = None
    kv_start: KVRange | None = None
    kv_end: KVRange | None = None
    alibi_slopes: AlibiSlopes | None = None
    dropout_shared: DropoutShared | None = None
    mask_info: MaskInfo | None = None
    config: Any = None
    platform: str | Implementation | None = None
    mask: None = None
    dropout_rng: None = None


def by_name(arguments: Any) -> dict[str, Any]:
    """Return the fields of a record of arguments by name, as they are."""
    return dict(vars(arguments))


def merged[T: AttentionArguments](arguments: T) -> tuple[T, Leading | None]:
    """Return a call with one batch dimension, and the batch dimensions that were given (S27).

    Raises: ValueError naming the argument whose batch dimensions are others than those of query.
    """
    arrays, leading = merged_arrays(vars(arguments))
    return replace(arguments, **arrays), leading


def check_arguments(arguments: AttentionArguments) -> Call:
    """Return the checked call of arguments with one batch dimension and without a MaskInfo.

    Raises: ValueError naming the argument.
    """
    return check_call(
        arguments.query,
        arguments.key,
        arguments.value,
        attention_mask=arguments.attention_mask,
        bias=arguments.bias,
        softmax_scale=arguments.softmax_scale,
        dropout_prob=arguments.dropout_prob,
        causal=arguments.causal,
        dropout_seed=arguments.dropout_seed,
        dropout_shared=arguments.dropout_shared,
        cum_seqlens_q=arguments.cum_seqlens_q,
        cum_seqlens_k=arguments.cum_seqlens_k,
        sliding_window=arguments.sliding_window,
        logits_soft_cap=arguments.logits_soft_cap,
        softmax_aux=arguments.softmax_aux,
        q_segment_ids=arguments.q_segment_ids,
        kv_segment_ids=arguments.kv_segment_ids,
        q_offset=arguments.q_offset,
        q_positions=arguments.q_positions,
        kv_positions=arguments.kv_positions,
        origin=arguments.origin,
        chunk_size=arguments.chunk_size,
        kv_start=arguments.kv_start,
        kv_end=arguments.kv_end,
        alibi_slopes=arguments.alibi_slopes,
    )


def with_arguments[**P, A, R](record: Callable[P, A]) -> Callable[[Callable[[A], R]], Callable[P, R]]:
    """Return a decorator for a function of one record: it is called with the record's fields as parameters.

    Its signature and its annotations are those of the record, with what the function returns.
    """
    parameters = signature(record)

    def decorate(function: Callable[[A], R]) -> Callable[P, R]:
        name = function.__name__

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                arguments = record(*args, **kwargs)
            except TypeError:
                raise TypeError(f"{name}() {_misfit(parameters, args, kwargs)}") from None
            return function(arguments)

        returned = signature(function).return_annotation
        public: Any = call
        del public.__wrapped__  # callers have no use for the function of a record
        public.__signature__ = parameters.replace(return_annotation=returned)
        public.__annotations__ = {x.name: x.annotation for x in parameters.parameters.values()}
        public.__annotations__["return"] = returned
        return call

    return decorate


def _misfit(parameters: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return what Python says of arguments that fit no parameters."""
    try:
        parameters.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return "got arguments that fit no parameters"
