"""Attention on accelerators: a few large pieces, each of some batch entries, all heads, some rows and keys.

How a call is cut is known when it is traced, so no step waits for a decision of the device. Rows are cut
first into parts that see few keys, where order and windows say so. Then a piece has as many batch entries,
or rows of one, as `pieces.toml` permits. Pieces that are alike are steps of one loop, whose length is known.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attest.kernels.call.call import Call
from attest.kernels.call.positions import Positions, moved_origin
from attest.kernels.contract import Backward, Forward, Settings
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.varying import vary_together
from attest.kernels.visibility.intervals import Rows, hides_pairs
from attest.kernels.xla import whole
from attest.kernels.xla.products import products_of
from attest.kernels.xla.tiles import Weighed, any_nonfinite

type Limits = Mapping[str, Any]
LIMITS: Limits = tomllib.loads((Path(__file__).parent / "pieces.toml").read_text())


@dataclass(frozen=True)
class Piece:
    """The start of a piece, in batch entries, rows and keys, and how many of each it has."""

    entry: Any
    row: Any
    key: Any
    entries: int
    rows: int
    keys: int


@dataclass(frozen=True)
class Block:
    """Pieces that are alike, side by side: the first one, and how many there are along each axis."""

    first: Piece
    counts: tuple[int, int, int]

    def piece(self, step: Any) -> Piece:
        """Return the piece of a step; keys change fastest."""
        _, rows, keys = self.counts
        at = self.first
        return replace(
            at,
            entry=at.entry + step // (rows * keys) * at.entries,
            row=at.row + step // keys % rows * at.rows,
            key=at.key + step % keys * at.keys,
        )


def forward(settings: Settings, call: Call, *, keeps: bool = False, limits: Limits = LIMITS) -> Forward:
    """Return the results of the pass; keeps: as in `whole.forward`, of a problem that is one piece."""
    products, rows = products_of(call, settings.precision, wide=False), whole.rows_of(call)
    if keeps:
        return whole.forward(settings, call, products, rows, keeps=True)
    blocks = _blocks(call, rows, limits["forward_logits"], limits, whole_keys=True)
    batch, length, heads, _ = call.query.shape
    dtype = settings.result_dtype(call.query.dtype)

    def run(propagates: bool | None) -> Forward:
        def step(found: Forward, piece: Piece) -> Forward:
            part = part_of(call, rows, piece)
            here = whole.forward(settings, part[0], products, part[1], propagates=propagates)
            out = _put(found.out, here.out, (piece.entry, piece.row, 0, 0))
            lse, row_max = (
                _put(x, y, (piece.entry, 0, piece.row))
                for x, y in ((found.lse, here.lse), (found.row_max, here.row_max))
            )
            return Forward(out, lse, row_max)

        nothing = jnp.zeros((batch, heads, length), jnp.float32)
        out = jnp.zeros((batch, length, heads, call.value.shape[3]), dtype)
        return _walk(blocks, step, _varying(Forward(out, nothing, nothing), call))

    if not hides_pairs(call) and call.dropout_seed is None:
        return run(None)
    found = run(False)

    # What the rows that give such a value no weight have is not computed anew, so that it keeps its bits.
    def marked() -> jax.Array:
        return jnp.where(jnp.isnan(run(True).out), jnp.array(jnp.nan, dtype), found.out)

    return found._replace(out=lax.cond(any_nonfinite(call.value), marked, lambda: found.out))


def backward(
    settings: Settings, call: Call, terms: RowTerms, kept: Weighed | None, *, limits: Limits = LIMITS
) -> Backward:
    """Return the gradients of a call's float arrays (S14, S15)."""
    products, rows = products_of(call, settings.precision, wide=False), whole.rows_of(call)
    if kept is not None:
        return whole.backward(settings, call, products, rows, terms, kept)
    blocks = _blocks(call, rows, limits["backward_logits"], limits, whole_keys=False)
    dtype = settings.result_dtype(call.query.dtype)
    wide = jnp.dtype(jnp.float32)
    # What several pieces add to is float32: rows whose keys are cut, keys that several pieces of rows see.
    key_pieces = {(x.first.row, x.first.key, j) for x in blocks for j in range(x.counts[2])}
    row_pieces = {(x.first.row, i) for x in blocks for i in range(x.counts[1])}
    of_query = wide if len(key_pieces) > len({x.first.row for x in blocks}) else dtype
    of_key = wide if len(row_pieces) > 1 else dtype

    def step(sums: Backward, piece: Piece) -> Backward:
        part = part_of(call, rows, piece)
        here = whole.backward(settings, part[0], products, part[1], _terms_of(terms, piece), None)
        of_rows, of_keys = (piece.entry, piece.row, 0, 0), (piece.entry, piece.key, 0, 0)
        bias = None
        if call.bias is not None and sums.bias is not None and here.bias is not None:
            at = (piece.entry, 0, piece.row, piece.key)
            bias = _put(
                sums.bias,
                here.bias,
                tuple(0 if size == 1 else start for size, start in zip(call.bias.shape, at, strict=True)),
                add=True,
            )
        return Backward(
            _put(sums.query, here.query, of_rows, add=of_query == wide),
            _put(sums.key, here.key, of_keys, add=of_key == wide),
            _put(sums.value, here.value, of_keys, add=of_key == wide),
            bias,
        )

    nothing = Backward(
        jnp.zeros(call.query.shape, of_query),
        jnp.zeros(call.key.shape, of_key),
        jnp.zeros(call.value.shape, of_key),
        None if call.bias is None else jnp.zeros(call.bias.shape, jnp.float32),
    )
    return _walk(blocks, step, _varying(nothing, call))


