"""The Subjects of `jax.experimental.pallas.ops.gpu.attention.mha`: on a GPU, and interpreted on a CPU.

Its documentation is in its source, where `mha_reference` states what the kernel should compute:
https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/gpu/attention.py. In our words:

- The scale `sm_scale` is 1 unless one is given.
- Causal order starts in the top-left corner, for any two lengths: `jnp.tril` of [q_seq_len, kv_seq_len].
- Lengths are multiples of the blocks. In the backward pass, queries and keys have equally many blocks, so the
  adapter chooses blocks of a size that gives this. On a GPU, Pallas takes blocks whose sizes are powers of 2,
  so there are two lengths, one twice the other.
- "These block sizes should be tuned for the model and hardware": on a GPU, those of wide heads are smaller,
  so that shared memory has room for them.
- Segment ids are those of queries and keys together, which a call with other ids for the keys cannot use.
- Head dims of query, key and value are the same. Key heads are as many as query heads.
- out is differentiated by query, key and value.
- The reference multiplies all values by the weights, so a NaN in a hidden one leaks.
- Shapes are checked; nothing is said about other arguments.

Importing it warns that it is deprecated in favour of tokamax.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers.jax_nn import on_matrix_units
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics
from attest.reference.semantics import Semantics

_BACKWARD = 32  # the default size of all blocks of the backward pass
_MULTIPLE = 128
# Bytes on a GPU. A kernel holds five: two stages of keys and of values, and the queries. Hopper has 227 KiB.
_LARGEST_BLOCK = 1 << 15


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_scale: float = 1.0,
    causal: bool = False,
    blocks: tuple[int, int],
    interpret: bool = False,
) -> Any:
    library = _library()
    q_len, kv_len = query.shape[1], key.shape[1]
    rows = max(blocks) if interpret else _most_rows(query)
    count = math.gcd(q_len, kv_len) // min(_BACKWARD, rows // 2)
    sizes = library.BlockSizes(
        *(min(block, rows) for block in blocks),
        block_q_dkv=_BACKWARD,
        block_kv_dkv=kv_len // count,
        block_q_dq=q_len // count,
        block_kv_dq=_BACKWARD,
    )
    return library.mha(
        query, key, value, None, sm_scale=softmax_scale, causal=causal, block_sizes=sizes, interpret=interpret
    )


def _most_rows(query: Any) -> int:
    """Return the rows of the largest block that a GPU has room for; head dims are padded to a power of 2."""
    return _LARGEST_BLOCK // (query.dtype.itemsize << (query.shape[-1] - 1).bit_length())


def _gpu_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic with the fewest keys in a step that the adapter chooses."""
    fewest = Tiling(tiling.options, tiling.query_block, min(tiling.key_block or _BACKWARD, _BACKWARD))
    return on_matrix_units(default_numerics(dtype, fewest), dtype)


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return import_module("jax.experimental.pallas.ops.gpu.attention")


def _subject(
    name: str, backend: str, longest: int, numerics: Callable[[str, Tiling], Numerics], **options: Any
) -> Subject:
    return Subject(
        name=name,
        distribution="jax",
        call=partial(_call, **options),
        features=frozenset({"scale", "causal"}),
        dtypes=DTYPES,
        semantics=Semantics(
            default_scale="one",
            hidden_nonfinite="leaks",
            causal="top_left",
            gradients=frozenset({"query", "key", "value"}),
            lse_gradient=False,
        ),
        numerics=numerics,
        backend=backend,
        interpreter="Pallas" if backend == "cpu" else "",
        tilings=tuple(Tiling({"blocks": size}, *size) for size in ((32, 64), (128, 128))),
        limits=Limits(longest=longest, length_multiple=_MULTIPLE, validates=False),
    )


GPU = _subject("jax.pallas.gpu.mha", "gpu", 2 * _MULTIPLE, _gpu_numerics)
INTERPRETED = _subject("jax.pallas.gpu.mha.interpreted", "cpu", 512, default_numerics, interpret=True)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INTERPRETED,)
UNCONFIRMED = (GPU,)
