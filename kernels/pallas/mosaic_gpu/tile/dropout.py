"""The pairs of a tile that dropout keeps (S12, S29), drawn by the warpgroup that holds the tile.

Nothing but coordinates decides, so a kernel draws while its products run. A thread draws as many Philox calls
as it holds groups of four pairs, and threads then exchange bytes: see `draw_by_rows` and `draw_by_keys`.

A thread has a word for each 64 columns of its tile. Bit 7 - k of byte 2 h + e is set if it keeps column
8 k + 2 (lane % 4) + e of row lane // 4 + 8 h of its warp. The sign of a byte makes the mask of an element.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from attest.kernels.numerics.philox import MULTIPLIERS, ROUNDS, WEYL, least_kept
from attest.kernels.pallas.mosaic_gpu.tile.pairs import TILE
from attest.kernels.pallas.mosaic_gpu.tile.tile import Tile

WORDS = 6  # of `attest.kernels.numerics.philox.dropout_words`
WORD_COLUMNS = 64  # of a tile, whose pairs a thread keeps in one word
_EIGHTS = 8  # of columns in so many
_GROUP = 4  # keys of one Philox call
_THREADS = 128  # of a warpgroup
# Of two bytes for each of two threads, the lower and the upper half: bytes 4 to 7 are the other thread's.
_OWN_LOW, _OWN_HIGH = 0x5410, 0x3276
_OWN_EVEN, _OWN_ODD = 0x6240, 0x3715


class Instructions[T](Protocol):
    """The arithmetic of a thread: 32-bit words, unsigned."""

    def constant(self, value: int) -> T:
        """Return a word of a value."""
        ...

    def thread(self) -> T:
        """Return the number of this thread in its warpgroup."""
        ...

    def add(self, x: T, y: T) -> T:
        """Return x + y, modulo 2**32."""
        ...

    def xor(self, x: T, y: T) -> T:
        """Return x ^ y."""
        ...

    def either(self, x: T, y: T) -> T:
        """Return x | y."""
        ...

    def divide(self, x: T, by: int) -> tuple[T, T]:
        """Return the quotient and the rest."""
        ...

    def multiply(self, x: T, by: int) -> tuple[T, T]:
        """Return the upper and the lower word of the product."""
        ...

    def if_odd(self, x: T, odd: int, even: int) -> T:
        """Return odd where x is odd, else even."""
        ...

    def if_least(self, x: T, least: int, bit: int) -> T:
        """Return bit where x >= least, else 0."""
        ...

    def exchange(self, x: T, lanes: int) -> T:
        """Return x of the thread whose number differs by the bit `lanes`."""
        ...

    def permute(self, x: T, y: T, selector: T) -> T:
        """Return four of the bytes of x, 0 to 3, and y, 4 to 7: the digits of the selector, lowest first."""
        ...


class Place[T](NamedTuple):
    """The start of a tile in the whole array, and the seed: a word each.

    row: in the call, which begins at row_origin. batch, head, key: in the whole; key is a multiple of four.
    """

    seed_low: T
    seed_high: T
    batch: T
    head: T
    row: T
    row_origin: T
    key: T


def draw_by_rows[T](
    thread: Instructions[T],
    place: Place[T],
    columns: int,
    least: int,
    queries: int | None = None,
    own_heads: bool = True,
) -> list[T]:
    """Draw a thread's words of a tile whose rows are queries.

    Two neighbouring threads hold the four pairs of a call, and those of another row. Each draws for one row.
    queries: in each head, where rows of several heads follow one another. own_heads: whether each head has a
    mask of its own.
    """
    number = thread.thread()
    warp, lane = thread.divide(number, 32)
    quad, member = thread.divide(lane, 4)
    pair, half = thread.divide(member, 2)
    row = _sum(thread, place.row, quad, thread.if_odd(half, 8, 0), thread.multiply(warp, 16)[1])
    head = place.head
    if queries is not None:
        within, row = thread.divide(row, queries)
        head = thread.add(head, within) if own_heads else head
    row = thread.add(row, place.row_origin)
    first = thread.add(_group(thread, place), pair)
    keys = _round_keys(thread, place)
    selector = thread.if_odd(half, _OWN_HIGH, _OWN_LOW)

    def word(i: int) -> T:
        def counter(k: int) -> tuple[T, T, T, T]:
            group = thread.add(first, thread.constant((i * _EIGHTS + k) * 2))
            return group, row, head, place.batch

        drawn = _draw(thread, counter, keys, least)
        return thread.permute(drawn, thread.exchange(drawn, 1), selector)

    return [word(i) for i in range(columns // WORD_COLUMNS)]


def draw_by_keys[T](thread: Instructions[T], place: Place[T], columns: int, least: int) -> list[T]:
    """Draw a thread's words of a tile whose rows are keys and whose columns are queries.

    The four pairs of a call are held by four threads, each of which holds pairs of four such calls: each
    draws one of the four calls, and then the four transpose their bytes.
    """
    number = thread.thread()
    warp, lane = thread.divide(number, 32)
    quad, member = thread.divide(lane, 4)
    upper, mine = thread.divide(quad, 4)
    behind, second = thread.divide(mine, 2)
    of_warp = thread.multiply(warp, 16 // _GROUP)[1]
    group = _sum(thread, _group(thread, place), of_warp, upper, thread.if_odd(behind, 2, 0))
    first = _sum(thread, place.row, place.row_origin, second, thread.add(member, member))
    keys = _round_keys(thread, place)
    within = thread.if_odd(second, _OWN_ODD, _OWN_EVEN)
    between = thread.if_odd(behind, _OWN_HIGH, _OWN_LOW)

    def word(i: int) -> T:
        def counter(k: int) -> tuple[T, T, T, T]:
            row = thread.add(first, thread.constant((i * _EIGHTS + k) * 8))
            return group, row, place.head, place.batch

        drawn = _draw(thread, counter, keys, least)
        drawn = thread.permute(drawn, thread.exchange(drawn, 4), within)
        return thread.permute(drawn, thread.exchange(drawn, 8), between)

    return [word(i) for i in range(columns // WORD_COLUMNS)]


def load_words(arrays: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Load the words of dropout from memory, int32 scalars; None without dropout."""
    return tuple(arrays["dropout"][i] for i in range(WORDS)) if "dropout" in arrays else None


