"""One tile in the Triton kernels: loads, logits, hidden pairs and the pairs that dropout keeps.

A tile is [queries, keys], or [keys, queries] where a kernel holds it transposed: `rows` and `keys` come as
index tensors that broadcast against each other, so that either way round is the same code.

Logits are kept in a unit of their own: a logit is u * UNIT bits, a bit being log(2). Without bias and cap u
is the bare product q . k, so that the scale costs nothing but the multiplication inside exp2; with a cap u is
the tanh, so that the derivative of the cap is 1 - u * u.
"""

import triton
import triton.language as tl

from attest.kernels.philox import MULTIPLIERS, ROUNDS, WEYL

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LAST_BITS = tl.constexpr(2.0**-19)  # that may differ between a logit and the reference of its row
_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def load_tile(
    pointer, order, limit, ROW_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_WIDTH] from `pointer`, row 0, in the `order` given: the index [rows] of each row.

    0 in rows from `limit` on (if CHECK) and in columns past WIDTH.
    """
    rows = order[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    address = pointer + rows * ROW_STRIDE + columns
    if CHECK:
        if WIDTH == BLOCK_WIDTH:
            tile = tl.load(address, mask=rows < limit, other=0.0)
        else:
            tile = tl.load(address, mask=(rows < limit) & (columns < WIDTH), other=0.0)
    elif WIDTH == BLOCK_WIDTH:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=columns < WIDTH, other=0.0)
    return tile


@triton.jit
def store_tile(
    pointer, tile, order, limit, ROW_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_tile`: rounds to the pointer's dtype, and leaves what lies past the limits."""
    rows = order[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    address = pointer + rows * ROW_STRIDE + columns
    tile = tile.to(pointer.dtype.element_ty)
    if CHECK:
        tl.store(address, tile, mask=(rows < limit) & (columns < WIDTH))
    elif WIDTH == BLOCK_WIDTH:
        tl.store(address, tile)
    else:
        tl.store(address, tile, mask=columns < WIDTH)


@triton.jit
def offset(batch, length, start, ROW_STRIDE: tl.constexpr):
    """Elements before row `start` of a batch entry of `length` rows, in 64 bits."""
    return (batch.to(tl.int64) * length + start) * ROW_STRIDE


@triton.jit
def load_rows(
    first, last, q_ids, batch, rows, q_length, FIRST: tl.constexpr, LAST: tl.constexpr,
    ROW_BATCH: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """First and last visible key and segment id of `rows` [R]; nothing is visible past the length."""
    inside = rows < q_length
    first_key = tl.zeros_like(rows)
    last_key = tl.zeros_like(rows)
    row_ids = tl.zeros_like(rows)
    plane = (batch if ROW_BATCH else 0) * q_length + rows
    if FIRST:
        first_key = tl.load(first + plane, mask=inside, other=0)
    if LAST:
        last_key = tl.load(last + plane, mask=inside, other=-1)
    if SEGMENTS:
        row_ids = tl.load(q_ids + batch * q_length + rows, mask=inside, other=-1)
    return first_key, last_key, row_ids


@triton.jit
def pair_offset(batch, head, q_length, k_length, HEADS: tl.constexpr, PER_BATCH: tl.constexpr,
                PER_HEAD: tl.constexpr, PER_ROW: tl.constexpr):  # fmt: skip
    """Elements before the [queries, keys] plane of a head in a mask or bias that may be broadcast."""
    plane = tl.zeros([], tl.int64)
    if PER_BATCH:
        plane += batch.to(tl.int64) * (HEADS if PER_HEAD else 1)
    if PER_HEAD:
        plane += head
    return plane * (q_length if PER_ROW else 1) * k_length


@triton.jit
def load_pairs(pointer, row_start, rows, keys, q_length, k_length, PER_ROW: tl.constexpr,
               ALIGNED: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """The tile of a mask or bias whose plane begins at `pointer`; 0 outside the lengths, if CHECK.

    ALIGNED says that k_length is a multiple of 16, so that a row of the tile can be read in wide words.
    """
    if pointer.dtype.element_ty == tl.int1:
        # AMD's pipeliner keeps tiles in shared memory, which holds no single bits.
        pointer = pointer.to(tl.pointer_type(tl.int8), bitcast=True)
    stride = (k_length // 16) * 16 if ALIGNED else k_length
    if PER_ROW:
        address = pointer + row_start.to(tl.int64) * stride + (rows - row_start) * stride + keys
        inside = (rows < q_length) & (keys < k_length)
    else:
        address = pointer + keys
        inside = keys < k_length
    if CHECK:
        tile = tl.load(address, mask=inside, other=0)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def tanh(x):
    """tanh to 2**-21 or better, relative: an odd rational function of x (the one of Eigen and XLA)."""
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    s = x * x
    p = -2.76076847742355e-16 * s + 2.00018790482477e-13
    p = p * s - 8.60467152213735e-11
    p = p * s + 5.12229709037114e-08
    p = p * s + 1.48572235717979e-05
    p = p * s + 6.37261928875436e-04
    p = p * s + 4.89352455891786e-03
    q = 1.19825839466702e-06 * s + 1.18534705686654e-04
    q = q * s + 2.26843463243900e-03
    q = q * s + 4.89352518554385e-03
    # q is between 2**-8 and 2**-3: the square of its inverse root is cheaper than a division.
    root = tl.math.rsqrt(q)
    return x * p * (root * root)


@triton.jit
def tile_logits(
    left, right, row_start, rows, keys, q_length, k_length, first, last, row_ids, kv_ids, mask, bias,
    SCALE: tl.constexpr, CAP: tl.constexpr, ROUND: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr,
    BIAS_ROW: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, SEGMENTS: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """u of the tile left @ right.T (clauses S1 to S9): product, scale, rounding, bias, cap, hiding.

    left and right are queries and keys, and `rows` and `keys` their indices within the batch entry, [R, 1]
    and [1, K]; or keys and queries, and [1, R] and [K, 1]. `first`, `last` and `row_ids` belong to the rows;
    `kv_ids`, `mask` and `bias` point at the batch entry or plane. What is hidden becomes -inf; without EDGE
    every pair is taken for visible: the tile lies within what all its rows see. EVEN: the lengths are
    multiples of the blocks.
    """
    # What is read pair by pair is asked for before the product, which hides the wait.
    if BIAS:
        added = load_pairs(bias, row_start, rows, keys, q_length, k_length, BIAS_ROW, ALIGNED, not EVEN)
    if EDGE:
        if MASK:
            allowed = load_pairs(mask, row_start, rows, keys, q_length, k_length, True, ALIGNED, not EVEN)
        if SEGMENTS:
            key_ids = tl.load(kv_ids + keys, mask=keys < k_length, other=-2)
    u = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    if SCALE != 1.0:
        u = u * SCALE
    if ROUND == "bfloat16":
        u = u.to(tl.bfloat16).to(tl.float32)
    if ROUND == "float16":
        u = u.to(tl.float16).to(tl.float32)
    if BIAS:
        u = u + added.to(tl.float32)
    if CAP != 0.0:
        u = tanh(u * (1.0 / CAP))
    if EDGE:
        visible = tl.full([1, 1], 1, tl.int1)
        if LAST:
            visible = keys <= last
        elif not EVEN:
            visible = keys < k_length
        if FIRST:
            visible = visible & (first <= keys)
        if SEGMENTS:
            visible = visible & (row_ids == key_ids)
        if MASK:
            visible = visible & (allowed != 0)
        if BIAS:
            visible = visible & (added != float("-inf"))
        u = tl.where(visible, u, float("-inf"))
    return u


@triton.jit
def row_unit(reference, UNIT: tl.constexpr, POWER: tl.constexpr, HUGE: tl.constexpr):
    """What u is multiplied by in rows of a reference, in units of u, for u * unit - reference * unit.

    The compiler fuses the first product with the subtraction, and rounds the second. Where its last bits are
    whole numbers that makes 0 or inf of the largest weight. There a power of two, of which both are exact,
    stands in for UNIT: logits that differ at all are far apart.
    """
    return tl.where(tl.abs(reference * UNIT) > HUGE, POWER, UNIT)


@triton.jit
def weights_of_lse(u, L, UNIT: tl.constexpr):
    """P from u and the lse in bits (`attest.kernels.exponents`): no weight is above 1; NaN stays NaN."""
    return tl.math.exp2(tl.minimum(u * UNIT - L, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def finite_or_zero(x):
    """x, with 0 in place of NaN and inf, told by an exponent of ones: no wider copy of x is made."""
    if x.dtype == tl.float32:
        exponent = x.to(tl.int32, bitcast=True) & 0x7F800000
        finite = exponent != 0x7F800000
    elif x.dtype == tl.bfloat16:
        exponent = x.to(tl.int16, bitcast=True) & 0x7F80
        finite = exponent != 0x7F80
    else:
        exponent = x.to(tl.int16, bitcast=True) & 0x7C00
        finite = exponent != 0x7C00
    return tl.where(finite, x, 0.0).to(x.dtype)


@triton.jit
def key_order(KEYS: tl.constexpr, DROPOUT: tl.constexpr, TRANSPOSED: tl.constexpr):
    """[KEYS] int32, three times: which key of its block a column of a tile is, or a row if TRANSPOSED; then
    that key's group of four, and its place in the group.

    The keys of a group share a Philox call. In a tile that comes out of NVIDIA's matrix unit a thread holds
    columns 2t, 2t + 1, 2t + 8 and 2t + 9 of 16, or rows t and t + 8. So under dropout keys are handed out in
    an order that gives these to one group: each thread then computes a call once, which the compiler
    sees, and nothing moves between threads. The order changes no result beyond rounding.
    """
    index = tl.arange(0, KEYS)
    order, group, word = index, index // 4, index % 4
    if DROPOUT:
        group = index // 16 * 4 + index // 2 % 4
        if TRANSPOSED:
            word = index % 2 * 2 + index // 8 % 2
        else:
            word = index // 8 % 2 * 2 + index % 2
        order = group * 4 + word
    return order, group, word


@triton.jit
def kept_pairs(seed, batch, head, rows, key_start, groups, words, THRESHOLD: tl.constexpr):
    """Which pairs of a tile dropout keeps (clause S12), bool: Philox4x32-10.

    `seed` points to six words, as `attest.kernels.philox.dropout_words` returns them.
    `rows` are indices within the batch entry; `groups` and `words` as `key_order` has them, from the key
    `key_start` on, a multiple of 4. They broadcast against the rows.
    """
    c1, c0 = tl.broadcast(
        rows.to(tl.uint32) + tl.load(seed + 4),
        (key_start // 4 + groups).to(tl.uint32) + (tl.load(seed + 5) >> 2),
    )
    c2 = tl.zeros_like(c0) + head.to(tl.uint32) + tl.load(seed + 3)
    c3 = tl.zeros_like(c0) + batch.to(tl.uint32) + tl.load(seed + 2)
    k0 = tl.load(seed)
    k1 = tl.load(seed + 1)
    # One wide multiplication gives both halves.
    m0 = tl.full([], _M0, tl.uint64)
    m1 = tl.full([], _M1, tl.uint64)
    for _ in tl.static_range(_ROUNDS):
        wide0 = c0.to(tl.uint64) * m0
        wide1 = c2.to(tl.uint64) * m1
        c0 = (wide1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = wide1.to(tl.uint32)
        c2 = (wide0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = wide0.to(tl.uint32)
        k0 = k0 + tl.full([], _W0, tl.uint32)
        k1 = k1 + tl.full([], _W1, tl.uint32)
    low = tl.where(words == 0, c0, c1)
    high = tl.where(words == 2, c2, c3)
    return tl.where(words < 2, low, high) >= tl.full([], THRESHOLD, tl.uint32)
