"""The block sizes that the table chooses for TPU kernels, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import asdict, replace

from attest.kernels.call.call import Call
from attest.kernels.configs.rows import Row, device_kind, half
from attest.kernels.configs.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.pallas.tpu.blocks import LANES, BackwardSizes, BlockSizes, Config, choose, shrunk

_FIELDS = {"q_blocksize": "q", "kv_blocksize": "k"}
# Multiples of the lanes, which is what compiles for a TPU; likeliest first.
_PAIRS = (
    (512, 512), (512, 1024), (256, 512), (1024, 512), (256, 1024), (512, 256), (256, 256), (128, 512),
    (1024, 1024), (128, 256), (256, 128), (128, 128),
)  # fmt: skip


def chosen(call: Call) -> Config:
    """Return what the table has, cut to what the lengths need."""
    dim = max(call.query.shape[3], call.value.shape[3])
    itemsize, lengths = call.query.dtype.itemsize, (call.query.shape[1], call.key.shape[1])

    def of(kernel: str) -> BlockSizes:
        return choose(kernel, dim, itemsize, *lengths)

    bias = None if call.bias is None else of("backward_bias")
    return Config(of("forward"), BackwardSizes(of("backward_query"), of("backward_key"), bias))


def candidates(call: Call, most: int | None = None) -> tuple[Config, ...]:
    """Return blocks of 128 to 1024 rows and keys, keys capped near a window: for each kernel alone."""
    first = chosen(call)
    backward = first.backward or BackwardSizes()
    return distinct(
        first,
        most,
        (replace(first, forward=sizes) for sizes in _sizes(call)),
        (replace(first, backward=replace(backward, query=sizes)) for sizes in _sizes(call)),
        (replace(first, backward=replace(backward, key=sizes)) for sizes in _sizes(call)),
    )


def rows(call: Call, config: Config) -> tuple[Row, ...]:
    """Return a row for each kernel, for calls of the same head dim and device."""
    backward = vars(config.backward or BackwardSizes())
    by_kernel = {"forward": config.forward} | {f"backward_{name}": x for name, x in backward.items()}
    dim = max(call.query.shape[3], call.value.shape[3])
    selecting = {"bytes": call.query.dtype.itemsize, "over": half(dim), "head_dim": dim}
    return tuple(
        {"kernel": kernel, **selecting, **asdict(sizes), "devices": [device_kind()]}
        for kernel, sizes in by_kernel.items()
        if sizes is not None
    )


def translated(call: Call, forward: Neutral, backward: Neutral) -> Config:
    """Return the block sizes that neutral sizes say, the others as the table has them."""
    check_understood("pallas_tpu", "fwd_params", forward, frozenset(_FIELDS))
    check_understood("pallas_tpu", "bwd_params", backward, frozenset(_FIELDS))
    first = chosen(call)
    by_kernel = first.backward or BackwardSizes()

    def of(sizes: BlockSizes | None) -> BlockSizes | None:
        return None if sizes is None else _with(sizes, backward)

    sizes = BackwardSizes(of(by_kernel.query), of(by_kernel.key), of(by_kernel.bias))
    return Config(_with(first.forward or BlockSizes(), forward), sizes)


def capped(call: Call, q: int, k: int) -> Config:
    """Return the table's choice with forward blocks of at most q rows and k keys, and no smaller than 128."""
    first = chosen(call)
    sizes = first.forward or BlockSizes()

    def at_most(size: int, limit: int) -> int:
        return min(size, max(LANES, limit // LANES * LANES))

    return replace(first, forward=BlockSizes(at_most(sizes.q, q), at_most(sizes.k, k)))


def _sizes(call: Call) -> Iterator[BlockSizes]:
    for q, k in _PAIRS:
        if useful(q, call.query.shape[1], LANES) and useful(k, key_span(call), LANES):
            yield shrunk(BlockSizes(q, k), call.query.shape[1], call.key.shape[1])


def _with(sizes: BlockSizes, given: Neutral) -> BlockSizes:
    return replace(sizes, **{_FIELDS[name]: x for name, x in given.items()})


TUNABLE = Tunable(chosen, candidates, translated, frozenset(_FIELDS), capped, rows)
