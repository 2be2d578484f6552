"""The shared memory of a Hopper program: a record says of each field what it holds, and is filled with it.

A field is annotated with a function that describes it:

    @dataclass(frozen=True)
    class Shared:
        key: Annotated[Any, tile_ring]
        key_full: Annotated[Any, key_full]

`scratch(Shared, spec, blocks)` is then what a launch allocates, and the launch gives the kernel a `Shared`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.pallas.mosaic_gpu.blocks import PROGRAMS, ROWS, BackwardBlocks, Blocks, tile_dims
from attest.kernels.pallas.mosaic_gpu.launch.transfers import columns_of, copies, matrix, pieces
from attest.kernels.pallas.mosaic_gpu.launch.warpgroups import SHARED_BYTES, barriers, vector
from attest.kernels.pallas.mosaic_gpu.spec import KernelSpec, tiled_bytes

# Of a block's shared memory, for barriers, numbers and what Mosaic takes for reductions.
_SPARE_BYTES = 3072
_NUMBER_BYTES = 4  # of a number of a part or of weights, float32

SPLIT_ROOMS = 2  # for weights that one warpgroup hands over to another


def scratch(record: type, *sizes: Any) -> dict[str, Any]:
    """Return what to allocate for each field of a record, by its name.

    record: a dataclass whose every field is `Annotated[Any, describe]`. describe(*sizes) returns what
    `matrix`, `vector` or `barriers` does, or None for a field that is not allocated, which then needs a
    default. sizes: the spec, and the blocks of kernels that have a choice of them.
    """
    hints = get_type_hints(record, include_extras=True)
    described = {field.name: hints[field.name].__metadata__[0](*sizes) for field in fields(record)}
    return {name: room for name, room in described.items() if room is not None}


def own_rows(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [consumers, 64, D]: the rows of each consumer, of a tensor with query's and key's head dim."""
    return matrix(spec.dtype, blocks.consumers, ROWS, spec.shape.head_dim)