def part_of(call: Call, rows: Rows, piece: Piece) -> tuple[Call, Rows]:
    """Return a piece as a call of its own, whose keys count from 0, and what decides which keys its rows see.

    Dropout counts from its origin; nothing else of a part's positions is read.
    """

    def cut(x: Any, axes: str) -> Any:
        return None if x is None else _cut(x, axes, piece)

    def moved(x: Any) -> Any:
        return None if x is None else cut(x, "bq") - piece.key

    origin = None
    if call.dropout_seed is not None:
        origin = moved_origin(call.positions.origin, (piece.entry, 0, piece.row, piece.key))
    part = replace(
        call,
        query=cut(call.query, "bq"),
        key=cut(call.key, "bk"),
        value=cut(call.value, "bk"),
        attention_mask=cut(call.attention_mask, "b qk"),
        bias=cut(call.bias, "b qk"),
        q_segment_ids=cut(call.q_segment_ids, "bq"),
        kv_segment_ids=cut(call.kv_segment_ids, "bk"),
        positions=Positions(kv=cut(call.positions.kv, "bk"), origin=origin),
        alibi_slopes=cut(call.alibi_slopes, "b"),
    )
    stand = moved if call.positions.kv is None else partial(cut, axes="bq")
    return part, Rows(
        first=moved(rows.first),
        last=moved(rows.last),
        padding=None,
        lowest=cut(rows.lowest, "bq"),
        highest=cut(rows.highest, "bq"),
        position=stand(rows.position),
    )


def _terms_of(terms: RowTerms, piece: Piece) -> RowTerms:
    return RowTerms(
        query=_cut(terms.query, "bq", piece),
        d_out=_cut(terms.d_out, "bq", piece),
        lse=_cut(terms.lse, "b q", piece),
        delta=_cut(terms.delta, "b q", piece),
        weight=None if terms.weight is None else _cut(terms.weight, "b q", piece),
    )


def _cut(x: Any, axes: str, piece: Piece) -> Any:
    """Return the entries of x in a piece; axes: what its first axes are, a space for one that is whole.

    An axis of size 1 is one that all share, and whole.
    """
    sizes = {"b": (piece.entry, piece.entries), "q": (piece.row, piece.rows), "k": (piece.key, piece.keys)}
    for axis, kind in enumerate(axes):
        if kind == " " or x.shape[axis] == 1:
            continue
        start, size = sizes[kind]
        if isinstance(start, int):
            x = x[(slice(None),) * axis + (slice(start, start + size),)] if size < x.shape[axis] else x
        else:
            x = lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)
    return x


