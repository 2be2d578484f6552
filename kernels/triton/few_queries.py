"""Forward calls with few queries, as in decoding: packed heads, and keys in parts.

The query heads that read one key head become rows of one tile, so that keys and values are read once for all
of them (`attest.kernels.few_queries.pack_heads`). Where there are fewer tiles than programs that a device
runs at a time, each tile is computed in parts of the keys, which are merged here.
"""

from typing import Any

from attest.kernels.call.call import Call
from attest.kernels.contract import Forward
from attest.kernels.numerics.partial import join_sinks, merge_parts

# A part has so many blocks of keys or more: what begins and ends a program takes as long as some blocks.
_FEWEST_BLOCKS = 4


def choose_parts(tiles: int, k_blocks: int, programs: int) -> int:
    """Return into how many parts the keys of a tile are cut, for about `programs` in all; none is empty."""
    wanted = max(1, min(programs // tiles, k_blocks // _FEWEST_BLOCKS))
    return -(-k_blocks // -(-k_blocks // wanted))


def whole(sums: Forward, call: Call, parts: int, dtype: Any) -> Forward:
    """Return the forward pass of `call` from that of its packed heads, without sinks, by parts of the keys.

    sums: out [P * B, G * S, Hkv, Dv], normalised, lse and row_max [P * B, Hkv, G * S], a part after the
    other. dtype: of out.
    """
    outs, lses, row_maxes = (x.reshape(parts, -1, *x.shape[1:]) for x in sums[:3])
    out, lse, row_max = outs[0], lses[0], row_maxes[0]
    if parts > 1:
        out, lse = merge_parts(outs, lses)
        row_max = row_maxes.max(axis=0)
    batch, length, heads, _ = call.query.shape
    k_heads = call.key.shape[2]
    out = out.reshape(batch, heads // k_heads, length, k_heads, -1).transpose(0, 2, 3, 1, 4)
    out = out.reshape(batch, length, heads, -1)
    lse, row_max = (x.reshape(batch, heads, length) for x in (lse, row_max))
    if call.softmax_aux is not None:
        out, lse = join_sinks(out, lse, call.softmax_aux)
    return Forward(out.astype(dtype), lse, row_max)
