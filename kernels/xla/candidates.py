"""The chunk sizes that the XLA kernels choose, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from attest.kernels.call.call import Call
from attest.kernels.configs.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.xla import whole
from attest.kernels.xla.blocks import ChunkSizes, Config
from attest.kernels.xla.table import choose, rows

_FIELDS = {"q_blocksize": "q", "kv_blocksize": "k"}
_SMALLEST = 128
_PAIRS = ((256, 512), (512, 512), (128, 256), (512, 256), (128, 512), (128, 128), (256, 128), (256, 256))


def chosen(call: Call) -> Config:
    """Return what the table has; without a row, the passes choose by the platform of the compiled program."""
    return Config(choose("forward", call), choose("backward", call))


def candidates(call: Call, most: int | None = None) -> tuple[Config, ...]:
    """Return chunks of 128 to 512 rows and keys, for each pass alone, which are tiles on every platform."""
    first = chosen(call)
    return distinct(
        first,
        most,
        (replace(first, forward=sizes) for sizes in _chunks(call)),
        (replace(first, backward=sizes) for sizes in _chunks(call)),
    )


def translated(call: Call, forward: Neutral, backward: Neutral) -> Config:
    """Return the chunk sizes that neutral sizes say, the others as the kernels choose."""
    check_understood("xla", "fwd_params", forward, frozenset(_FIELDS))
    check_understood("xla", "bwd_params", backward, frozenset(_FIELDS))
    first = chosen(call)
    return Config(_with(first.forward, forward), _with(first.backward, backward))


def capped(call: Call, q: int, k: int) -> Config:
    """Return the kernels' choice with forward chunks of at most q rows and k keys."""
    if whole.takes(call):
        return chosen(call)
    sizes = chosen(call).forward or ChunkSizes()
    return replace(chosen(call), forward=ChunkSizes(min(sizes.q, q), min(sizes.k, k)))


def _chunks(call: Call) -> Iterator[ChunkSizes]:
    for q, k in _PAIRS:
        if useful(q, call.query.shape[1], _SMALLEST) and useful(k, key_span(call), _SMALLEST):
            yield ChunkSizes(q, k)


def _with(sizes: ChunkSizes | None, given: Neutral) -> ChunkSizes | None:
    if not given:
        return sizes
    return ChunkSizes(**{**asdict(sizes or ChunkSizes()), **{_FIELDS[name]: x for name, x in given.items()}})


TUNABLE = Tunable(chosen, candidates, translated, frozenset(_FIELDS), capped, rows)
