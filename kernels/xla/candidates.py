"""The chunk sizes that the XLA kernels choose, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from attest.kernels.arguments import Call
from attest.kernels.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.xla import whole
from attest.kernels.xla.blocks import ChunkSizes, Config

_FIELDS = {"q_blocksize": "q", "kv_blocksize": "k"}
_SMALLEST = 128
_PAIRS = ((256, 512), (512, 512), (128, 256), (512, 256), (128, 512), (128, 128), (256, 128), (256, 256))


def chosen(call: Call) -> Config:
    """Return no chunk sizes for a call that is computed in one piece, else those of all others."""
    return Config() if whole.takes(call) else Config(ChunkSizes(), ChunkSizes())


def candidates(call: Call) -> tuple[Config, ...]:
    """Return chunks of 128 to 512 rows and keys, for each pass alone."""
    first = chosen(call)
    default = ChunkSizes()
    return distinct(
        first,
        (Config(sizes, first.backward or default) for sizes in _chunks(call)),
        (Config(first.forward or default, sizes) for sizes in _chunks(call)),
    )


def translated(call: Call, forward: Neutral, backward: Neutral) -> Config:
    """Return the chunk sizes that neutral sizes say, the others as the kernels choose."""
    check_understood("xla", "fwd_params", forward, frozenset(_FIELDS))
    check_understood("xla", "bwd_params", backward, frozenset(_FIELDS))
    first = chosen(call)
    return Config(_with(first.forward, forward), _with(first.backward, backward))


def capped(call: Call, q: int, k: int) -> Config:
    """Return the kernels' choice with forward chunks of at most q rows and k keys."""
    first = chosen(call)
    sizes = first.forward
    return first if sizes is None else replace(first, forward=ChunkSizes(min(sizes.q, q), min(sizes.k, k)))


def _chunks(call: Call) -> Iterator[ChunkSizes]:
    for q, k in _PAIRS:
        if useful(q, call.query.shape[1], _SMALLEST) and useful(k, key_span(call), _SMALLEST):
            yield ChunkSizes(q, k)


def _with(sizes: ChunkSizes | None, given: Neutral) -> ChunkSizes | None:
    if not given:
        return sizes
    return ChunkSizes(**{**asdict(sizes or ChunkSizes()), **{_FIELDS[name]: x for name, x in given.items()}})


TUNABLE = Tunable(chosen, candidates, translated, frozenset(_FIELDS), capped)
