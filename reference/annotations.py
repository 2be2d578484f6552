"""The types of the arrays of a problem and of its answer.

`Annotated[NDArray[Any], "Float B Sq Hq D"]` is a float array [B, Sq, Hq, D], in the notation of jaxtyping: a
name means one size in all arrays of a call, and `#` before a name that size or 1. The tests check calls by
it. The oracle itself imports NumPy alone.
"""

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

type Query = Annotated[NDArray[Any], "Float B Sq Hq D"]
"""The queries."""

type Key = Annotated[NDArray[Any], "Float B Sk Hkv D"]
"""The keys; query head h reads key head h // (Hq / Hkv) (S15)."""

type Value = Annotated[NDArray[Any], "Float B Sk Hkv Dv"]
"""The values, with as many heads as the keys."""

type AttentionMask = Annotated[NDArray[Any], "Bool #B #Hq #Sq #Sk"]
"""Whether a row may see a key (S5)."""

type Bias = Annotated[NDArray[Any], "Float #B #Hq #Sq #Sk"]
"""Numbers that are added to the scaled logits (S2)."""

type QSegmentIds = Annotated[NDArray[Any], "Int B Sq"]
"""The segment of each row; a negative one is padding (S8)."""

type KVSegmentIds = Annotated[NDArray[Any], "Int B Sk"]
"""The segment of each key; a negative one is padding (S8)."""

type CumSeqlens = Annotated[NDArray[Any], "Int32 n_plus_1"]
"""Cumulative lengths of n sequences, from 0; queries and keys have the same n (S9)."""

type Sinks = Annotated[NDArray[Any], "Float sinks"] | Annotated[NDArray[Any], "Float #Hq sinks"]
"""Sink logits: shared by all heads, or those of each head (S11)."""

type Offsets = Annotated[NDArray[Any], "Int n"]
"""The position of the first row of each of n sequences (S23)."""

type QPositions = Annotated[NDArray[Any], "Int #B Sq"]
"""The position of each row (S23)."""

type KVPositions = Annotated[NDArray[Any], "Int #B Sk"]
"""The position of each key (S23)."""

type KVRange = Annotated[NDArray[Any], "Int #B Sq"]
"""An index of a key for each row, where its visible keys begin or end (S28)."""

type AlibiSlopes = Annotated[NDArray[Any], "Float32 Hq"] | Annotated[NDArray[Any], "Float32 #B Hq"]
"""What a logit loses for each position between row and key, by query head (S25)."""

type KeptWeights = Annotated[NDArray[Any], "Bool B Hq Sq Sk"]
"""The weights that dropout keeps, where they are not drawn by S12."""

type OutCotangent = Annotated[NDArray[Any], "Float B Sq Hq Dv"]
"""The cotangent of out."""

type LseCotangent = Annotated[NDArray[Any], "Float B Hq Sq"]
"""The cotangent of lse."""

type Rows = Annotated[NDArray[np.int64], "Int64 rows"]
"""Indices of query rows."""

type Keys = Annotated[NDArray[np.int64], "Int64 keys"]
"""Indices of key rows."""

type Out = Annotated[NDArray[np.float64], "Float64 B rows Hq Dv"]
"""The answer's out: all Sq rows, or those of a Sample."""

type Lse = Annotated[NDArray[np.float64], "Float64 B Hq rows"]
"""The answer's lse."""

type QueryGradient = Annotated[NDArray[np.float64], "Float64 B rows Hq D"]
"""The gradient of the queries."""

type KeyGradient = Annotated[NDArray[np.float64], "Float64 B keys Hkv D"]
"""The gradient of the keys: all Sk, or those of a Sample."""

type ValueGradient = Annotated[NDArray[np.float64], "Float64 B keys Hkv Dv"]
"""The gradient of the values."""

type BiasGradient = Annotated[NDArray[np.float64], "Float64 #B #Hq #Sq #Sk"]
"""The gradient of the bias, in its shape."""

type SinksGradient = (
    Annotated[NDArray[np.float64], "Float64 sinks"] | Annotated[NDArray[np.float64], "Float64 #Hq sinks"]
)
"""The gradient of the sinks, in their shape."""
