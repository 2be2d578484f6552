"""`KernelSpec`: everything about a launch that its kernel is compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowLayout:
    """The rows of a head of an array [B, S, H, D], in memory and in a tile."""

    stride: int  # elements between a row and the next one of its head
    width: int  # channels of a row

    @property
    def block(self) -> int:
        """The columns of a tile: a power of two."""
        return max(16, _power_of_two(self.width))


@dataclass(frozen=True)
class Shape:
    """The sizes of heads and tiles, and how a grid of programs divides them."""

    head_dim: int  # of query and key
    value_dim: int  # of the value
    k_heads: int
    group: int  # query heads that share a key head
    block_q: int  # query rows of a tile
    block_k: int  # keys of a tile
    even_q: bool  # the number of queries is a multiple of block_q
    even_k: bool  # the number of keys is a multiple of block_k
    aligned_k: bool  # the number of keys is a multiple of 16
    head_swizzle: int = 1  # heads whose blocks alternate, see `attest.kernels.visibility.tile_order`
    key_parts: int = 1  # parts of the keys, each with an out of its own, in the forward kernel

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.k_heads * self.group

    @property
    def even(self) -> bool:
        """Whether both lengths are multiples of their blocks."""
        return self.even_q and self.even_k

    @property
    def query(self) -> RowLayout:
        """The layout of query, and of its gradient."""
        return RowLayout(self.heads * self.head_dim, self.head_dim)

    @property
    def key(self) -> RowLayout:
        """The layout of key, and of its gradient."""
        return RowLayout(self.k_heads * self.head_dim, self.head_dim)

    @property
    def value(self) -> RowLayout:
        """The layout of value, and of its gradient."""
        return RowLayout(self.k_heads * self.value_dim, self.value_dim)

    @property
    def out(self) -> RowLayout:
        """The layout of out, and of its cotangent."""
        return RowLayout(self.heads * self.value_dim, self.value_dim)


@dataclass(frozen=True)
class PairAxes:
    """Which axes of a mask or a bias are not broadcast."""

    by_batch: bool
    by_head: bool
    by_query: bool
    by_key: bool


@dataclass(frozen=True)
class Logits:
    """The logits: the product of query and key becomes u, see `attest.kernels.triton.tile`."""

    scale: float  # what the product is multiplied by before rounding, bias and cap
    unit: float  # the bits of a unit of u
    nats: float  # the nats of a unit of u
    cap: float  # the soft cap, 0.0 where there is none
    dtype: str  # that logits are rounded to
    precision: str  # the `input_precision` of `tl.dot`, for all products
    bias: PairAxes | None  # None without a bias
    alibi: bool  # heads have slopes
    slopes_by_batch: bool  # each batch entry has slopes of its own


@dataclass(frozen=True)
class Visibility:
    """The conditions by which a row sees a key."""

    first: bool  # rows have a first visible key
    last: bool  # rows have a last visible key
    segments: bool  # queries and keys have segment ids
    by_batch: bool  # first, last and the ranges have an entry for each batch entry
    ranges: bool  # the blocks that a block visits are given; it visits all where they are not
    mask: PairAxes | None  # None without a mask


@dataclass(frozen=True)
class Dropout:
    """Dropout of query-key pairs (S12, S29)."""

    threshold: int  # the uint32 from which on a Philox word keeps its pair
    kept_scale: float  # the factor of what is kept
    by_batch: bool  # each batch entry has a mask of its own
    by_head: bool  # each query head has a mask of its own


@dataclass(frozen=True)
class Loops:
    """The loops over blocks that a kernel has code for."""

    full: bool  # over blocks that every row sees in full
    partial: bool  # over other blocks
    hides: bool = False  # some pair is hidden, so that a hidden value that is not finite may leak as 0 * NaN


@dataclass(frozen=True)
class Softmax:
    """The online softmax of the forward kernel; the defaults stand for no forward kernel."""

    power: float = 1.0  # see `attest.kernels.triton.tile.row_unit`
    huge: float = 0.0  # see `attest.kernels.triton.tile.row_unit`
    lowest: float = 0.0  # where the running maximum begins
    sinks: int = 0  # of a head
    sinks_by_head: bool = False  # each head has sinks of its own
    normalize: bool = True  # out is divided by the sum of the weights

    @property
    def block_sinks(self) -> int:
        """The sinks that a head loads, those past their number as -inf."""
        return _power_of_two(max(1, self.sinks))


@dataclass(frozen=True)
class Gradients:
    """The gradients that the backward kernels sum; the defaults stand for no backward kernel."""

    scale: float = 1.0  # the derivative of a logit by its product
    weighted: bool = False  # rows have a weight, since out was not divided
    key: bool = True  # `backward_key` sums and stores the gradient of the key
    value: bool = True  # `backward_key` sums and stores the gradient of the value


@dataclass(frozen=True)
class KernelSpec:
    """The sizes, features and constants that a kernel is compiled for, its one `tl.constexpr` parameter SPEC.

    It is hashable, so that equal calls share a compiled kernel. A field that a kernel does not read keeps its
    default, for the same reason. Device functions read fields as `SPEC.shape.block_q`, and a record that may
    be absent as `SPEC.dropout is not None`: a condition takes no record. Triton 3.6 passes records, ints,
    floats and bools of it on to another device function, but no strings and no lists of fields: `tl.zeros` is
    such a function, `tl.full` is not.
    """

    shape: Shape
    logits: Logits
    visibility: Visibility
    loops: Loops
    dropout: Dropout | None = None
    softmax: Softmax = Softmax()
    gradients: Gradients = Gradients()

    @property
    def pairwise(self) -> bool:
        """Whether a mask or bias is compared with every pair."""
        return self.visibility.mask is not None or self.logits.bias is not None

    @property
    def kept_scale(self) -> float:
        """The factor of the weights of pairs that dropout keeps; 1 without dropout."""
        return 1.0 if self.dropout is None else self.dropout.kept_scale

    @property
    def blocks(self) -> dict[str, int]:
        """The sizes of its tiles by name, as errors and reports name them."""
        return {
            "BLOCK_Q": self.shape.block_q,
            "BLOCK_K": self.shape.block_k,
            "BLOCK_D": self.shape.query.block,
            "BLOCK_DV": self.shape.value.block,
        }


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
