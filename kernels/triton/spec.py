"""`KernelSpec`: everything about a launch that its kernel is compiled for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelSpec:
    """The sizes, features and constants that a kernel is compiled for, its one `tl.constexpr` parameter SPEC.

    It is hashable, so that equal calls share a compiled kernel. A field that a kernel does not read keeps its
    default, for the same reason. Device functions read fields as `SPEC.block_q`. Triton 3.6 passes ints,
    floats and bools of it on to another device function, but no strings and no lists of fields: `tl.zeros` is
    such a function, `tl.full` is not.

    Sizes:
        head_dim, value_dim: the last dimensions of query and key, and of value.
        k_heads, group: key heads, and the query heads that share each of them.
        block_q, block_k: query rows and keys of a tile.
        together: how many heads are taken together, see `attest.kernels.visibility.tile_order`.
    Logits; `attest.kernels.triton.tile` explains their unit:
        scale: what the product is multiplied by before rounding, bias and cap.
        unit, nats: the bits and the nats of a unit of u.
        cap: the soft cap, 0.0 where there is none.
        logits_dtype: the dtype that logits are rounded to.
        precision: the `input_precision` of `tl.dot`.
    Features, each False where the call has none of it:
        mask, bias: there is one; mask_batch, mask_head, mask_row, mask_key, bias_batch, bias_head, bias_row,
            bias_key: it has that dimension, and is not broadcast over it.
        first, last: rows have a first, a last visible key; row_batch: they differ by batch entry,
            and so do the ranges.
        segments: queries and keys have segment ids.
        alibi: heads have slopes; slope_batch: those of each batch entry are others.
        ranges: the blocks that a block visits are given; all are visited where they are not.
        aligned: the number of keys is a multiple of 16.
        even_q, even_k: the lengths are multiples of block_q, of block_k.
        dropout: pairs are dropped; threshold: the uint32 from which on a Philox word keeps its pair; keep:
            the factor of what is kept; own_batch, own_head: each batch entry, each head has a mask of its own
            (S29).
    Loops:
        full_loop, partial_loop: the kernel visits blocks that every row sees in full; it visits others.
        hides: some pair is hidden, so that a hidden value that is not finite may leak as 0 * NaN.
    Of the forward kernel:
        power, huge: see `attest.kernels.triton.tile.row_unit`; lowest: where the running maximum begins.
        sinks: their number a head; sink_head: each head has its own; block_sinks: the power of two that holds
            them.
        normalize: out is divided by the sum of the weights.
        parts: into how many the keys are cut, each with an out of its own.
    Of the backward kernels:
        softmax_scale: the derivative of a logit by its product.
        weighted: rows have a weight, since out was not divided.
        sum_key, sum_value: which of its gradients `backward_key` sums and stores.
    """

    head_dim: int
    value_dim: int
    k_heads: int
    group: int
    block_q: int
    block_k: int
    scale: float
    unit: float
    nats: float
    cap: float
    logits_dtype: str
    precision: str
    mask: bool
    mask_batch: bool
    mask_head: bool
    mask_row: bool
    mask_key: bool
    bias: bool
    bias_batch: bool
    bias_head: bool
    bias_row: bool
    bias_key: bool
    first: bool
    last: bool
    row_batch: bool
    segments: bool
    alibi: bool
    slope_batch: bool
    ranges: bool
    aligned: bool
    even_q: bool
    even_k: bool
    dropout: bool
    threshold: int
    keep: float
    own_batch: bool = True
    own_head: bool = True
    together: int = 1
    full_loop: bool = True
    partial_loop: bool = True
    hides: bool = False
    power: float = 1.0
    huge: float = 0.0
    lowest: float = 0.0
    sinks: int = 0
    sink_head: bool = False
    normalize: bool = True
    parts: int = 1
    softmax_scale: float = 1.0
    weighted: bool = False
    sum_key: bool = True
    sum_value: bool = True

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.k_heads * self.group

    @property
    def q_stride(self) -> int:
        """The elements between a query and the next one of its head."""
        return self.heads * self.head_dim

    @property
    def k_stride(self) -> int:
        """The elements between a key and the next one of its head."""
        return self.k_heads * self.head_dim

    @property
    def v_stride(self) -> int:
        """The elements between a value and the next one of its head."""
        return self.k_heads * self.value_dim

    @property
    def out_stride(self) -> int:
        """The elements between a row of out and the next one of its head."""
        return self.heads * self.value_dim

    @property
    def block_d(self) -> int:
        """The columns of a tile of queries or keys."""
        return max(16, _power_of_two(self.head_dim))

    @property
    def block_dv(self) -> int:
        """The columns of a tile of values."""
        return max(16, _power_of_two(self.value_dim))

    @property
    def block_sinks(self) -> int:
        """The sinks that a head loads, those past their number as -inf."""
        return _power_of_two(max(1, self.sinks))

    @property
    def blocks(self) -> dict[str, int]:
        """The sizes of its tiles by name, as errors and reports name them."""
        return {
            "BLOCK_Q": self.block_q,
            "BLOCK_K": self.block_k,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
        }


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
