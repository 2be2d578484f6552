"""Decides how the Hopper kernel computes out, lse and the row maximum: TMA, WGMMA, warp specialisation.

A program's tile is `consumers` * 64 query rows of a head. One warpgroup, the producer, does nothing but ask
for K and V blocks, into a ring of `stages` slots each; the others, the consumers, take 64 rows each. A
consumer asks for the next S before it adds P V of the block before, so that the matrix unit works through the
softmax, and the consumers ask in turn, so that one's softmax hides behind another's products.

Papers: Milakov and Gimelshein, arXiv 1805.02867 (online softmax); Dao, arXiv 2307.08691; Shah and others,
arXiv 2407.08608 (the overlap and the turns, on Hopper).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kernels.pallas.mosaic_gpu.blocks import ROWS
from kernels.pallas.mosaic_gpu.problem import Problem
from kernels.pallas.mosaic_gpu.tile import BY_ROW, COLUMNS, TILE, Tile, load_tile, logits, over_rows, softmax

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

WARPGROUP, PROGRAM = "warpgroup", "program"  # the axes of a launch
LN2 = math.log(2.0)
LOWEST = -3.4e38  # a maximum of nothing, from which a difference is still a number


@dataclass(frozen=True)
class Shared:
    """What the warpgroups of a program share: tiles, and barriers that tell when they are full or empty.

    query, out [consumers, 64, D]; key, value [stages, k, D]. out is None where a program has one tile: the
    query then makes room for it. A ring's barriers have an entry for each slot; query_full and turn, for each
    consumer.
    """

    query: Any
    key: Any
    value: Any
    query_full: Any
    query_empty: Any
    key_full: Any
    key_empty: Any
    value_full: Any
    value_empty: Any
    turn: Any
    out: Any = None


@dataclass(frozen=True)
class _Consumer:
    """A consumer at work on a tile. acc: [64, D] float32, the sum of P V, where the products leave it."""

    problem: Problem
    shared: Shared
    warpgroup: Any
    tile: Tile
    acc: Any

    def slot(self, count: Any) -> Any:
        return lax.rem(count, self.problem.blocks.stages)

    def take_turn(self) -> None:
        plgpu.barrier_wait(self.shared.turn.at[self.warpgroup])

    def pass_turn(self) -> None:
        plgpu.barrier_arrive(self.shared.turn.at[lax.rem(self.warpgroup + 1, self.problem.blocks.consumers)])

    def ask_score(self, s: Any, slot: Any) -> None:
        """Begins S = Q K^T of a slot, once the block is there and it is this consumer's turn."""
        plgpu.barrier_wait(self.shared.key_full.at[slot])
        self.take_turn()
        plgpu.wgmma(s, self.shared.query.at[self.warpgroup], self.shared.key.at[slot].T)

    def with_score[T](self, run: Callable[[Any], T]) -> T:
        return pl.run_scoped(run, plgpu.ACC((ROWS, self.problem.blocks.k), jnp.float32))


