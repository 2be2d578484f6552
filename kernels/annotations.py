"""The types of arrays and options in the signatures of the public functions.

`Float[Array, "*batch Sq Hq D"]` is a float array with these axes. An axis name means one size wherever it
stands in a call: the lengths Sq and Sk, the query heads Hq and key heads Hkv, the head dims D and Dv.
`*batch` is any number of batch dimensions, none included (S27). `#` before a name means that size or 1;
`*#batch` is what broadcasts to the batch dimensions, so that the first ones may be left out.

Some rules are not in the types: Hq is a multiple of Hkv; query, key and value have one dtype of float32,
bfloat16 and float16; options are static. The functions check that themselves, with or without a type checker.
"""

from collections.abc import Sequence
from typing import Literal, SupportsFloat, SupportsIndex

import jax
import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Int64, Integer, UInt32
from jaxtyping import Key as TypedKey

_Given = jax.Array | np.ndarray
_Abstract = jax.ShapeDtypeStruct

type Query = Float[_Given, "*batch Sq Hq D"]
"""The queries."""

type Key = Float[_Given, "*batch Sk Hkv D"]
"""The keys; query head h reads key head h // (Hq / Hkv) (S15)."""

type Value = Float[_Given, "*batch Sk Hkv Dv"]
"""The values, with as many heads as the keys."""

type AbstractQuery = Float[_Abstract, "*batch Sq Hq D"]
"""The shape and dtype of queries."""

type AbstractKey = Float[_Abstract, "*batch Sk Hkv D"]
"""The shape and dtype of keys."""

type Out = Float[jax.Array, "*batch Sq Hq Dv"]
"""The sums of the values, weighted."""

type Lse = Float32[jax.Array, "*batch Hq Sq"]
"""The natural logarithm of the sum of exp over the visible logits and the sinks (S13)."""

type Weights = Float[jax.Array, "*batch Hq Sq Sk"]
"""The probabilities that multiply the values, after dropout."""

type AttentionMask = (
    Bool[_Given, "*#batch #Hq #Sq #Sk"]
    | Integer[_Given, "*#batch #Hq #Sq #Sk"]
    | Bool[_Given, "#Sq #Sk"]
    | Integer[_Given, "#Sq #Sk"]
)
"""Whether a row may see a key: where it is not zero (S5)."""

type Bias = Float[_Given, "*#batch #Hq #Sq #Sk"] | Float[_Given, "#Sq #Sk"]
"""Numbers that are added to the scaled logits (S2)."""

type SpreadMask = (
    Bool[_Given, "*#batch #Hq _ _"]
    | Integer[_Given, "*#batch #Hq _ _"]
    | Bool[_Given, "_ _"]
    | Integer[_Given, "_ _"]
)
"""The same of a sequence that is split over devices: rows and keys are 1, those of a device, or all."""

type SpreadBias = Float[_Given, "*#batch #Hq _ _"] | Float[_Given, "_ _"]
"""The same of numbers that are added to the logits."""

type Sinks = Float[_Given, "sinks"] | Float[_Given, "#Hq sinks"]
"""Sink logits: shared by all heads, or those of each head (S11)."""

type CumSeqlens = Int32[_Given, "n_plus_1"] | Int64[_Given, "n_plus_1"]
"""Cumulative lengths of n sequences, from 0; queries and keys have the same n (S9)."""

type QSegmentIds = Integer[_Given, "*batch Sq"]
"""The segment of each row; a negative one is padding (S8)."""

type KVSegmentIds = Integer[_Given, "*batch Sk"]
"""The segment of each key; a negative one is padding (S8)."""

type QPositions = Integer[_Given, "*#batch Sq"]
"""The position of each row (S23)."""

type KVPositions = Integer[_Given, "*#batch Sk"]
"""The position of each key (S23)."""

type QOffset = int | np.integer | Integer[_Given, ""] | Integer[_Given, "*batch"] | Integer[_Given, "n"]
"""The position of the first row: one for all, or one for each batch entry or each of n sequences (S23)."""

type Origin = Sequence[int | np.integer | Integer[_Given, ""]] | Integer[_Given, "4"]
"""The batch entry, query head, row and key of larger arrays at which a call begins (S23)."""

type KVRange = Integer[_Given, "*#batch Sq"]
"""An index of a key for each row, where its visible keys begin or end (S28)."""

type AlibiSlopes = Float32[_Given, "Hq"] | Float32[_Given, "*#batch Hq"]
"""What a logit loses for each position between row and key, by query head: constants (S25)."""

type DropoutSeed = int | np.integer | Integer[_Given, ""] | UInt32[_Given, "2"] | TypedKey[jax.Array, ""]
"""A concrete integer in [0, 2**64), its low and high words, or a key of `jax.random.key` (S12, S27)."""

type DropoutShared = Literal["b", "h", "bh"]
"""What one mask of dropout serves: all batch entries, all heads, or both; static (S29)."""

type RandomKey = TypedKey[jax.Array, ""] | UInt32[_Given, "words"]
"""A key of `jax.random.key` or of `jax.random.PRNGKey`."""

type SlidingWindow = SupportsIndex | Sequence[SupportsIndex | None]
"""How many keys to the left and to the right a row sees: w for both, or a pair; None is no limit (S7)."""

type Size = SupportsIndex
"""An integer that is static."""

type Number = SupportsFloat
"""One real number that is static."""

type Flag = bool | np.bool_
"""True or False, static."""

# What a MaskInfo is made from, beside the above, and what it holds. Its arrays have one batch dimension.

type MaskOfAxes = (
    Bool[_Given, "#B #Hq #Sq #Sk"]
    | Integer[_Given, "#B #Hq #Sq #Sk"]
    | Bool[_Given, "#B_or_Hq #Sq #Sk"]
    | Integer[_Given, "#B_or_Hq #Sq #Sk"]
    | Bool[_Given, "#B_or_Sq Sk"]
    | Integer[_Given, "#B_or_Sq Sk"]
)
"""A mask of 2 to 4 axes, whose letters tell what they are: "bhqk", "bqk", "hqk", "qk", "bk" or "bt"."""

type SharedQSegmentIds = Integer[_Given, "#B Sq"]
"""The segment of each row, or of each row of all batch entries."""

type SharedKVSegmentIds = Integer[_Given, "#B Sk"]
"""The segment of each key, or of each key of all batch entries."""

type KVLengths = int | np.integer | Integer[_Given, ""] | Integer[_Given, "#B"]
"""How many keys there are: one number, or one for each batch entry."""

type Visible = Bool[jax.Array, "#B #Hq #Sq #Sk"]
"""Whether a row sees a key; what all share has size 1."""

type VisibleBias = Float[jax.Array, "#B #Hq #Sq #Sk"]
"""0 where a row sees a key, and -inf elsewhere."""

type PerRow = Int32[jax.Array, "#B Sq"]
"""A segment, a position or an index of a key for each row."""

type PerKey = Int32[jax.Array, "#B Sk"]
"""A segment or a position for each key."""

type PerEntry = Int32[jax.Array, "#B"]
"""A length for each batch entry."""

type PerSequence = Int32[jax.Array, "n_or_1"]
"""The position of the first row, of each batch entry or sequence, or of all."""

type StoredCumSeqlens = Int32[jax.Array, "n_plus_1"]
"""Cumulative lengths of n sequences."""
