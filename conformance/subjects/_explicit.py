"""Operations with the configuration that a call gives, on one device and over the devices of a mesh."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from attest.conformance.shards import shards
from attest.conformance.subject import Way
from attest.conformance.subjects._run_by_operations import JudgedKernel, Sizes, exact
from attest.kernels import flash_attention
from attest.kernels.operations import FlashAttention
from attest.kernels.operations.functions import default_executor
from attest.kernels.operations.sharded import sharded_call

# The axes of each operand that specs are for: batch, query heads, key heads, or whole on every device.
_AXES = {
    "query": "b.h.",
    "key": "b.k.",
    "value": "b.k.",
    "bias": "bh..",
    "cum_seqlens_q": ".",
    "cum_seqlens_k": ".",
    "softmax_aux": "h.",
}


def explicit(kernel: JudgedKernel) -> Callable[..., Any]:
    """Return a call that gives its configuration: `blocks`, the sizes of all blocks."""
    return partial(_given, kernel, kernel.operation(), _nowhere)


def sharded(kernel: JudgedKernel) -> Callable[..., Any]:
    """Return a call that gives its configuration, and is spread over the devices of this process."""
    given = kernel.wrap_call(partial(_given, kernel, kernel.operation(), over_devices))

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return given(query=query, key=key, value=value, **options)

    return call


def why_not_sharded() -> str | None:
    """Return why no call can be sharded in this process, in one clause."""
    return None if jax.local_device_count() > 1 else "needs a process with several devices"


def over_devices(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return mesh, in_specs and out_specs of a call: batch and heads over as many devices as divide both."""
    batch, _, heads, _ = arguments["query"].shape
    parts = shards(batch, heads, jax.local_device_count())
    specs = [_spec(axes, arguments.get(name), batch, heads, parts) for name, axes in _AXES.items()]
    return {"mesh": _mesh(parts), "in_specs": tuple(specs), "out_specs": specs[0]}


def sharded_way(kernel: JudgedKernel) -> Way:
    """Return how the check `configuration` sees that the configuration of a sharded call counts."""

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        """Call the operation, over devices."""
        arguments = {"query": query, "key": key, "value": value, **options}
        cfg = exact(kernel.platform, kernel.traced[0], arguments)
        return default_executor()(FlashAttention(), cfg=cfg, **arguments, **over_devices(arguments))

    def directly(sizes: Sizes | None, query: Any, key: Any, value: Any, **options: Any) -> Any:
        """Call the kernel without an operation, over the same devices."""
        arguments = {"query": query, "key": key, "value": value, **options}
        config = None if sizes is None else exact(kernel.platform, sizes, arguments).config
        run = partial(flash_attention, config=config)
        function, operands = sharded_call(run, arguments, **over_devices(arguments))
        return function(*operands)

    first, second = kernel.traced
    others = {"the tables' choice": partial(directly, None), "another one": partial(directly, second)}
    return Way("an explicit one over a mesh", call, partial(directly, first), others)


def _given(
    kernel: JudgedKernel,
    operation: FlashAttention,
    where: Callable[[dict[str, Any]], dict[str, Any]],
    query: Any,
    key: Any,
    value: Any,
    *,
    blocks: Sizes,
    **options: Any,
) -> Any:
    arguments = {"query": query, "key": key, "value": value, **options}
    cfg = exact(kernel.platform, blocks, arguments)
    return default_executor()(operation, cfg=cfg, **arguments, **where(arguments))


def _nowhere(_arguments: dict[str, Any]) -> dict[str, Any]:
    return {}


@cache
def _mesh(parts: tuple[int, int]) -> Any:
    devices = jax.local_devices()[: parts[0] * parts[1]]
    automatic: Any = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(parts, ("batch", "heads"), axis_types=automatic, devices=devices)


def _spec(axes: str, x: Any, batch: int, heads: int, parts: tuple[int, int]) -> PartitionSpec | None:
    """Return the spec of an operand; one entry for all, or too few for the devices, is whole."""
    if x is None:
        return None
    own = {
        "b": ("batch", batch, parts[0]),
        "h": ("heads", heads, parts[1]),
        "k": ("heads", x.shape[2] if x.ndim == 4 else 0, parts[1]),
    }
    entries: list[str | None] = []
    for kind, size in zip(axes[len(axes) - x.ndim :], x.shape, strict=True):
        axis, whole, over = own.get(kind, (None, 0, 1))
        entries.append(axis if size == whole and size % over == 0 else None)
    return PartitionSpec(*entries)
