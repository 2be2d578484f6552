"""The Subject of EasyDeL's VanillaAttn, in an environment of its own.

EasyDeL 0.3.0 needs other versions of JAX and ejKernel. ATTEST_PEER_PYTHON_EASYDEL names the interpreter of an
environment that has it, such as /path/venv/bin/python. Its documentation is the docstring of
`easydel/operations/kernels/vanilla_attention.py`, at https://github.com/erfanzar/EasyDeL. In our words:

- It computes in the dtype that its metadata names, here that of query, and the softmax in float32.
- It is ejKernel's `attention`: a mask is ignored beside a bias, a cap comes before the bias, and `causal` and
  a window start in the top-left corner.
- A single query is a step of decoding, in which `causal` hides nothing, so lengths are even here.

Not documented, and declared as it is: NaN in a hidden value leaks; a row that sees no key is not judged, and
neither are refusals. Dropout needs a key for each call and is left out.
"""

from dataclasses import replace

from attest.conformance.peers._environments import Environment
from attest.conformance.peers.ejkernel import ATTENTION
from attest.conformance.subject import Limits, Subject

_THERE = Environment("ATTEST_PEER_PYTHON_EASYDEL", "easydel 0.3.0")

VANILLA = _THERE.subject(
    "easydel.vanilla_attention",
    "easydel_calls.py:vanilla",
    features=ATTENTION.features - {"dropout", "value_dim"},
    dtypes=ATTENTION.dtypes,
    semantics=replace(ATTENTION.semantics, dropout="philox_tile"),
    numerics=ATTENTION.numerics,
    limits=Limits(length_multiple=2, sinks="shared", validates=False),
)

SUBJECTS: tuple[Subject, ...] = ()
UNCONFIRMED = (VANILLA,)