def _put(total: jax.Array, x: jax.Array, starts: tuple[Any, ...], *, add: bool = False) -> jax.Array:
    """Return the array with x written in its place, or added there."""
    if total.shape == x.shape:
        return (total + x if add else x).astype(total.dtype)
    starts = tuple(jnp.asarray(start, jnp.int32) for start in starts)
    if add:
        x = x + lax.dynamic_slice(total, starts, x.shape)
    return lax.dynamic_update_slice(total, x.astype(total.dtype), starts)


def _varying[T](nothing: T, call: Call) -> T:
    return vary_together((nothing, call))[0]


def _walk[T](blocks: list[Block], step: Callable[[T, Piece], T], carry: T) -> T:
    """Call step(carry, piece) for all pieces, one after another."""
    for block in blocks:
        steps = math.prod(block.counts)
        if steps == 1:
            carry = step(carry, block.first)
        else:
            carry = lax.fori_loop(
                0, steps, lambda i, carry, block=block: step(carry, block.piece(jnp.int32(i))), carry
            )
    return carry


def _blocks(call: Call, rows: Rows, logits: int, limits: Limits, *, whole_keys: bool) -> list[Block]:
    """Return the pieces of a call, each of at most so many logits if it has several rows."""
    batch, q_length, heads, _ = call.query.shape
    found: list[Block] = []
    for row, row_stop, key, key_stop in _parts(rows, q_length, call.key.shape[1], limits):
        length, keys = row_stop - row, key_stop - key
        if not whole_keys:
            few = heads * min(length, limits["backward_rows"])
            keys = min(keys, max(limits["backward_keys"], logits // few))
        entries = min(batch, max(1, logits // (heads * length * keys)))
        lines = min(length, max(1, logits // (heads * keys)))
        for a, entries_here, n_a in _cuts(batch, entries):
            for i, rows_here, n_i in _cuts(length, lines):
                for j, keys_here, n_j in _cuts(key_stop - key, keys):
                    piece = Piece(a, row + i, key + j, entries_here, rows_here, keys_here)
                    found.append(Block(piece, (n_a, n_i, n_j)))
    return found


def _cuts(length: int, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield cuts of a length: where equal ones begin, their size and their number; then the rest's."""
    even = next((size for size in range(most, most // 2, -1) if length % size == 0), None)
    size = even or -(-length // -(-length // most))
    count = length // size
    yield 0, size, count
    if count * size < length:
        yield count * size, length - count * size, 1


def _parts(rows: Rows, q_length: int, k_length: int, limits: Limits) -> list[tuple[int, int, int, int]]:
    """Return rows and the keys that some of them see, as far as known when the call is traced."""
    known = [x for x in (rows.first, rows.last) if isinstance(x, np.ndarray)]
    if not known:
        return [(0, q_length, 0, k_length)]
    first = np.zeros(q_length, int) if rows.first is None else np.clip(np.asarray(rows.first)[0], 0, k_length)
    last = np.full(q_length, k_length - 1) if rows.last is None else np.asarray(rows.last)[0]
    step = limits["alignment"]

    def cut(count: int) -> list[tuple[int, int, int, int]]:
        found: list[tuple[int, int, int, int]] = []
        for i in range(count):
            here = slice(q_length * i // count, q_length * (i + 1) // count)
            sees = first[here] <= last[here]
            start = int(np.where(sees, first[here], k_length - 1).min()) // step * step
            stop = min(k_length, -(-(int(np.where(sees, last[here], start).max()) + 1) // step) * step)
            found.append((here.start, here.stop, start, stop))
        return found

    def pairs(parts: list[tuple[int, int, int, int]]) -> int:
        return sum((row_stop - row) * (stop - start) for row, row_stop, start, stop in parts)

    parts = cut(1)
    while 2 * len(parts) <= min(limits["parts"], q_length // limits["part_rows"]):
        finer = cut(2 * len(parts))
        if pairs(finer) > (1 - limits["saving"]) * pairs(parts):
            break
        parts = finer
    return parts
