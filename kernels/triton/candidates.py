"""The block sizes that the table chooses for Triton kernels, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import replace

from attest.kernels.call.call import Call
from attest.kernels.configs.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.triton.blocks import BackwardSizes, BlockSizes, Config, choose
from attest.kernels.triton.passes import largest_dim, work_of
from attest.kernels.triton.target import target_device

_FIELDS = {"q_blocksize": "q", "kv_blocksize": "k", "num_warps": "num_warps", "num_stages": "num_stages"}
_SMALLEST = 32
_LEAST = 16  # what a dot takes

# q, k, warps and stages, likeliest first: at head dims up to 64, up to 128, and beyond.
_FORWARD = {
    64: ((128, 128, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 4, 2), (64, 128, 4, 3), (64, 64, 4, 2),
         (128, 32, 4, 3), (64, 32, 4, 3), (128, 128, 4, 2), (128, 64, 8, 3), (32, 64, 2, 3), (32, 32, 2, 3)),
    128: ((128, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 4, 2), (128, 64, 8, 2),
          (128, 32, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2), (64, 32, 4, 3), (64, 128, 4, 2),
          (128, 32, 8, 3), (32, 64, 4, 3)),
    256: ((128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 8, 2), (64, 32, 4, 2), (64, 32, 8, 3), (128, 32, 8, 2),
          (64, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 4, 3)),
}  # fmt: skip
_BACKWARD = {
    64: ((64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (32, 64, 4, 2), (128, 64, 8, 3), (64, 128, 8, 2),
         (32, 32, 4, 3), (32, 128, 4, 2), (128, 32, 4, 2), (32, 32, 2, 2)),
    128: ((64, 64, 8, 2), (64, 32, 4, 3), (32, 64, 4, 2), (64, 64, 4, 2), (128, 64, 8, 3), (32, 128, 8, 2),
          (64, 32, 4, 2), (32, 32, 4, 2), (128, 32, 8, 2), (64, 128, 8, 2)),
    256: ((64, 32, 8, 2), (32, 32, 4, 2), (32, 64, 8, 2), (32, 128, 8, 2), (32, 32, 8, 2), (64, 64, 8, 2)),
}  # fmt: skip


def chosen(call: Call) -> Config:
    """Return what the table has for the device that kernels are compiled for."""

    def of(kernel: str) -> BlockSizes:
        itemsize = call.query.dtype.itemsize
        return choose(kernel, target_device(), largest_dim(call), itemsize, work_of(call))

    bias = None if call.bias is None else of("backward_bias")
    return Config(of("forward"), BackwardSizes(of("backward_query"), of("backward_key"), bias))


def candidates(call: Call) -> tuple[Config, ...]:
    """Return blocks by head dim and lengths, keys capped near a window: for each kernel alone."""
    first = chosen(call)
    backward = first.backward or BackwardSizes()
    return distinct(
        first,
        (replace(first, forward=sizes) for sizes in _sizes(_FORWARD, call)),
        (replace(first, backward=replace(backward, query=sizes)) for sizes in _sizes(_BACKWARD, call)),
        (replace(first, backward=replace(backward, key=sizes)) for sizes in _sizes(_BACKWARD, call)),
    )


def translated(call: Call, forward: Neutral, backward: Neutral) -> Config:
    """Return the block sizes that neutral sizes say, the others as the table has them."""
    check_understood("triton", "fwd_params", forward, frozenset(_FIELDS))
    check_understood("triton", "bwd_params", backward, frozenset(_FIELDS))
    first = chosen(call)
    by_kernel = first.backward or BackwardSizes()

    def of(sizes: BlockSizes | None) -> BlockSizes | None:
        return None if sizes is None else _with(sizes, backward)

    sizes = BackwardSizes(of(by_kernel.query), of(by_kernel.key), of(by_kernel.bias))
    return Config(_with(first.forward or BlockSizes(), forward), sizes)


def capped(call: Call, q: int, k: int) -> Config:
    """Return the table's choice with forward blocks of at most q rows and k keys, and no smaller than 16."""
    first = chosen(call)
    sizes = first.forward or BlockSizes()

    def at_most(size: int, limit: int) -> int:
        return min(size, max(_LEAST, 1 << limit.bit_length() - 1))

    return replace(first, forward=replace(sizes, q=at_most(sizes.q, q), k=at_most(sizes.k, k)))


def _sizes(table: dict[int, tuple[tuple[int, int, int, int], ...]], call: Call) -> Iterator[BlockSizes]:
    dim = next(dim for dim in sorted(table) if largest_dim(call) <= dim)
    for q, k, warps, stages in table[dim]:
        if useful(q, call.query.shape[1], _SMALLEST) and useful(k, key_span(call), _SMALLEST):
            yield BlockSizes(q, k, warps, stages)


def _with(sizes: BlockSizes, given: Neutral) -> BlockSizes:
    return replace(sizes, **{_FIELDS[name]: x for name, x in given.items()})


TUNABLE = Tunable(chosen, candidates, translated, frozenset(_FIELDS), capped)
