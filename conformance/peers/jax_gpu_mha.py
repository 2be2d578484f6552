"""The Subjects of `jax.experimental.pallas.ops.gpu.attention.mha`: on a GPU, and interpreted on a CPU.

Its documentation is in its source, where `mha_reference` states what the kernel should compute:
https://github.com/jax-ml/jax/blob/main/jax/experimental/pallas/ops/gpu/attention.py. In our words:

- The scale `sm_scale` is 1 unless one is given.
- Causal order starts in the top-left corner, for any two lengths: `jnp.tril` of [q_seq_len, kv_seq_len].
- Lengths are multiples of the blocks. In the backward pass, queries and keys have equally many blocks, so the
  adapter chooses blocks of a size that gives this.
- Segment ids are those of queries and keys together, which a call with other ids for the keys cannot use.
- Head dims of query, key and value are the same. Key heads are as many as query heads.
- out is differentiated by query, key and value.
- The reference multiplies all values by the weights, so a NaN in a hidden one leaks.
- Shapes are checked; nothing is said about other arguments.

Importing it warns that it is deprecated in favour of tokamax.
"""

import math
import warnings
from functools import partial
from importlib import import_module
from typing import Any

from attest.conformance.cases.features import DTYPES
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.semantics import Semantics

_BACKWARD = 32  # the default size of all blocks of the backward pass
_MULTIPLE = 128


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
    count = math.gcd(q_len, kv_len) // _BACKWARD
    sizes = library.BlockSizes(
        *blocks,
        block_q_dkv=_BACKWARD,
        block_kv_dkv=kv_len // count,
        block_q_dq=q_len // count,
        block_kv_dq=_BACKWARD,
    )
    return library.mha(
        query, key, value, None, sm_scale=softmax_scale, causal=causal, block_sizes=sizes, interpret=interpret
    )


def _library() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return import_module("jax.experimental.pallas.ops.gpu.attention")


def _subject(name: str, backend: str, longest: int, **options: Any) -> Subject:
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
        backend=backend,
        interpreter="Pallas" if backend == "cpu" else "",
        tilings=tuple(Tiling({"blocks": size}, *size) for size in ((32, 64), (128, 128))),
        limits=Limits(longest=longest, length_multiple=_MULTIPLE, validates=False),
    )


GPU = _subject("jax.pallas.gpu.mha", "gpu", 1 << 20)
INTERPRETED = _subject("jax.pallas.gpu.mha.interpreted", "cpu", 512, interpret=True)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INTERPRETED,)
UNCONFIRMED = (GPU,)
