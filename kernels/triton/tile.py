"""One tile in the Triton kernels: loads, logits, hidden pairs and the pairs that dropout keeps.

A tile is [queries, keys], or [keys, queries] where a kernel holds it TRANSPOSED: what belongs to rows and to
keys is broadcast accordingly, so that either way round is the same code. SPEC is the launch's
`attest.kernels.triton.spec.KernelSpec`.

Logits are kept in a unit of their own: a logit is u * UNIT bits, a bit being log(2). Without bias, ALiBi
and cap u is the bare product q . k, so that the scale costs nothing but the multiplication inside exp2; with
a cap u is the tanh, so that the derivative of the cap is 1 - u * u.
"""

import triton
import triton.language as tl

from attest.kernels.numerics.philox import MULTIPLIERS, ROUNDS, WEYL

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LAST_BITS = tl.constexpr(2.0**-19)  # that may differ between a logit and the reference of its row
_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def load_tile(pointer, order, limit, LAYOUT: tl.constexpr, CHECK: tl.constexpr):
    """Load [rows, block] from `pointer`, row 0, in the `order` given: the index [rows] of each row.

    LAYOUT: a `RowLayout`. 0 in rows from `limit` on (if CHECK) and in columns past its width.
    """
    rows = order[:, None]
    columns = tl.arange(0, LAYOUT.block)[None, :]
    address = pointer + rows * LAYOUT.stride + columns
    if CHECK:
        if LAYOUT.width == LAYOUT.block:
            tile = tl.load(address, mask=rows < limit, other=0.0)
        else:
            tile = tl.load(address, mask=(rows < limit) & (columns < LAYOUT.width), other=0.0)
    elif LAYOUT.width == LAYOUT.block:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=columns < LAYOUT.width, other=0.0)
    return tile


@triton.jit
def store_tile(pointer, tile, order, limit, LAYOUT: tl.constexpr, CHECK: tl.constexpr):
    """Store a tile, as `load_tile` loads: rounded to the pointer's dtype, nothing past the limits."""
    rows = order[:, None]
    columns = tl.arange(0, LAYOUT.block)[None, :]
    address = pointer + rows * LAYOUT.stride + columns
    tile = tile.to(pointer.dtype.element_ty)
    if CHECK:
        tl.store(address, tile, mask=(rows < limit) & (columns < LAYOUT.width))
    elif LAYOUT.width == LAYOUT.block:
        tl.store(address, tile)
    else:
        tl.store(address, tile, mask=columns < LAYOUT.width)


@triton.jit
def row_pointer(pointer, batch, head, length, start, LAYOUT: tl.constexpr):
    """Return a pointer to row `start` of a head of `length` rows, in 64 bits; LAYOUT: a `RowLayout`."""
    return pointer + (batch.to(tl.int64) * length + start) * LAYOUT.stride + head * LAYOUT.width


@triton.jit
def pair_offset(batch, head, q_length, k_length, HEADS: tl.constexpr, AXES: tl.constexpr):
    """Return the elements before the [queries, keys] plane of a head in a mask or bias of such `PairAxes`."""
    plane = tl.zeros([], tl.int64)
    if AXES.by_batch:
        plane += batch.to(tl.int64) * (HEADS if AXES.by_head else 1)
    if AXES.by_head:
        plane += head
    return plane * (q_length if AXES.by_query else 1) * (k_length if AXES.by_key else 1)


@triton.jit
def by_row(x, TRANSPOSED: tl.constexpr):
    """Return [R] as [R, 1], or as [1, R] beside the keys of a transposed tile."""
    if TRANSPOSED:
        x = x[None, :]
    else:
        x = x[:, None]
    return x


@triton.jit
def by_key(x, TRANSPOSED: tl.constexpr):
    """Return [K] as [1, K], or as [K, 1] in a transposed tile."""
    return by_row(x, not TRANSPOSED)