def kept_pairs(tile: Tile) -> jax.Array | None:
    """Return the kept pairs of a tile: int32, a word of each thread, then the next; None without dropout."""
    sizes, dropout = tile.spec.shape, tile.spec.dropout
    if tile.words is None or dropout is None:
        return None
    # The keys of the rounds are computed anew for every tile: there are too many for registers.
    low, high, batch, head, row, key, here = lax.optimization_barrier((*tile.words, jnp.int32(tile.row)))
    # The origin of what is shared is 0, too (S29).
    head = head + tile.head * sizes.packed_heads if dropout.by_head else head
    batch = batch + tile.batch if dropout.by_batch else batch
    place = Place(low, high, batch, head, here, row, key + tile.key)
    columns = tile.shape[1]
    shape = (_THREADS * columns // WORD_COLUMNS,)
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=1)
    found = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout)
    scalars = (plgpu.Layout.WG_SPLAT,) * len(place)
    queries = None if sizes.packed_heads == 1 else sizes.q_length // sizes.packed_heads
    if tile.transposed:
        draw: Callable[..., list[Any]] = draw_by_keys
    else:
        draw = partial(draw_by_rows, queries=queries, own_heads=dropout.by_head)

    def run(_: Any, *arrays: Any) -> Any:
        words = Place(*(array.registers.item() for array in arrays))
        drawn = draw(_Registers(), words, columns, least_kept(dropout.prob))
        one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        registers = np.empty(len(drawn), object)
        registers[:] = [vector.from_elements(one, [word]) for word in drawn]
        return gpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)

    inline = plgpu.inline_mgpu(arg_types=scalars, return_type=found)(run)
    # Behind a branch, always taken: ptxas else draws before it starts the last products, and before it lets
    # other warpgroups start theirs.
    return lax.cond(
        here >= 0, inline, lambda *_: plgpu.layout_cast(jnp.zeros(shape, jnp.int32), layout), *place
    )


def dropped(x: jax.Array, kept: jax.Array | None) -> jax.Array:
    """Return a tile with 0 in the pairs that are not kept: [64, columns] of 32 or 16 bits."""
    if kept is None:
        return x
    layout = plgpu.Layout.WG_STRIDED(kept.shape, vec_size=1)
    found = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=TILE)
    return plgpu.inline_mgpu(arg_types=(TILE, layout), return_type=found)(_masked)(x, kept)


def of_kept_pairs(dp: jax.Array, kept: jax.Array | None, delta: jax.Array) -> jax.Array:
    """Return dP of a tile, 0 in the pairs that are not kept, less delta.

    One sum and no second product, so that no compiler can choose which of two it rounds.
    """
    return dropped(dp, kept) + delta


def _draw[T](
    thread: Instructions[T], counter: Callable[[int], tuple[T, T, T, T]], keys: list[tuple[T, T]], least: int
) -> T:
    """Draw bits: bit 7 - k of byte w is whether word w of call k is kept."""
    bits = [
        thread.if_least(x, least, 1 << (8 * w + 7 - k))
        for k in range(_EIGHTS)
        for w, x in enumerate(_philox(thread, counter(k), keys))
    ]
    total, *rest = bits
    for bit in rest:
        total = thread.either(total, bit)
    return total


