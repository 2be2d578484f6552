"""The contract of an implementation: what it supports, and the two passes that it alone can do.

An implementation is one `Implementation` record. Its `Capabilities` are read by the choice of an
implementation, by refusals and by the declarations of the test suite. Its `Passes` are a forward and a
backward pass over a checked `Call`. Everything else happens once, in `attest.kernels.differentiate`: empty
calls, the lse of padding rows, the terms of each row, sinks and their gradient, casts, and differentiation.

The papers' symbols: S = scaled logits, P = probabilities, O = output, L = lse, dS and dP their cotangents,
Delta = rowsum(dO * O).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attest.kernels.call.call import Call
from attest.kernels.call.options import FLOAT_DTYPES, refuse, shown
from attest.kernels.configs.tunable import Tunable
from attest.kernels.numerics.row_terms import RowTerms
from attest.kernels.versions import Versions


@dataclass(frozen=True)
class Capabilities:
    """The limits of an implementation. Cheap to import, so that the choice loads only what it runs."""

    # The backends of JAX that it is chosen for; None: every one.
    backends: tuple[str, ...] | None = None
    # Backends where it also runs if it is named: interpreted, or compiled for a device that is not here.
    named_on: tuple[str, ...] = ()
    # If set, it runs only on GPUs of this compute capability.
    compute_capability: str | None = None
    # Of query, key and value.
    dtypes: tuple[str, ...] = FLOAT_DTYPES
    # Of bias and logits.
    logits_dtypes: tuple[str, ...] = FLOAT_DTYPES
    # None: any.
    largest_head_dim: int | None = None
    dropout: bool = True
    # Whether keys may have positions of their own (S23).
    kv_positions: bool = False
    # Whether it computes ALiBi (S25).
    alibi: bool = False
    # Whether batch and lengths may be symbolic, as under `jax.export`.
    symbolic: bool = False
    # The packages that it needs beside JAX, by the names that Python imports.
    packages: tuple[str, ...] = ()
    # Those that it needs beside them on GPUs of AMD.
    amd_packages: tuple[str, ...] = ()
    # The versions of JAX on which it was judged; None: any.
    jax_versions: Versions | None = None


@dataclass(frozen=True)
class Settings:
    """The static settings beside the call; block sizes and precision are as the implementation reads them.

    unrounded: whether both passes return float32, as it is before the last rounding. It is for calls on a
        part of the keys, whose results are merged: see `attest.kernels.numerics.partial`. The lse of
        `RowTerms` is then that of all keys, and forward keeps nothing that depends on its own.
    reads_row_max: whether the caller reads row_max although out is normalised: see `Forward`.
    function: the name of the public function, with which messages about derivatives begin.
    followed: whether a backward pass reads what the forward pass returns.
    """

    forward: Any
    backward: Any
    normalize_output: bool
    precision: Any
    logits_dtype: str
    unrounded: bool = False
    reads_row_max: bool = False
    function: str = "flash_attention"
    followed: bool = False

    def result_dtype(self, dtype: Any) -> Any:
        """Return the dtype of out or of a gradient, from the one that it is otherwise rounded to."""
        return jnp.dtype(jnp.float32) if self.unrounded else dtype


class Forward(NamedTuple):
    """The results of a forward pass.

    out: [B, Sq, Hq, Dv] in the dtype of query, float32 if it is unrounded. lse: [B, Hq, Sq] float32. row_max:
    [B, Hq, Sq] float32, the maximum over visible keys alone, -inf where a row sees none. Where out is
    normalised and nothing else of it is read, a pass may return less for rows that see a key. kept: what else
    the backward pass uses.
    """

    out: jax.Array
    lse: jax.Array
    row_max: jax.Array
    kept: Any = None


class Backward(NamedTuple):
    """The results of a backward pass: gradients of the shapes of their arguments.

    They have any float dtype, float32 if they are unrounded.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None


def _no_sizes(name: str, sizes: Any) -> None:
    if sizes is not None:
        refuse(name, shown(sizes), "None", "This implementation has no block sizes.")


_NO_FORWARD_SIZES = partial(_no_sizes, "fwd_params")
_NO_BACKWARD_SIZES = partial(_no_sizes, "bwd_params")


def _fixed_precision(precision: Any) -> Any:
    return check_precision(precision, {None: None}, "It is fixed.")


@dataclass(frozen=True)
class Passes:
    """The two passes of an implementation.

    forward: out, lse and row maximum of a call that has queries and keys. The lse of padding rows may be
        anything.
    backward: from the settings, the call, its `RowTerms` and what forward kept to the gradients (S14, S15).
    check_forward, check_backward: from fwd_params and bwd_params as given to what `Settings` holds.
    check_precision: the same for precision. All three raise ValueError naming the argument.
    cleans_rows: whether the backward pass itself stops NaN rows (NaN in query or lse) from reaching keys that
        they do not see. If not, `RowTerms` has zeros in their query and d_out.
    partitioned: whether XLA may partition both passes on automatic meshes. JAX lowers nothing there that has
        references to arrays which are changed in place.
    """

    forward: Callable[[Settings, Call], Forward]
    backward: Callable[[Settings, Call, RowTerms, Any], Backward]
    check_forward: Callable[[Any], Any] = _NO_FORWARD_SIZES
    check_backward: Callable[[Any], Any] = _NO_BACKWARD_SIZES
    check_precision: Callable[[Any], Any] = _fixed_precision
    cleans_rows: bool = False
    partitioned: bool = True


@dataclass(frozen=True)
class Implementation:
    """One implementation of flash attention.

    name: the value of `platform` that names it. load: imports and returns its passes. config: returns the
    class of its configurations without importing its kernels, None if it has none; see
    `attest.kernels.config`. tunable: imports and returns what chooses its block sizes, None if it has none.
    """

    name: str
    capabilities: Capabilities
    load: Callable[[], Passes]
    config: Callable[[], type[Any] | None] = lambda: None
    tunable: Callable[[], Tunable | None] = lambda: None


def check_precision[T](precision: Any, known: Mapping[Any, T], advice: str) -> T:
    """Return what `known` has for a `precision`: None, a name or a `jax.lax.Precision`."""
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    try:
        return known[precision]
    except (KeyError, TypeError):
        refuse("precision", shown(precision), f"one of {', '.join(map(repr, known))}", advice)


def check_blocks(name: str, blocks: Any, expected: tuple[type, ...], advice: str) -> Any:
    """Return block sizes as a call gives them: None, or of one of the types that are expected."""
    if blocks is not None and not isinstance(blocks, expected):
        refuse(name, f"a {type(blocks).__name__}", " or ".join(x.__name__ for x in expected), advice)
    return blocks
