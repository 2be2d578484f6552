"""Ring attention on each of our kernels, over devices of this process (S21).

A call takes whole arrays, spreads their sequence over some devices and returns whole results, which are
judged as those of any kernel. How many devices, and by which strategy, are the tilings: they may move results
within rounding alone (S18, S21).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax

from attest.conformance.subject import Subject, Tiling
from attest.conformance.subjects import mosaic_gpu, pallas, triton, xla
from attest.conformance.subjects._explicit import why_not_sharded
from attest.kernels.ring import ring_attention_with_lse
from attest.reference.numerics import Numerics

_AXIS = "sequence"
# Each device gets a multiple of so many rows and keys.
_SHARD = 8


@dataclass(frozen=True)
class _Kernel:
    """A kernel that computes the pairs of a ring.

    declared: its Subject. platform: the name of its implementation. interpret: makes a call that Pallas's
    interpreter runs; None where it runs as it is.
    """

    declared: Subject
    platform: str
    interpret: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None


_BY_NAME = {
    subject.name: subject
    for subject in (*xla.SUBJECTS, *triton.SUBJECTS, *pallas.SUBJECTS, *mosaic_gpu.SUBJECTS)
}
_KERNELS: Mapping[str, _Kernel] = {
    "xla": _Kernel(_BY_NAME["xla.flash_attention"], "xla"),
    "triton.interpret": _Kernel(_BY_NAME["triton.interpret"], "triton"),
    "triton.cuda": _Kernel(_BY_NAME["triton.cuda"], "triton"),
    "pallas.tpu_interpret": _Kernel(
        _BY_NAME["pallas.tpu_interpret"], "pallas_tpu", partial(pallas.interpreted_call, seed=1)
    ),
    "pallas.mosaic_gpu": _Kernel(_BY_NAME["pallas.mosaic_gpu"], "mosaic_gpu"),
}

# The most devices first, since lengths are drawn for many shards; "long" calls run on the last.
_CHOICES = (
    (8, "ring"),
    (4, "zigzag"),
    (2, "ulysses"),
    (3, "all_gather"),
    (2, "ring"),
    (2, "zigzag"),
)


def _call(
    kernel: _Kernel, query: Any, key: Any, value: Any, *, devices: int, strategy: str, **options: Any
) -> Any:
    """Run ring attention on whole arrays."""
    strategy = _possible(strategy, devices, query.shape[2], key.shape[2])
    run = partial(
        ring_attention_with_lse,
        platform=kernel.platform,
        mesh=_mesh(devices),
        axis_name=_AXIS,
        strategy=strategy,
    )
    if kernel.interpret is not None:
        run = kernel.interpret(run)
    return run(query=query, key=key, value=value, **options)


def _possible(strategy: str, devices: int, heads: int, key_heads: int) -> str:
    """The strategy; "all_gather" on as many devices in place of "ulysses" with heads that they cannot share."""
    shared_out = heads % devices == 0 and (key_heads % devices == 0 or devices % key_heads == 0)
    return "all_gather" if strategy == "ulysses" and not shared_out else strategy


@cache
def _mesh(devices: int) -> Any:
    automatic: Any = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), (_AXIS,), axis_types=automatic, devices=jax.local_devices()[:devices])


def _tiling(devices: int, strategy: str) -> Tiling:
    return Tiling({"devices": devices, "strategy": strategy}, _SHARD, _SHARD)


def _numerics(kernel: _Kernel, dtype: str, tiling: Tiling) -> Numerics:
    """Those of the kernel that computes a pair, with its default blocks, and one merge for each pair.

    Partial results are float32, and so are sums of gradients, which are rounded once.
    """
    production = kernel.declared.tilings[-1]
    declared = kernel.declared.numerics(dtype, Tiling({}, production.query_block, production.key_block))
    pieces = {"zigzag": 2, "ring": 1}.get(str(tiling.options["strategy"]), 0)
    return replace(declared, splits=max(1, pieces * int(tiling.options["devices"])))


def _subject(name: str, kernel: _Kernel) -> Subject:
    def ready() -> str | None:
        return kernel.declared.ready() or why_not_sharded()

    return replace(
        kernel.declared,
        name=f"ring.{name}",
        call=partial(_call, kernel),
        numerics=partial(_numerics, kernel),
        tilings=tuple(_tiling(*choice) for choice in _CHOICES),
        ready=ready,
        meshes=(),
    )


SUBJECTS: tuple[Subject, ...] = tuple(_subject(name, kernel) for name, kernel in _KERNELS.items())