@triton.jit
def load_pairs(
    pointer, rows, index, keys, q_length, k_length, AXES: tl.constexpr, ALIGNED: tl.constexpr,
    CHECK: tl.constexpr, OUTSIDE: tl.constexpr,
):  # fmt: skip
    """Load the tile of a mask or bias whose plane begins at `pointer`; OUTSIDE past the lengths, if CHECK.

    `index` and `keys` are the rows and keys of the tile, and broadcast against each other; so does the tile
    with those of pairs, where rows or keys share its entries. ALIGNED says that
    k_length is a multiple of 16, so that a row of the tile can be read in wide words.
    """
    if pointer.dtype.element_ty == tl.int1:
        # AMD's pipeliner keeps tiles in shared memory, which holds no single bits.
        pointer = pointer.to(tl.pointer_type(tl.int8), bitcast=True)
    stride = (k_length // 16) * 16 if ALIGNED else k_length
    if AXES.by_query and AXES.by_key:
        address = pointer + rows.start.to(tl.int64) * stride + (index - rows.start) * stride + keys
        inside = (index < q_length) & (keys < k_length)
    elif AXES.by_query:
        address = pointer + index
        inside = index < q_length
    elif AXES.by_key:
        address = pointer + keys
        inside = keys < k_length
    else:
        address = pointer + tl.zeros_like(keys)
        inside = keys < k_length
    if CHECK:
        tile = tl.load(address, mask=inside, other=OUTSIDE)
    else:
        tile = tl.load(address)
    return tile


@triton.jit
def tanh(x):
    """Compute tanh to 2**-21 or better, relative: an odd rational function of x (as in Eigen and XLA)."""
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
    left, right, arrays, rows, keys, SPEC: tl.constexpr, EVEN: tl.constexpr, EDGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Return u of the tile left @ right.T (S1 to S9, S25): product, scale, rounding, bias, ALiBi, cap, mask.

    left and right are queries and keys, or keys and queries if TRANSPOSED; `arrays`, `rows` and `keys` are
    records of `attest.kernels.triton.program`. What is hidden becomes -inf; without EDGE every pair is taken
    for visible: the tile lies within what all its rows see. EVEN: the lengths are multiples of the blocks.
    """
    q_length, k_length = arrays.q_length, arrays.k_length
    index = by_row(rows.index, TRANSPOSED)
    key = by_key(keys.start + keys.order, TRANSPOSED)
    # What is read pair by pair is asked for before the product, which hides the wait. Past the queries mask
    # and bias hide: there NaN of a key would reach its gradients as NaN * 0.
    if SPEC.logits.bias is not None:
        BIAS: tl.constexpr = SPEC.logits.bias
        added = load_pairs(
            rows.bias, rows, index, key, q_length, k_length, BIAS, SPEC.shape.aligned_k, not EVEN,
            float("-inf"),
        )  # fmt: skip
    if EDGE:
        if SPEC.visibility.mask is not None:
            MASK: tl.constexpr = SPEC.visibility.mask
            allowed = load_pairs(
                rows.mask, rows, index, key, q_length, k_length, MASK, SPEC.shape.aligned_k,
                not EVEN, 0,
            )  # fmt: skip
        if SPEC.visibility.segments:
            key_ids = tl.load(rows.kv_ids + key, mask=key < k_length, other=-2)
    u = tl.dot(left, tl.trans(right), input_precision=SPEC.logits.precision)
    if SPEC.logits.scale != 1.0:
        u = u * SPEC.logits.scale
    if SPEC.logits.dtype == "bfloat16":
        u = u.to(tl.bfloat16).to(tl.float32)
    if SPEC.logits.dtype == "float16":
        u = u.to(tl.float16).to(tl.float32)
    if SPEC.logits.bias is not None:
        u = u + added.to(tl.float32)
    if SPEC.logits.alibi:
        u = u - rows.slope * tl.abs(by_row(rows.stand, TRANSPOSED) - key).to(tl.float32)
    if SPEC.logits.cap != 0.0:
        u = tanh(u * (1.0 / SPEC.logits.cap))
    if EDGE:
        visible = tl.full([1, 1], 1, tl.int1)
        if SPEC.visibility.last:
            visible = key <= by_row(rows.last, TRANSPOSED)
        elif not EVEN:
            visible = key < k_length
        if SPEC.visibility.first:
            visible = visible & (by_row(rows.first, TRANSPOSED) <= key)
        if SPEC.visibility.segments:
            visible = visible & (by_row(rows.ids, TRANSPOSED) == key_ids)
        if SPEC.visibility.mask is not None:
            visible = visible & (allowed != 0)
        if SPEC.logits.bias is not None:
            visible = visible & (added != float("-inf"))
        u = tl.where(visible, u, float("-inf"))
    return u


@triton.jit
def row_unit(reference, SPEC: tl.constexpr):
    """Return the factor of u in rows of a reference, in units of u, for u * unit - reference * unit.

    The compiler fuses the first product with the subtraction, and rounds the second. Where its last bits are
    whole numbers that makes 0 or inf of the largest weight. There a power of two, of which both are exact,
    stands in for the unit: logits that differ at all are far apart.
    """
    return tl.where(
        tl.abs(reference * SPEC.logits.unit) > SPEC.softmax.huge, SPEC.softmax.power, SPEC.logits.unit
    )


@triton.jit
def finite_or_zero(x):
    """Return x, with 0 in place of NaN and inf, told by an exponent of ones: no wider copy of x is made."""
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
    """Return three arrays [KEYS] int32: a column's key in its block, its group of four, its place there.

    They are of a row if TRANSPOSED.

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
def kept_pairs(seed, rows, keys, SPEC: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return which pairs of a tile dropout keeps (clauses S12, S29), bool: Philox4x32-10.

    `seed` points to six words, as `attest.kernels.numerics.philox.dropout_words` returns them; `rows` and
    `keys` are records of `attest.kernels.triton.program`, and the first key is a multiple of 4.
    """
    words = by_key(keys.word, TRANSPOSED)
    c1, c0 = tl.broadcast(
        by_row(rows.index, TRANSPOSED).to(tl.uint32) + tl.load(seed + 4),
        (keys.start // 4 + by_key(keys.group, TRANSPOSED)).to(tl.uint32) + (tl.load(seed + 5) >> 2),
    )
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    if SPEC.dropout.by_head:
        c2 = c2 + rows.head.to(tl.uint32) + tl.load(seed + 3)
    if SPEC.dropout.by_batch:
        c3 = c3 + rows.batch.to(tl.uint32) + tl.load(seed + 2)
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
    return tl.where(words < 2, low, high) >= tl.full([], SPEC.dropout.threshold, tl.uint32)
