"""Ring attention on each of our kernels, over devices of this process (S21).

A call takes whole arrays, splits their sequence over some devices and returns whole results, which are
tested like those of any kernel. The tilings give the number of devices and the strategy: they may change
results only by rounding (S18, S21). `ring.xla` is called from outside of `jax.shard_map`, with lengths that
the devices need not divide, and over two rings where the batch is even. `ring.xla.inside` is called inside,
where the columns of a bias travel with the keys. `operation.ring_attention` is the operation `RingAttention`,
run by an executor over a mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from attest.conformance.subject import Sharding, Subject, Tiling
from attest.conformance.subjects import mosaic_gpu, pallas_tpu, triton, xla
from attest.kernels.call.positions import KEY_GROUP
from attest.kernels.operations import RingAttention, create_default_executor
from attest.kernels.ring import ring_attention_with_lse
from attest.reference.numerics import Numerics

_AXIS = "sequence"
_BATCH, _HALVES = "batch", 2  # the axis of a mesh with several rings, and how many
_AXES = 4  # of a query with one batch dimension
# Each device gets a multiple of so many rows and keys.
_SHARD = 8


# Compared by identity, as a key of functions: a Subject has no hash.
@dataclass(frozen=True, eq=False)
class _Kernel:
    """A kernel that computes the pairs of a ring.

    declared: its Subject. platform: the name of its implementation. interpret: makes a call that Pallas's
    interpreter runs; None where it runs as it is. most: how many devices it needs. multiple: of lengths
    inside of `jax.shard_map`: of twice the most pieces, so that each has several rows; and for kernels that
    draw dropout for KEY_GROUP keys at once, of as many for each piece.
    """

    declared: Subject
    platform: str
    interpret: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    most: int = 8
    multiple: int = 8 * KEY_GROUP


_BY_NAME = {
    subject.name: subject
    for subject in (*xla.SUBJECTS, *triton.SUBJECTS, *pallas_tpu.SUBJECTS, *mosaic_gpu.SUBJECTS)
}
_KERNELS: Mapping[str, _Kernel] = {
    "xla": _Kernel(_BY_NAME["xla.flash_attention"], "xla", multiple=16),
    "triton.interpret": _Kernel(_BY_NAME["triton.interpret"], "triton"),
    "triton.cuda": _Kernel(_BY_NAME["triton.cuda"], "triton", most=2),
    "triton.cuda.4_gpus": _Kernel(_BY_NAME["triton.cuda"], "triton", most=4),
    "pallas.tpu_interpret": _Kernel(
        _BY_NAME["pallas.tpu_interpret"], "pallas_tpu", partial(pallas_tpu.interpreted_call, seed=1)
    ),
    "pallas.mosaic_gpu": _Kernel(_BY_NAME["pallas.mosaic_gpu"], "mosaic_gpu", most=2),
    "pallas.mosaic_gpu.4_gpus": _Kernel(_BY_NAME["pallas.mosaic_gpu"], "mosaic_gpu", most=4),
}

# Of calls from outside of jax.shard_map. Each array of cases takes the next choice, its "long" ones the last.
_FROM_OUTSIDE = ((8, "ring"), (4, "zigzag"), (2, "ulysses"), (2, "ring"), (3, "zigzag"), (3, "all_gather"))
# Of calls inside of it.
_INSIDE = ((8, "ring"), (2, "ulysses"), (4, "zigzag"), (2, "all_gather"), (2, "zigzag"), (4, "all_gather"))
# The axis along which arrays are split inside, counted from the last; the next one where it has one entry.
# A mask is split by its rows, and a bias by its keys, so that each layout is judged.
_SPLIT: Mapping[str, tuple[int, ...]] = {
    "query": (-3,),
    "key": (-3,),
    "value": (-3,),
    "attention_mask": (-2, -1),
    "bias": (-1, -2),
    "q_segment_ids": (-1,),
    "kv_segment_ids": (-1,),
    "q_positions": (-1,),
    "kv_positions": (-1,),
    "kv_start": (-1,),
    "kv_end": (-1,),
}


def _from_outside(
    kernel: _Kernel, query: Any, key: Any, value: Any, *, devices: int, strategy: str, **options: Any
) -> Any:
    """Run ring attention on whole arrays, which it places and pads itself.

    With so many devices that there may be two rings, each has half of an even batch.
    """
    strategy = _possible(strategy, devices, query.shape[-2], key.shape[-2])
    where: dict[str, Any] = {"mesh": _mesh(devices)}
    if query.ndim == _AXES and query.shape[0] % _HALVES == 0 and _HALVES * devices <= kernel.most:
        where = {"mesh": _mesh_of_rings(devices), "batch_axes": _BATCH}
    return _ring_on(kernel, strategy, **where)(query=query, key=key, value=value, **options)


def _by_executor(
    kernel: _Kernel, query: Any, key: Any, value: Any, *, devices: int, strategy: str, **options: Any
) -> Any:
    """Run the operation on whole arrays; the specs say which axis splits the sequence. Returns out alone."""
    strategy = _possible(strategy, devices, query.shape[-2], key.shape[-2])
    spec = PartitionSpec(*[None] * (query.ndim - 3), _AXIS)
    where = {"mesh": _mesh(devices), "in_specs": (spec,) * 3, "out_specs": spec}
    chosen = {"platform": kernel.platform, "strategy": strategy}
    return _executor()(RingAttention(), query, key, value, **options, **chosen, **where)


@cache
def _executor() -> Any:
    return create_default_executor(enable_autotuning=False)


def _inside(
    kernel: _Kernel, query: Any, key: Any, value: Any, *, devices: int, strategy: str, **options: Any
) -> Any:
    """Run ring attention in `jax.shard_map`; keys of masks and biases are split as the keys are."""
    given = {"query": query, "key": key, "value": value, **options}
    arrays = {name: jax.numpy.asarray(x) for name, x in given.items() if name in _SPLIT}
    others = {name: x for name, x in given.items() if name not in arrays}
    specs = {name: _spec(x, _SPLIT[name]) for name, x in arrays.items()}
    # Other arrays are whole on every device.
    whole = {name: others.pop(name) for name, x in tuple(others.items()) if hasattr(x, "shape")}
    specs |= dict.fromkeys(whole, PartitionSpec())
    strategy = _possible(strategy, devices, query.shape[-2], key.shape[-2])
    static = tuple(sorted(others.items()))
    make = _spread_once
    try:
        hash(static)
    except TypeError:  # ring attention refuses the malformed option
        make = _spread
    spread = make(kernel, strategy, devices, query.ndim, static, tuple(specs.items()))
    return spread({**arrays, **whole})


def _spread(
    kernel: _Kernel,
    strategy: str,
    devices: int,
    ndim: int,
    options: tuple[tuple[str, Any], ...],
    specs: tuple[tuple[str, PartitionSpec], ...],
) -> Callable[[dict[str, Any]], Any]:
    """Return the function that runs a call in `jax.shard_map`."""
    run = _ring_on(kernel, strategy)
    of_lse = PartitionSpec(*[None] * (ndim - 2), _AXIS)

    def local(arrays: dict[str, Any]) -> Any:
        return run(**arrays, **dict(options))

    out_specs = dict(specs)["query"], of_lse
    return jax.jit(jax.shard_map(local, mesh=_mesh(devices), in_specs=(dict(specs),), out_specs=out_specs))


# One function for equal calls: an eager one then compiles once.
_spread_once = lru_cache(maxsize=64)(_spread)


def _spec(x: Any, axes: tuple[int, ...]) -> PartitionSpec:
    """Return how an array is split along the first of some axes that has several entries."""
    split = next((x.ndim + axis for axis in axes if -axis <= x.ndim and x.shape[axis] > 1), None)
    return PartitionSpec(*[_AXIS if axis == split else None for axis in range(x.ndim)])


def _ring_on(kernel: _Kernel, strategy: str, **mesh: Any) -> Callable[..., Any]:
    """Return ring attention on a kernel."""
    run = partial(
        ring_attention_with_lse, platform=kernel.platform, axis_name=_AXIS, strategy=strategy, **mesh
    )
    return run if kernel.interpret is None else kernel.interpret(run)


def _possible(strategy: str, devices: int, heads: int, key_heads: int) -> str:
    """Return the strategy, or "all_gather" in place of "ulysses" with heads that do not divide evenly."""
    shared_out = heads % devices == 0 and (key_heads % devices == 0 or devices % key_heads == 0)
    return "all_gather" if strategy == "ulysses" and not shared_out else strategy


@cache
def _mesh(devices: int) -> Any:
    devices_used = jax.local_devices()[:devices]
    return jax.make_mesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,), devices=devices_used)


@cache
def _mesh_of_rings(devices: int) -> Any:
    devices_used = jax.local_devices()[: _HALVES * devices]
    kinds = (AxisType.Auto,) * 2
    return jax.make_mesh((_HALVES, devices), (_BATCH, _AXIS), axis_types=kinds, devices=devices_used)


def _why_too_few(most: int) -> str | None:
    there = jax.local_device_count()
    return None if there >= most else f"needs a process with {most} devices, and JAX has {there}"


def _tiling(devices: int, strategy: str) -> Tiling:
    return Tiling({"devices": devices, "strategy": strategy}, _SHARD, _SHARD)


def _numerics(kernel: _Kernel, dtype: str, tiling: Tiling) -> Numerics:
    """Return the numerics of the kernel of a pair, with its default blocks, and one merge for each pair.

    Partial results are float32, and so are sums of gradients, which are rounded once.
    """
    production = kernel.declared.tilings[-1]
    declared = kernel.declared.numerics(dtype, Tiling({}, production.query_block, production.key_block))
    pieces = {"zigzag": 2, "ring": 1}.get(str(tiling.options["strategy"]), 0)
    return replace(declared, splits=max(1, pieces * int(tiling.options["devices"])))


def _subject(name: str, kernel: _Kernel, inside: bool) -> Subject:
    def ready() -> str | None:
        return kernel.declared.ready() or _why_too_few(kernel.most)

    choices = [choice for choice in (_INSIDE if inside else _FROM_OUTSIDE) if choice[0] <= kernel.most]

    return replace(
        kernel.declared,
        name=f"ring.{name}.inside" if inside else f"ring.{name}",
        call=partial(_inside if inside else _from_outside, kernel),
        numerics=partial(_numerics, kernel),
        tilings=tuple(_tiling(*choice) for choice in choices),
        limits=replace(
            kernel.declared.limits, length_multiple=kernel.multiple if inside else 1, traces=inside
        ),
        ready=ready,
        implementation=lambda _: kernel.platform,
        sharding=Sharding(sequence=True),
    )


_RINGS = tuple(
    _subject(name, kernel, inside) for name, kernel in _KERNELS.items() for inside in (False, True)
)

SUBJECTS: tuple[Subject, ...] = (
    *_RINGS,
    replace(
        _RINGS[0],
        name="operation.ring_attention",
        call=partial(_by_executor, _KERNELS["xla"]),
        returns_lse=False,
    ),
)