def own_value_rows(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [consumers, 64, Dv]: the rows of each consumer, of a tensor with the head dim of value."""
    return matrix(spec.dtype, blocks.consumers, ROWS, spec.shape.value_dim)


def tile_ring(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return [stages, step, D]: a slot for each block of query or key that is on its way or in use."""
    return matrix(spec.dtype, blocks.stages, blocks.step, spec.shape.head_dim)


def value_ring(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return [value_slots, step, Dv]: the same for value or the cotangent of out."""
    return matrix(spec.dtype, blocks.value_slots, blocks.step, spec.shape.value_dim)


def own_pieces(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return what `own_rows` does, as `Pieces`."""
    return pieces(spec.dtype, blocks.consumers, ROWS, spec.shape.head_pieces)


def own_value_pieces(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return what `own_value_rows` does, as `Pieces`."""
    return pieces(spec.dtype, blocks.consumers, ROWS, spec.shape.value_pieces)


def ring_of_pieces(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return what `tile_ring` does, as `Pieces`."""
    return pieces(spec.dtype, blocks.stages, blocks.step, spec.shape.head_pieces)


def value_ring_of_pieces(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return what `value_ring` does, as `Pieces`."""
    return pieces(spec.dtype, blocks.value_slots, blocks.step, spec.shape.value_pieces)


def number_ring(_: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return [stages, step] float32: a number for each row of a ring."""
    return vector(blocks.step, blocks.stages)


def key_full(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [stages] barriers, each complete when a block of K has arrived."""
    return barriers(blocks.stages, key_copies(spec, spec.shape.k_block)[0])


def value_full(spec: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [value_slots] barriers, each complete when a block of V has arrived."""
    return barriers(blocks.value_slots, key_copies(spec, spec.shape.k_block)[1])


def query_copies(spec: KernelSpec, rows: int) -> tuple[int, int]:
    """Return how many copies bring so many rows of query, and of the cotangent of out."""
    return _copies(spec, spec.shape.q_length, rows)


def key_copies(spec: KernelSpec, rows: int) -> tuple[int, int]:
    """Return how many copies bring so many rows of key, and of value."""
    return _copies(spec, spec.shape.k_length, rows)


def _copies(spec: KernelSpec, length: int, rows: int) -> tuple[int, int]:
    pieces = (spec.shape.head_pieces, spec.shape.value_pieces)
    first, second = (sum(copies(spec.dtype, length, width, rows) for width in each) for each in pieces)
    return first, second


def slot_empty(_: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [stages] barriers, each complete when every warpgroup that computes has read the slot."""
    return barriers(blocks.stages, arrivals=blocks.computing)


def value_slot_empty(_: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [value_slots] barriers, as `slot_empty`."""
    return barriers(blocks.value_slots, arrivals=blocks.computing)


def consumer_signal(_: KernelSpec, blocks: Blocks | BackwardBlocks) -> Any:
    """Return [consumers] barriers, each complete when one warpgroup has arrived."""
    return barriers(blocks.consumers)


def query_pair_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return [consumers] barriers, complete when a consumer's query and cotangent of out have arrived."""
    return barriers(blocks.consumers, sum(query_copies(spec, ROWS)))


def key_pair_full(spec: KernelSpec, blocks: BackwardBlocks) -> Any:
    """Return [consumers] barriers, each complete when a consumer's key and value have arrived."""
    return barriers(blocks.consumers, sum(key_copies(spec, ROWS)))


def tile_bytes(
    kernel: str,
    blocks: Blocks | BackwardBlocks,
    dims: tuple[int, int],
    itemsize: int,
    pairs: Mapping[str, int] | None = None,
) -> int:
    """Return the shared memory of a kernel's tiles: what `scratch` describes, but for numbers and barriers.

    kernel: "forward", "backward_query", "backward_key" or "backward_bias". dims: of query and of value.
    pairs: what `attest.kernels.pallas.mosaic_gpu.spec.tiled_bytes` says of the call.
    """
    own, pairs = blocks.own, dict(pairs or {})
    if isinstance(blocks, Blocks):
        tensors = blocks.query_stages * own * dims[0] + blocks.stages * blocks.k * sum(dims)
        return itemsize * tensors + own * blocks.k * blocks.stages * sum(pairs.values())
    of_pairs = own * blocks.step * blocks.stages * sum(pairs.values())
    if kernel == "backward_bias":
        # One tile of the bias, and of its gradient, is enough: all visits share it.
        bias = pairs.pop("bias", 0)
        of_pairs = own * blocks.step * (blocks.stages * sum(pairs.values()) + 2 * bias)
        own *= blocks.stages
    if blocks.split:
        of_pairs += SPLIT_ROOMS * own * blocks.step * _NUMBER_BYTES
    if blocks.fused:
        # Two slots of dS, and of parts of dquery.
        of_pairs = 2 * blocks.step * (itemsize * own + _NUMBER_BYTES * dims[0])
    rings = blocks.step * (blocks.stages * dims[0] + blocks.value_slots * dims[1])
    return itemsize * (own * sum(dims) + rings) + of_pairs


def suits(kernel: str, call: Call, apart: bool, blocks: Blocks | BackwardBlocks) -> bool:
    """Return whether a kernel of a call may have such blocks: they fit, and fused programs need not wait.

    apart: whether backward_query is launched for dquery, so that nothing is fused.
    """
    if isinstance(blocks, BackwardBlocks) and blocks.fused:
        # Programs of a head add one after another: with fewer steps than programs, they wait for their turns.
        steps = -(-call.query.shape[1] // blocks.step)
        if apart or steps < min(-(-call.key.shape[1] // blocks.own), PROGRAMS):
            return False
    dims = tile_dims(call)
    return fits(kernel, dims, call.query.dtype.itemsize, tiled_bytes(call), blocks)


def require_fusible(spec: KernelSpec, blocks: BackwardBlocks) -> None:
    """Refuse fused blocks for a call whose dquery they cannot sum.

    Raises: ValueError naming the field.
    """
    expected, columns = "", columns_of(spec.dtype, spec.shape.head_dim)
    if spec.visibility.uses_ranges or spec.pairwise:
        expected = "False for calls that hide pairs by more than causal order"
    elif blocks.step == ROWS and spec.shape.head_dim % (columns * blocks.consumers) != 0:
        expected = f"False, or a step of {blocks.own}: shares of dquery are multiples of {columns} channels"
    if expected:
        refuse("bwd_params.backward_key.fused", True, expected, "None lets the kernel choose.")


def fits(
    kernel: str,
    dims: tuple[int, int],
    itemsize: int,
    pairs: Mapping[str, int],
    blocks: Blocks | BackwardBlocks,
) -> bool:
    """Return whether the tiles of a kernel leave some shared memory for barriers and numbers."""
    return tile_bytes(kernel, blocks, dims, itemsize, pairs) + _SPARE_BYTES <= SHARED_BYTES
