"""The block sizes that the table chooses for Triton kernels, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from attest.kernels.call.call import Call
from attest.kernels.configs.rows import Row, half
from attest.kernels.configs.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.triton.blocks import BackwardSizes, BlockSizes, Config, choose, columns
from attest.kernels.triton.passes import forward_work, largest_dim, work_of
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
# After those, every combination of these q, k, warps and stages.
_SMALL_FORWARD = ((128, 256), (64, 128), (4, 8), (2, 3, 4))
_SMALL_QUERY = ((64, 128), (32, 64, 128), (4, 8), (2, 3))
_SMALL_KEY = ((32, 64), (64, 128), (4, 8), (1, 2, 3))
_WIDE = ((32, 64), (32, 64), (4, 8), (1, 2))
_SWEEPS = {
    "forward": {64: _SMALL_FORWARD, 128: _SMALL_FORWARD, 256: ((64, 128), (32, 64), (4, 8), (1, 2, 3))},
    "query": {64: _SMALL_QUERY, 128: _SMALL_QUERY, 256: _WIDE},
    "key": {64: _SMALL_KEY, 128: _SMALL_KEY, 256: _WIDE},
}


def chosen(call: Call) -> Config:
    """Return what the table has for the device that kernels are compiled for."""

    def of(kernel: str) -> BlockSizes:
        itemsize = call.query.dtype.itemsize
        return choose(kernel, target_device(), largest_dim(call), itemsize, _work(kernel, call))

    bias = None if call.bias is None else of("backward_bias")
    return Config(of("forward"), BackwardSizes(of("backward_query"), of("backward_key"), bias))


def candidates(call: Call, most: int | None = None) -> tuple[Config, ...]:
    """Return blocks by head dim and lengths, keys capped near a window: for each kernel alone."""
    first = chosen(call)
    backward = first.backward or BackwardSizes()
    return distinct(
        first,
        most,
        (replace(first, forward=sizes) for sizes in _sizes("forward", call)),
        (replace(first, backward=replace(backward, query=sizes)) for sizes in _sizes("query", call)),
        (replace(first, backward=replace(backward, key=sizes)) for sizes in _sizes("key", call)),
    )


def rows(call: Call, config: Config) -> tuple[Row, ...]:
    """Return a row for each kernel, for calls of the same head dim, device and work."""
    backward = vars(config.backward or BackwardSizes())
    by_kernel = {"forward": config.forward} | {f"backward_{name}": x for name, x in backward.items()}
    dim = largest_dim(call)
    return tuple(
        {
            "kernel": kernel,
            "bytes": call.query.dtype.itemsize,
            "over": half(dim),
            "head_dim": dim,
            **columns(sizes),
            "devices": [target_device()],
            "any": [_work(kernel, call)],
        }
        for kernel, sizes in by_kernel.items()
        if sizes is not None
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


def _work(kernel: str, call: Call) -> str:
    """Return the work by which the passes look up a kernel's blocks."""
    return forward_work(call) if kernel == "forward" else work_of(call)


def _sizes(kernel: str, call: Call) -> Iterator[BlockSizes]:
    likely, sweeps = (_FORWARD, _SWEEPS["forward"]) if kernel == "forward" else (_BACKWARD, _SWEEPS[kernel])
    dim = next(dim for dim in sorted(likely) if largest_dim(call) <= dim)
    for q, k, warps, stages in (*likely[dim], *product(*sweeps[dim])):
        if useful(q, call.query.shape[1], _SMALLEST) and useful(k, key_span(call), _SMALLEST):
            yield BlockSizes(q, k, warps, stages)


def _with(sizes: BlockSizes, given: Neutral) -> BlockSizes:
    return replace(sizes, **{_FIELDS[name]: x for name, x in given.items()})


TUNABLE = Tunable(chosen, candidates, translated, frozenset(_FIELDS), capped, rows)
