"""The dropout mask of the oracle: Philox4x32-10 in array coordinates (S12), some of them shared (S29).

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.reference.semantics import Semantics

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)

# The values of `dropout_shared`: of which coordinates one mask serves all.
SHARED = (None, "b", "h", "bh")

Words = NDArray[np.uint32]


def check_dropout(options: Mapping[str, Any], shape: tuple[int, int, int, int]) -> None:
    """Check the options of dropout for weights [B, Hq, Sq, Sk]. Raises ValueError that names the option."""
    rate, seed = options.get("dropout_prob", 0.0), options.get("dropout_seed")
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_prob: got {rate}, expected a probability in [0, 1)")
    if rate and seed is None:
        expected = "an integer of 64 bits, since dropout_prob is above 0"
        raise ValueError(f"dropout_seed: got {seed}, expected {expected}")
    if seed is not None and not (isinstance(seed, Integral) and 0 <= int(seed) < 2**64):
        raise ValueError(f"dropout_seed: got {seed}, expected an integer in [0, 2**64)")
    shared = options.get("dropout_shared")
    if not (shared is None or (isinstance(shared, str) and shared in SHARED)):
        raise ValueError(f"dropout_shared: got {shared!r}, expected 'b', 'h', 'bh' or None")
    keep = options.get("dropout_keep")
    if keep is not None and (keep.dtype != np.bool_ or keep.shape != shape):
        raise ValueError(f"dropout_keep: got {keep.dtype} {keep.shape}, expected bool {shape}")


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> tuple[Words, ...]:
    """Compute ten rounds of Philox4x32: four uint32 words for each counter.

    counter: four broadcastable uint32 arrays. key: two integers of 32 bits.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*counter)
    k0, k1 = key
    for _ in range(10):
        product0 = c0.astype(np.uint64) * _MULTIPLIERS[0]
        product1 = c2.astype(np.uint64) * _MULTIPLIERS[1]
        high0, low0 = (product0 >> _WORD_BITS).astype(np.uint32), (product0 & _LOW_WORD).astype(np.uint32)
        high1, low1 = (product1 >> _WORD_BITS).astype(np.uint32), (product1 & _LOW_WORD).astype(np.uint32)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint32(k0), low1, high0 ^ c3 ^ np.uint32(k1), low0
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def keep_mask(
    semantics: Semantics,
    seed: int,
    rate: float,
    batch: int,
    head: int,
    rows: NDArray[np.int64],
    shape: tuple[int, int, int, int],
    origin: tuple[int, int, int, int] = (0, 0, 0, 0),
    shared: str | None = None,
) -> NDArray[np.bool_]:
    """Return the kept weights of some rows of one head: bool [len(rows), Sk].

    seed: 64 bits, the low word first. rate: dropout probability in [0, 1). shape: (B, Hq, Sq, Sk) of the
    call's array of weights. origin: where its first weight stands in the whole array, by whose coordinates
    all is counted. shared: "b", "h" or "bh", the coordinates that are 0 in the whole array (S29). In the
    counters, the dialects differ:

    philox_tile: word j & 3 of counter (j >> 2, i, h, b), the standard.
    shared_heads: the same with h = 0.
    linear_offset: word 0 of counter (low, high, 0, 0) of the offset ((b H + h) Sq + i) Sk + j.
    chunk_keys: the standard within a chunk of keys, j counted from its start, with the chunk's number
        added to the key's high word.

    Raises ValueError for a linear offset with an origin: it would need the shape of the whole array. And for
    own_generator, of which no counter is known.
    """
    if semantics.dropout == "own_generator":
        raise ValueError("dropout_keep: got None, expected the kept weights, since no generator is known")
    if shared is not None and "b" in shared:
        batch, origin = 0, (0, *origin[1:])
    if semantics.dropout == "shared_heads" or (shared is not None and "h" in shared):
        head, origin = 0, (origin[0], 0, *origin[2:])
    first, stop = origin[3], origin[3] + shape[3]
    key = (seed & 0xFFFFFFFF, seed >> 32)
    threshold = np.uint32(int(np.floor(rate * 2.0**32)))
    i = (rows + origin[2]).astype(np.uint32)[:, None]
    b = np.full((1, 1), batch + origin[0], np.uint32)
    h = np.full((1, 1), head + origin[1], np.uint32)

    if semantics.dropout == "linear_offset":
        if any(origin):
            raise ValueError(f"origin: got {origin}, expected zeros where dropout counts a linear offset")
        columns = np.arange(stop, dtype=np.int64)
        offset = ((batch * shape[1] + head) * shape[2] + rows[:, None]) * shape[3] + columns
        low, high = (offset & 0xFFFFFFFF).astype(np.uint32), (offset >> 32).astype(np.uint32)
        zero = np.zeros((1, 1), np.uint32)
        return philox4x32((low, high, zero, zero), key)[0] >= threshold

    chunk = semantics.dropout_chunk if semantics.dropout == "chunk_keys" else max(stop, 1)
    words = [np.empty((len(rows), 0), np.uint32)]
    for number in range(first // chunk, -(-stop // chunk)):
        left, right = max(first - number * chunk, 0), min(stop - number * chunk, chunk)
        quads = np.arange(left // 4, -(-right // 4), dtype=np.uint32)[None, :]
        quartet = philox4x32((quads, i, h, b), (key[0], (key[1] + number) & 0xFFFFFFFF))
        columns = np.stack(quartet, axis=-1).reshape(len(rows), 4 * quads.size)
        words.append(columns[:, left % 4 : left % 4 + right - left])
    return np.concatenate(words, axis=1) >= threshold