def flash_forward(problem: Problem, names: tuple[str, ...], *refs: Any, **scratch: Any) -> None:
    """The body of the kernel.

    refs: the arrays that `names` names, then out, lse and row_max. scratch: the fields of `Shared`.
    """
    arrays = dict(zip(names, refs, strict=False))
    outputs = refs[len(names) :]
    shared = Shared(**scratch)
    warpgroup = lax.axis_index(WARPGROUP)
    consumers = problem.blocks.consumers
    of_consumer, of_producer = problem.blocks.registers

    @pl.when(warpgroup == consumers)
    def _() -> None:
        plgpu.set_max_registers(of_producer, action="decrease")
        _over_tiles(problem, partial(_produce, problem, arrays, shared))

    @pl.when(warpgroup < consumers)
    def _() -> None:
        plgpu.set_max_registers(of_consumer, action="increase")

        @pl.when(warpgroup == consumers - 1)
        def _() -> None:
            plgpu.barrier_arrive(shared.turn.at[0])

        _over_tiles(problem, partial(_consume, problem, arrays, outputs, shared, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def _over_tiles(problem: Problem, work: Callable[[Any, Any], Any]) -> None:
    """work(tile, count) for every tile of this program: from and to the number of key blocks taken so far."""
    program = lax.axis_index(PROGRAM)
    if problem.blocks.programs is None:
        work(program, jnp.int32(0))
        return
    tiles = lax.div(problem.tiles - program + problem.programs - 1, problem.programs)
    lax.fori_loop(0, tiles, lambda i, count: work(program + i * problem.programs, count), jnp.int32(0))


def _locate(problem: Problem, tile: Any) -> tuple[Any, Any, Any]:
    """The batch row, head and row block of a tile; the last row block comes first: it may be longest."""
    block = problem.q_blocks - 1 - lax.rem(tile, problem.q_blocks)
    rest = lax.div(tile, problem.q_blocks)
    return lax.div(rest, problem.heads), lax.rem(rest, problem.heads), block


def _span(problem: Problem, arrays: Mapping[str, Any], batch: Any, block: Any) -> tuple[Any, Any, Any, Any]:
    """start, whole_start, whole_stop, stop of the key blocks of a row block, as `kernels.ranges` has them.

    A row block that sees nothing takes one block of keys, all hidden: no case of its own.
    """
    if problem.described:
        entry = batch if problem.by_batch else 0
        start, whole_start, whole_stop, stop = (arrays["ranges"][entry, block, i] for i in range(4))
    else:
        start, whole_start, whole_stop, stop = _span_of_order(problem, block)
    if problem.pairwise:
        whole_start, whole_stop = start, start
    return start, whole_start, whole_stop, jnp.maximum(stop, start + 1)


def _span_of_order(problem: Problem, block: Any) -> tuple[Any, Any, Any, Any]:
    """The span where causal order decides, or nothing does."""
    k, k_length = problem.blocks.k, problem.k_length
    zero, full = jnp.int32(0), jnp.int32(k_length // k)
    if not problem.causal:
        return zero, zero, full, jnp.int32(problem.k_blocks)
    lowest = block * problem.blocks.q + (k_length - problem.q_length)  # the last key that the first row sees
    highest = jnp.minimum(lowest + problem.blocks.q - 1, k_length - 1)
    stop = jnp.maximum(lax.div(highest + k, k), 0)
    whole = jnp.minimum(lax.div(jnp.maximum(lowest + 1, 0), k), full)
    return zero, zero, jnp.minimum(whole, stop), stop


def _produce(problem: Problem, arrays: Mapping[str, Any], shared: Shared, tile: Any, count: Any) -> Any:
    """Asks for the query of a tile and for its K and V blocks, each when its slot is empty."""
    blocks = problem.blocks
    batch, head, block = _locate(problem, tile)
    start, _, _, stop = _span(problem, arrays, batch, block)
    if blocks.programs is not None:
        pl.when(count > 0)(lambda: plgpu.barrier_wait(shared.query_empty))
    for i in range(blocks.consumers):
        rows = pl.ds(block * blocks.q + i * ROWS, ROWS)
        source = arrays["query"].at[batch, rows, head]
        plgpu.copy_gmem_to_smem(source, shared.query.at[i], shared.query_full.at[i])
    key_head = lax.div(head, problem.group)
    rings = (
        (arrays["key"], shared.key, shared.key_full, shared.key_empty),
        (arrays["value"], shared.value, shared.value_full, shared.value_empty),
    )

    def step(j: Any, count: Any) -> Any:
        slot = lax.rem(count, blocks.stages)
        for source, ring, full, empty in rings:
            pl.when(count >= blocks.stages)(partial(plgpu.barrier_wait, empty.at[slot]))
            at = (batch, pl.ds(j * blocks.k, blocks.k), key_head)
            plgpu.copy_gmem_to_smem(source.at[at], ring.at[slot], full.at[slot])
        return count + 1

    return lax.fori_loop(start, stop, step, count)


def _consume(
    problem: Problem,
    arrays: Mapping[str, Any],
    outputs: tuple[Any, ...],
    shared: Shared,
    warpgroup: Any,
    tile: Any,
    count: Any,
) -> Any:
    """Computes and stores 64 rows of a tile."""
    out_ref, lse_ref, max_ref = outputs
    batch, head, block = _locate(problem, tile)
    row = block * problem.blocks.q + warpgroup * ROWS
    span = _span(problem, arrays, batch, block)
    held = load_tile(problem, arrays, batch, head, row)

    def run(acc: Any) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        return _attend(_Consumer(problem, shared, warpgroup, held, acc), span, count)

    acc, m, norm, count = pl.run_scoped(run, plgpu.ACC((ROWS, problem.head_dim), jnp.float32))
    rows = pl.ds(row, ROWS)
    max_ref[batch, head, rows] = jnp.where(norm == 0.0, -jnp.inf, m * LN2)
    rescale = None
    if problem.sinks:
        sink = lax.broadcast(arrays["sinks"][head], (ROWS,))
        largest = jnp.maximum(m, sink)
        rescale = jnp.exp2(m - largest)
        norm = norm * rescale + jnp.exp2(sink - largest)
        m = largest
    empty = norm == 0.0
    lse_ref[batch, head, rows] = jnp.where(empty, -jnp.inf, m * LN2 + jnp.log(norm))
    factor = 1.0 / jnp.where(empty, 1.0, norm)
    if rescale is not None:
        factor = factor * rescale
    room = shared.query.at[warpgroup]
    if problem.blocks.programs is not None:
        room = shared.out.at[warpgroup]
        # The out of the tile before may still be on its way.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    room[...] = (acc * over_rows(factor, acc.shape)).astype(problem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(room, out_ref.at[batch, rows, head])
    return count


def _attend(
    consumer: _Consumer, span: tuple[Any, Any, Any, Any], count: Any
) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
    """acc = sum of P V, the maximum in bits, the norm, over the key blocks of a span; blocks taken."""
    problem, shared = consumer.problem, consumer.shared
    start, whole_start, whole_stop, stop = span
    m = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW)
    if problem.blocks.partial_sums:
        norm = plgpu.layout_cast(jnp.zeros((ROWS, COLUMNS), jnp.float32), TILE)
    else:
        norm = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW)
    plgpu.barrier_wait(shared.query_full.at[consumer.warpgroup])

    slot = consumer.slot(count)
    u = logits(consumer.tile, _score(consumer, slot), start, problem.hides)
    p, m, norm, _ = softmax(consumer.tile, u, m, norm)
    plgpu.barrier_wait(shared.value_full.at[slot])
    carry = (p.astype(problem.dtype), m, norm, count + 1)

    whole, edge = (partial(_step, consumer, compared) for compared in (False, True))
    begin = start + 1
    if not problem.hides:
        carry = lax.fori_loop(begin, stop, whole, carry)
    elif problem.pairwise:
        carry = lax.fori_loop(begin, stop, edge, carry)
    else:
        if problem.described:
            carry = lax.fori_loop(begin, whole_start, edge, carry)
            begin = jnp.maximum(begin, whole_start)
        carry = lax.fori_loop(begin, whole_stop, whole, carry)
        carry = lax.fori_loop(jnp.maximum(begin, whole_stop), stop, edge, carry)
    p, m, norm, count = carry

    if problem.blocks.programs is not None:
        plgpu.barrier_arrive(shared.query_empty)
    slot = consumer.slot(count - 1)
    plgpu.wgmma(consumer.acc, p, shared.value.at[slot])
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(shared.value_empty.at[slot])
    if problem.blocks.partial_sums:
        norm = jnp.sum(norm, axis=1)
    return consumer.acc[...], m, norm, count


def _score(consumer: _Consumer, slot: Any) -> jax.Array:
    """S = Q K^T [64, k] float32 of the first block, behind which nothing hides."""

    def run(s: Any) -> jax.Array:
        consumer.ask_score(s, slot)
        consumer.pass_turn()
        score = s[...]
        plgpu.barrier_arrive(consumer.shared.key_empty.at[slot])
        return score

    return consumer.with_score(run)


def _step(consumer: _Consumer, compared: bool, j: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds P V of the block before, while S and P of block j are made.

    carry: P of the block before, in the inputs' dtype, the maximum, the norm, and the blocks taken so far.
    """
    shared, tile, acc = consumer.shared, consumer.tile, consumer.acc
    p, m, norm, count = carry
    slot, slot_before = consumer.slot(count), consumer.slot(count - 1)

    def run(s: Any) -> Any:
        consumer.ask_score(s, slot)
        plgpu.wgmma(acc, p, shared.value.at[slot_before])
        consumer.pass_turn()
        score = plgpu.wgmma_accumulator_load(s, wait_n=1)
        plgpu.barrier_arrive(shared.key_empty.at[slot])
        # Both compilers would else move the softmax behind the wait for the second product: LLVM obeys the
        # optimization barrier, and ptxas moves nothing past the loop in the wait for V.
        new = lax.optimization_barrier(softmax(tile, logits(tile, score, j, compared), m, norm))
        plgpu.barrier_wait(shared.value_full.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.value_empty.at[slot_before])
        return new

    p, m, norm, alpha = consumer.with_score(run)
    acc[...] = acc[...] * over_rows(alpha, acc.shape)
    # Rounded only now: the second product has been reading the registers that this writes.
    return lax.optimization_barrier(p).astype(consumer.problem.dtype), m, norm, count + 1
