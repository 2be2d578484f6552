"""Flash attention in Triton: the launches of a checked call, their constants and block sizes.

Everything that depends on arrays but not on pairs is computed here in JAX: the interval of keys of every row,
the blocks that every block visits, Delta and the lse in bits.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.contract import (
    Backward,
    Forward,
    Passes,
    Settings,
    check_blocks,
    check_precision,
)
from attest.kernels.few_queries import has_few_queries, pack_heads
from attest.kernels.numerics.exponents import in_units
from attest.kernels.numerics.philox import dropout_words
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.triton.backward_bias import backward_bias
from attest.kernels.triton.backward_key import backward_key
from attest.kernels.triton.backward_query import backward_query
from attest.kernels.triton.blocks import BackwardSizes, BlockSizes, choose, separate
from attest.kernels.triton.compiled import check_room
from attest.kernels.triton.describe import (
    describe_dropout,
    describe_logits,
    describe_pairs,
    describe_shape,
    describe_softmax,
)
from attest.kernels.triton.few_queries import choose_parts, whole
from attest.kernels.triton.forward import forward
from attest.kernels.triton.launch import launch
from attest.kernels.triton.spec import Gradients, KernelSpec, Loops, Visibility
from attest.kernels.triton.target import Launch, recording_id, target_device
from attest.kernels.visibility.blocks import key_blocks, query_blocks
from attest.kernels.visibility.intervals import Rows, array_module, describe_rows, hides_pairs, windowed
from attest.kernels.visibility.tile_order import (
    balanced_heads_together,
    key_heads_together,
    query_heads_together,
)

# The largest block of the table, which only calls without edges take, and the next one.
LARGEST_BLOCK = 256
EVEN_LENGTH = 128
# Up to so many queries there are tiles of few rows, as in decoding.
FEW_QUERIES = 16
# Up to so many keys, as of cross attention on a text, the kernel that owns keys has few and long programs.
FEW_KEYS = 128

_PRECISIONS = {
    None: "ieee",
    "highest": "ieee",
    "float32": "ieee",
    "default": "tf32",
    "fastest": "tf32",
    "tensorfloat32": "tf32",
}


@dataclass(frozen=True)
class Sizes:
    """Block sizes as asked for, None where the kernel chooses, and the device to choose for.

    recording: which `recorded` block the trace belongs to, so that no cached trace skips a recording.
    """

    asked: Any
    device: str
    recording: int | None


@dataclass(frozen=True)
class _Visible:
    """The arguments by which kernels tell visible pairs, and how far they are apart."""

    first: jax.Array | None  # [N, Sq] int32
    last: jax.Array | None  # [N, Sq] int32
    position: jax.Array | None  # [N, Sq] int32, None without ALiBi
    rows: Rows  # of which the ranges are made
    batched: bool  # N is B, not 1


def _forward(settings: Settings, call: Call) -> Forward:
    rows = describe_rows(call, xp=array_module(call))
    dtype = settings.result_dtype(call.query.dtype)
    # Parts are merged by their lse, which takes an out that is normalised; dropout counts query heads.
    if settings.normalize_output and call.dropout_seed is None and has_few_queries(call):
        packed, packed_rows = pack_heads(call, rows)
        sizes = _sizes(settings.forward, "forward", packed)
        batch, q_length, heads, _ = packed.query.shape
        tiles = batch * heads * _blocks(q_length, sizes.q)
        parts = choose_parts(tiles, _blocks(call.key.shape[1], sizes.k), sizes.programs)
        if parts > 1 or q_length > call.query.shape[1]:
            rounds_last = parts > 1 or call.softmax_aux is not None
            sums = _sums(settings, packed, packed_rows, sizes, jnp.float32 if rounds_last else dtype, parts)
            return whole(sums, call, parts, dtype)
    return _sums(settings, call, rows, _sizes(settings.forward, "forward", call), dtype)


def _sums(
    settings: Settings, call: Call, described: Rows, sizes: BlockSizes, dtype: Any, parts: int = 1
) -> Forward:
    """Run the forward kernel, its out in a dtype; of parts of the keys one after the other, where given."""
    batch, q_length, q_heads, _ = call.query.shape
    k_length, _, value_dim = call.value.shape[1:]
    out = jax.ShapeDtypeStruct((parts * batch, q_length, q_heads, value_dim), dtype)
    rows = jax.ShapeDtypeStruct((parts * batch, q_heads, q_length), jnp.float32)
    visible = _visible(call, described)
    ranges = key_blocks(call, visible.rows, sizes.q, sizes.k)
    sinks = call.softmax_aux
    hides = hides_pairs(call) or visible.first is not None or visible.last is not None
    spec = _spec(settings, call, visible, ranges, sizes, partial_loop=hides or k_length % sizes.k != 0)
    spec = replace(
        spec,
        shape=replace(spec.shape, head_swizzle=_head_swizzle(call), key_parts=parts),
        loops=replace(spec.loops, hides=hides),
        softmax=describe_softmax(settings, call, spec.logits.unit),
    )
    return Forward(
        *_launch(
            Launch(
                kernel=forward,
                arguments=(*_arrays(call, visible, ranges), call.query if sinks is None else sinks),
                outputs=(out, rows, rows),
                constants={"SPEC": spec},
                grid=(batch * q_heads * _blocks(q_length, sizes.q), parts),
                num_warps=sizes.num_warps,
                num_stages=sizes.num_stages,
            ),
            settings.forward,
        )
    )


def _backward(settings: Settings, call: Call, terms: RowTerms, _kept: Any) -> Backward:
    batch, q_length, q_heads, _ = call.query.shape
    k_length, k_heads = call.key.shape[1:3]
    visible = _visible(call, describe_rows(call, xp=array_module(call)))
    hides = hides_pairs(call)
    call = replace(call, query=terms.query)
    weight = terms.query if terms.weight is None else terms.weight
    row_arrays = (terms.d_out, in_units(terms.lse), terms.delta, weight)

    def run(
        kernel: Any, outputs: tuple[Any, ...], by_key: bool, gradients: Gradients, careful: bool = False
    ) -> tuple[jax.Array, ...]:
        sizes = _sizes(settings.backward, kernel.__name__, call)
        ranges = (query_blocks if by_key else key_blocks)(call, visible.rows, sizes.q, sizes.k)
        if by_key:
            grid = batch * k_heads * _blocks(k_length, sizes.k)
            partial_loop = hides
        else:
            grid = batch * q_heads * _blocks(q_length, sizes.q)
            partial_loop = hides or k_length % sizes.k != 0
        arguments: tuple[Any, ...] = (*_arrays(call, visible, ranges), *row_arrays)
        spec = _spec(settings, call, visible, ranges, sizes, partial_loop=partial_loop)
        spec = replace(
            spec,
            shape=replace(spec.shape, head_swizzle=_head_swizzle(call, sizes.k if by_key else None)),
            loops=replace(spec.loops, hides=careful),
            gradients=gradients,
        )
        if kernel is backward_bias:
            assert call.bias is not None
            shape = call.bias.shape
            grid = shape[0] * shape[1] * (_blocks(k_length, sizes.k) if shape[3] > 1 else 1)
            grid *= _blocks(q_length, sizes.q) if shape[2] > 1 else 1
            arguments = (*arguments, batch)
        return _launch(
            Launch(
                kernel=kernel,
                arguments=arguments,
                outputs=tuple(jax.ShapeDtypeStruct(x.shape, settings.result_dtype(x.dtype)) for x in outputs),
                constants={"SPEC": spec},
                grid=(grid,),
                num_warps=sizes.num_warps,
                num_stages=sizes.num_stages,
            ),
            settings.backward,
        )

    both = Gradients(scale=call.softmax_scale, weighted=terms.weight is not None)
    (d_query,) = run(backward_query, (call.query,), by_key=False, gradients=both, careful=hides)
    if not separate(largest_dim(call), work_of(call)):
        d_key, d_value = run(backward_key, (call.key, call.value), by_key=True, gradients=both)
    else:
        unused = jax.ShapeDtypeStruct((1,), call.key.dtype)
        of_key, of_value = replace(both, value=False), replace(both, key=False)
        d_key, _ = run(backward_key, (call.key, unused), by_key=True, gradients=of_key)
        _, d_value = run(backward_key, (unused, call.value), by_key=True, gradients=of_value)
    # A kernel of its own, so that XLA drops it where the gradient of the bias is unused.
    of_bias = replace(both, scale=1.0)
    d_bias = None if call.bias is None else run(backward_bias, (call.bias,), False, of_bias)[0]
    return Backward(d_query, d_key, d_value, d_bias)


def _head_swizzle(call: Call, block_k: int | None = None) -> int:
    """Return for how many heads the blocks alternate in the order of programs.

    block_k: the keys of a block; None where the blocks are of queries.
    """
    if not call.causal or windowed(call):
        return 1
    batch, k_length, k_heads, _ = call.key.shape
    group = call.query.shape[2] // k_heads
    row_bytes = (call.query.shape[3] + call.value.shape[3]) * call.query.dtype.itemsize
    if block_k is None:
        return query_heads_together(k_length, group, row_bytes)
    together = key_heads_together(call.query.shape[1], group, row_bytes)
    return balanced_heads_together(together, batch * k_heads, _blocks(k_length, block_k))


def _launch(what: Launch, sizes: Sizes) -> tuple[jax.Array, ...]:
    if sizes.asked is not None:
        check_room(what)
    return launch(what)


def _arrays(call: Call, visible: _Visible, ranges: jax.Array | None) -> tuple[jax.Array | int, ...]:
    """Return the first parameters of all kernels, as `attest.kernels.triton.program.Arrays` names them."""
    if ranges is not None:
        entries = call.query.shape[0] if visible.batched else ranges.shape[0]
        ranges = jnp.broadcast_to(ranges, (entries, *ranges.shape[1:]))
    arrays = (
        *(call.query, call.key, call.value, call.attention_mask, call.bias),
        *(visible.first, visible.last, call.q_segment_ids, call.kv_segment_ids),
        *(visible.position, call.alibi_slopes, ranges),
    )
    present = (call.query if x is None else x for x in arrays)
    return (*present, _seed(call), call.query.shape[1], call.key.shape[1])


def _seed(call: Call) -> jax.Array:
    """Return the words of dropout, or the query in their place."""
    if call.dropout_seed is None:
        return call.query
    return dropout_words(call.dropout_seed, call.positions.origin, call.dropout_shared)


def _visible(call: Call, rows: Rows) -> _Visible:
    """Return the rows' intervals, all batched if one is: the kernels know one N."""
    arrays = [x for x in (rows.first, rows.last, rows.position) if x is not None]
    batched = call.q_segment_ids is not None or any(x.shape[0] > 1 for x in arrays)
    shape = (call.query.shape[0] if batched else 1, call.query.shape[1])

    def spread(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.broadcast_to(x, shape)

    return _Visible(spread(rows.first), spread(rows.last), spread(rows.position), rows, batched)


def _spec(
    settings: Settings,
    call: Call,
    visible: _Visible,
    ranges: jax.Array | None,
    sizes: BlockSizes,
    *,
    partial_loop: bool,
) -> KernelSpec:
    """Return the spec that all kernels are compiled for, with what one kernel alone reads at its default."""
    return KernelSpec(
        shape=describe_shape(call, sizes),
        logits=describe_logits(settings, call),
        visibility=Visibility(
            first=visible.first is not None,
            last=visible.last is not None,
            segments=call.q_segment_ids is not None,
            by_batch=visible.batched,
            ranges=ranges is not None,
            mask=describe_pairs(call.attention_mask),
        ),
        loops=Loops(full=call.attention_mask is None and call.bias is None, partial=partial_loop),
        dropout=describe_dropout(call),
    )


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _sizes(sizes: Sizes, kernel: str, call: Call) -> BlockSizes:
    asked = getattr(sizes.asked, kernel.removeprefix("backward_"), sizes.asked)
    if asked is not None:
        return asked
    dim = largest_dim(call)
    return choose(kernel, sizes.device, dim, call.query.dtype.itemsize, work_of(call))


def largest_dim(call: Call) -> int:
    """Return the larger one of the head dims, by which the table chooses."""
    return max(call.query.shape[3], call.value.shape[3])


def work_of(call: Call) -> str:
    """Return what a tile costs beside its products, as `choose` names it."""
    lengths = (call.query.shape[1], call.key.shape[1])
    uneven = call.cum_seqlens_q is not None or any(length % EVEN_LENGTH for length in lengths)
    dropout = call.dropout_seed is not None
    segments = call.q_segment_ids is not None
    pairs = sum(x is not None for x in (call.attention_mask, call.bias))
    if pairs and pairs + dropout + segments + uneven > 1:
        return "rough"
    if pairs:
        return "bias" if call.bias is not None and call.bias.shape[2] > 1 else "pairs"
    if dropout + segments + uneven > 1:
        return "mixed"
    if dropout:
        return "dropout"
    if uneven:
        if lengths[0] <= FEW_QUERIES:
            return "few"
        return "few_keys" if lengths[1] <= FEW_KEYS else "uneven"
    if segments:
        return "segments"
    if windowed(call):
        return "short"
    others = (call.logits_soft_cap, call.kv_start, call.kv_end, call.alibi_slopes)
    edges = call.causal or any(x is not None for x in others)
    return "edges" if edges or any(length % LARGEST_BLOCK for length in lengths) else "plain"


def forward_work(call: Call) -> str:
    """Return the work of the forward pass: with few queries, that of the call whose heads are packed."""
    if call.dropout_seed is not None or not has_few_queries(call):
        return work_of(call)
    batch, length, heads, dim = call.query.shape
    k_heads = call.key.shape[2]
    packed = (batch, length * (heads // k_heads), k_heads, dim)
    return work_of(replace(call, query=jax.ShapeDtypeStruct(packed, call.query.dtype)))


def _check_forward(blocks: Any) -> Sizes:
    advice = "Build it as BlockSizes(q=64, k=64)."
    return Sizes(check_blocks("fwd_params", blocks, (BlockSizes,), advice), target_device(), recording_id())


def _check_backward(blocks: Any) -> Sizes:
    advice = "Build it as BlockSizes(q=64, k=64), or one for each kernel as BackwardSizes."
    blocks = check_blocks("bwd_params", blocks, (BlockSizes, BackwardSizes), advice)
    return Sizes(blocks, target_device(), recording_id())


PASSES = Passes(
    forward=_forward,
    backward=_backward,
    check_forward=_check_forward,
    check_backward=_check_backward,
    check_precision=partial(
        check_precision, known=_PRECISIONS, advice="None is IEEE float32, 'default' is TF32."
    ),
)
