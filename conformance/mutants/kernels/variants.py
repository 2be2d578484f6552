"""The correct ways to compute flash attention that the kernels of this folder choose between."""

import math
from dataclasses import dataclass, replace

from attest.reference.numerics import Numerics


@dataclass(frozen=True)
class Variant:
    """One way to compute; every combination is a correct kernel.

    name: what subjects are called by. query_block, key_block: tokens of a tile; multiples of four, because
    one Philox call serves four keys.
    exponential: "exp", or "exp2" of logits in base two.
    lazy: the reference of the exponentials moves only once the row maximum has grown by more than this.
    above: the reference exceeds the row maximum by as much, so that float16 loses more small weights.
    passes: 2 finds maximum and sum of a row first, and the output in a second pass over the keys.
    normalised_first: the weights are divided by their sum before they are cast; needs two passes.
    sums: "plain"; "kahan" compensates the sums over key blocks; "split" sums rows and channels in parts.
    reverse_keys: key blocks run from the last to the first.
    tanh: "library", "expm1" by the exponential, "double" in float64 (NumPy alone).
    delta: "out" for rowsum(dO * O), "weights" for the sum of P * dP.
    lse_again: the backward pass computes the lse anew. reverse_rows: it runs from the last row block.
    dropout_first: the factor 1 / (1 - rate) is in the weights before they are cast.
    splits: partial results over ranges of keys, which are merged.
    """

    name: str = "plain"
    query_block: int = 64
    key_block: int = 64
    exponential: str = "exp"
    lazy: float = 0.0
    above: float = 0.0
    passes: int = 1
    normalised_first: bool = False
    sums: str = "plain"
    reverse_keys: bool = False
    tanh: str = "library"
    delta: str = "out"
    lse_again: bool = False
    reverse_rows: bool = False
    dropout_first: bool = False
    splits: int = 1

    def declared(self, numerics: Numerics) -> Numerics:
        """Return the numerics of a plain kernel with what this way to compute changes."""
        # Weights that are relative to more than their maximum are smaller, and become 0 earlier.
        lost = numerics.half_subnormal * math.exp(self.above)
        return replace(numerics, splits=self.splits, half_subnormal=lost)


VARIANTS = (
    Variant(),
    Variant("small_blocks", query_block=16, key_block=16),
    Variant("wide_blocks", query_block=32, key_block=256),
    Variant("exp2", exponential="exp2"),
    Variant("lazy", lazy=5.0, key_block=32),
    Variant("above", above=0.125),
    Variant("two_passes", passes=2),
    Variant("normalised_first", passes=2, normalised_first=True),
    Variant("kahan", sums="kahan", key_block=32),
    Variant("split_sums", sums="split"),
    Variant("reverse_keys", reverse_keys=True),
    Variant("tanh_by_expm1", tanh="expm1"),
    Variant("tanh_in_double", tanh="double"),
    Variant("delta_of_weights", delta="weights"),
    Variant("lse_again", lse_again=True),
    Variant("reverse_rows", reverse_rows=True, query_block=32),
    Variant("dropout_first", dropout_first=True),
    Variant("split_keys", splits=3, key_block=32),
)
