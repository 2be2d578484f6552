"""The operation `RingAttention`: attention over a sequence that is split over the devices of a mesh axis."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax.sharding import PartitionSpec

from attest.kernels.annotations import Out
from attest.kernels.call.options import NAMES_OF_FLAX, check_flag, refuse
from attest.kernels.choice.choose import Traits, device_of, implementation_for
from attest.kernels.config import implementation_of
from attest.kernels.operations.configs import FlashAttentionConfig
from attest.kernels.operations.flash_attention import FlashAttention, check_chosen_for
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.kernel import Kernel, named_arguments
from attest.kernels.operations.platforms import check_platform, implementation_name
from attest.kernels.operations.sharded import OPERANDS, axes_at
from attest.kernels.operations.specs import checked_specs
from attest.kernels.ring import ring_attention

type _Invocation = Invocation[FlashAttentionConfig, Out]

# What the configuration says in place of the call, what the executor takes, and what no call has.
_CONFIGURED = frozenset(
    {"fwd_params", "bwd_params", "config", "mesh", "batch_axes", "head_axes", *NAMES_OF_FLAX}
)
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(ring_attention).parameters.items()
    if name not in _CONFIGURED
}
# What the axes of operands that follow query are: batch, query heads, rows, or what is never split.
_LAYOUTS = {"bias": "bhq.", "softmax_aux": "h."}


class RingAttention(Kernel[FlashAttentionConfig, Out]):
    """Ring attention [B, Sq, Hq, D] -> [B, Sq, Hq, Dv], on the fastest kernel that supports its pieces.

    Its arguments are those of `attest.kernels.ring.ring_attention`, by name; query, key and value also by
    position. Inside `jax.shard_map` give axis_name. From outside give the executor mesh, in_specs and
    out_specs: the axis of the mesh that splits the sequence is read from the spec of query. It is not tuned.
    """

    op_id = "ring_attention"
    version = "1"
    config_type = FlashAttentionConfig

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments by name, without those that are their defaults.

        Raises: TypeError for an argument that does not exist, or is given twice.
        """
        return (), named_arguments(args, kwargs, OPERANDS[:3], _DEFAULTS)

    def run(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Out:
        """Compute attention with a configuration; see `attest.kernels.ring.ring_attention`.

        Raises: what that function raises.
        """
        _, arguments = self.prepare(*args, **kwargs)
        return self._kernel(cfg, arguments)(**arguments)

    def _kernel(self, cfg: FlashAttentionConfig, arguments: dict[str, Any]) -> Callable[..., Out]:
        """Return the function that a configuration runs, with the platform of the call, which is removed."""
        named = arguments.pop("platform", None) or cfg.platform
        kernel = self.get_impl(FlashAttentionConfig(platform=check_platform(named)))
        return kernel if cfg.config is None else partial(kernel, config=cfg.config)

    def get_impl(self, cfg: FlashAttentionConfig) -> Callable[..., Out]:
        """Return `ring_attention` on the platform of a configuration."""
        return partial(ring_attention, platform=implementation_name(cfg.platform, device_of()))

    def heuristic_cfg(self, inv: _Invocation) -> FlashAttentionConfig:
        """Return the platform of the call, "auto" by default: the tables choose blocks when it runs."""
        return FlashAttentionConfig(platform=check_platform(inv.kwargs.get("platform")))

    def check_cfg(self, cfg: Any, inv: _Invocation) -> FlashAttentionConfig:
        """Return a configuration that a call gives: that of an implementation, or a `FlashAttentionConfig`.

        Raises: ValueError for one of another operation, platform or backend, or with neutral sizes.
        """
        checked = FlashAttention().check_cfg(cfg, inv)
        if checked.fwd_params is not None or checked.bwd_params is not None:
            expected = "config, that of an implementation"
            refuse("cfg", "fwd_params or bwd_params", expected, "A ring has pieces of several sizes.")
        return checked

    def check_cached(self, cfg: FlashAttentionConfig, inv: _Invocation) -> FlashAttentionConfig:
        """Return a configuration from the disk, checked: its implementation runs on this device.

        Raises: ValueError or NotImplementedError for one that does not fit the call.
        """
        checked = self.check_cfg(cfg, inv)
        device = device_of()
        platform = checked.platform if checked.config is None else implementation_of(checked.config).name
        implementation = implementation_for(device, Traits(), implementation_name(platform, device))
        check_chosen_for(implementation, inv, device, Traits())
        return checked

    def create_shard_map_wrapper(
        self,
        *args: Any,
        cfg: FlashAttentionConfig | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        check_vma: bool = True,
        **kwargs: Any,
    ) -> tuple[Callable[..., Out], tuple[Any, ...]]:
        """Return a function over a mesh, and its arguments: the call, whose sequence the devices share.

        cfg: the configuration, by default what the tables choose. check_vma: as in jax.shard_map; True and
        False compute the same, as ring attention is always checked so. in_specs: of query, key, value, bias,
        cum_seqlens_q, cum_seqlens_k and softmax_aux, in that order.
        The spec of query says which axes split the batch, the sequence and the heads; all else follows it, a
        bias by its rows. Of several batch dimensions the first may be split.

        Raises: ValueError where mesh, in_specs or out_specs is left out, and for specs that do not fit.
        """
        mesh, in_specs, out_specs = checked_specs(mesh, in_specs, out_specs, needed=True)
        check_flag("check_vma", check_vma)
        _, arguments = self.prepare(*args, **kwargs)
        inv = Invocation(self.op_id, kwargs=arguments, version=self.version)
        cfg = self.heuristic_cfg(inv) if cfg is None else self.check_cfg(cfg, inv)
        batch, sequence, heads = _axes_of(in_specs, out_specs, _ndim(arguments["query"]))
        own = {"b": batch, "q": (sequence,), "h": heads}
        for name, spec in zip(OPERANDS[3:], in_specs[3:], strict=False):
            _check_follows(name, spec, arguments.get(name), own)
        kernel = self._kernel(cfg, arguments)
        arrays = tuple(arguments.pop(name) for name in OPERANDS[:3])
        where = {"mesh": mesh, "batch_axes": batch or None, "head_axes": heads or None}
        return partial(kernel, **arguments, axis_name=sequence, **where), arrays


def _ndim(query: Any) -> int:
    """Return the number of axes of the arrays; 4 for malformed ones, which are refused later."""
    ndim = getattr(query, "ndim", 4)
    return ndim if ndim >= 3 else 4


def _axes_of(in_specs: Any, out_specs: Any, ndim: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the axes that split batch, sequence and heads of arrays of `ndim` axes, from the specs."""
    if not isinstance(in_specs, tuple | list) or not 1 <= len(in_specs) <= len(OPERANDS):
        refuse(
            "in_specs",
            str(in_specs),
            f"a tuple of 1 to {len(OPERANDS)} specs",
            f"Give those of {', '.join(OPERANDS)}.",
        )
    batch, sequence, heads = _axes("in_specs of query", in_specs[0], ndim)
    if len(sequence) != 1:
        entry = "its second entry" if ndim == 4 else f"entry {ndim - 2}"
        expected = f"one axis of the mesh for the sequence, {entry}"
        refuse(
            "in_specs of query", str(in_specs[0]), expected, "FlashAttention splits batch and heads alone."
        )
    for name, spec in zip(OPERANDS[1:3], in_specs[1:3], strict=False):
        if _axes(f"in_specs of {name}", spec, ndim) != (batch, sequence, heads):
            refuse(f"in_specs of {name}", str(spec), f"{in_specs[0]}, that of query", "Split them alike.")
    if _axes("out_specs", out_specs, ndim) != (batch, sequence, heads):
        refuse("out_specs", str(out_specs), f"{in_specs[0]}, that of query", "Give that of query.")
    return batch, sequence[0], heads


def _check_follows(name: str, spec: Any, x: Any, own: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse the spec of another operand that splits it in another way than query; None follows query."""
    if spec is None:
        return
    place, ndim = f"in_specs of {name}", getattr(x, "ndim", 0)
    if not isinstance(spec, PartitionSpec):
        refuse(place, f"a {type(spec).__name__}", "a jax.sharding.PartitionSpec", "None follows query.")
    layout = _LAYOUTS.get(name, "").rjust(ndim, "b")[-ndim:]
    for axis in range(len(spec)):
        axes = axes_at(spec, axis)
        kind = layout[axis] if axis < ndim else ""
        if axes and axes != own.get(kind):
            allowed = ", ".join(own.get(kind, ()))
            expected = f"{allowed}, as for query, or None" if allowed else f"axis {axis} whole"
            refuse(place, f"axis {axis} over {', '.join(map(str, axes))}", expected, "None follows query.")


def _axes(argument: str, spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """Return the axes that split the batch, the sequence and the heads, from one spec."""
    if not isinstance(spec, PartitionSpec):
        advice = "Give that of query."
        refuse(argument, f"a {type(spec).__name__}", "a jax.sharding.PartitionSpec", advice)
    *batch, sequence, heads, _ = (axes_at(spec, axis) for axis in range(ndim))
    if any(batch[1:]):
        expected = "the first batch dimension split alone"
        refuse(argument, str(spec), expected, "Reshape the arrays to one batch dimension.")
    return batch[0] if batch else (), sequence, heads