def _philox[T](
    thread: Instructions[T], counter: tuple[T, T, T, T], keys: list[tuple[T, T]]
) -> tuple[T, T, T, T]:
    """Compute the ten rounds of Philox4x32."""
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        high0, low0 = thread.multiply(c0, MULTIPLIERS[0])
        high1, low1 = thread.multiply(c2, MULTIPLIERS[1])
        c0, c1 = thread.xor(thread.xor(high1, c1), k0), low1
        c2, c3 = thread.xor(thread.xor(high0, c3), k1), low0
    return c0, c1, c2, c3


def _round_keys[T](thread: Instructions[T], place: Place[T]) -> list[tuple[T, T]]:
    low, high = WEYL
    return [
        (
            thread.add(place.seed_low, thread.constant(i * low % 2**32)),
            thread.add(place.seed_high, thread.constant(i * high % 2**32)),
        )
        for i in range(ROUNDS)
    ]


def _group[T](thread: Instructions[T], place: Place[T]) -> T:
    """Return the first key's group of four."""
    return thread.divide(place.key, _GROUP)[0]


def _sum[T](thread: Instructions[T], *numbers: T) -> T:
    total, *rest = numbers
    for number in rest:
        total = thread.add(total, number)
    return total


class _Registers:
    """`Instructions` of a GPU."""

    def constant(self, value: int) -> Any:
        i32 = _i32()
        return arith.constant(i32, ir.IntegerAttr.get(i32, value - (value >> 31 << 32)))

    def thread(self) -> Any:
        return arith.andi(utils.thread_idx(), self.constant(_THREADS - 1))

    def add(self, x: Any, y: Any) -> Any:
        return arith.addi(x, y)

    def xor(self, x: Any, y: Any) -> Any:
        return arith.xori(x, y)

    def either(self, x: Any, y: Any) -> Any:
        return arith.ori(x, y)

    def divide(self, x: Any, by: int) -> tuple[Any, Any]:
        return arith.divui(x, self.constant(by)), arith.remui(x, self.constant(by))

    def multiply(self, x: Any, by: int) -> tuple[Any, Any]:
        wide = ir.IntegerType.get_signless(64)
        product = arith.muli(arith.extui(wide, x), arith.constant(wide, ir.IntegerAttr.get(wide, by)))
        half = arith.constant(wide, ir.IntegerAttr.get(wide, 32))
        return arith.trunci(_i32(), arith.shrui(product, half)), arith.trunci(_i32(), product)

    def if_odd(self, x: Any, odd: int, even: int) -> Any:
        bit = arith.trunci(ir.IntegerType.get_signless(1), x)
        return arith.select(bit, self.constant(odd), self.constant(even))

    def if_least(self, x: Any, least: int, bit: int) -> Any:
        found = arith.cmpi(arith.CmpIPredicate.uge, x, self.constant(least))
        return arith.select(found, self.constant(bit), self.constant(0))

    def exchange(self, x: Any, lanes: int) -> Any:
        return utils.shfl_bfly(x, lanes)

    def permute(self, x: Any, y: Any, selector: Any) -> Any:
        return llvm.inline_asm(_i32(), [x, y, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _masked(_: Any, x: Any, kept: Any) -> Any:
    """Return the kept part of each register of x, which has two neighbouring columns."""
    thread = _Registers()
    words = [vector.extract(register, [], [0]) for register in kept.registers.flat]
    registers = np.empty(x.registers.size, object)
    for i, register in enumerate(x.registers.flat):
        column, half = divmod(i, 2)
        word = words[column // _EIGHTS]
        moved = arith.shli(word, thread.constant(column % _EIGHTS))
        registers[i] = _kept(register, moved, half)
    return gpu.FragmentedArray(
        _registers=registers.reshape(x.registers.shape), _layout=x.layout, _is_signed=x.is_signed
    )


def _kept(register: Any, word: Any, half: int) -> Any:
    """Return a register, two numbers of 16 or of 32 bits, where the signs of two bytes are set."""
    thread = _Registers()
    size = utils.bitwidth(register.type) // 32
    integers = ir.VectorType.get((size,), _i32())
    # A digit of 8 or more stands for a byte's sign, in all of its bits.
    low, high = (8 + 2 * half + i for i in range(2))
    selectors = [low * 0x1111, high * 0x1111] if size == 2 else [low * 0x11 + high * 0x1100]
    parts = vector.bitcast(integers, register)
    kept = [
        arith.andi(vector.extract(parts, [], [i]), thread.permute(word, word, thread.constant(selector)))
        for i, selector in enumerate(selectors)
    ]
    return vector.bitcast(register.type, vector.from_elements(integers, kept))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)
