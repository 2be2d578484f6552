"""The operation `FlashAttention`: flash attention with a configuration that is chosen, tuned and cached."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from attest.kernels import attention
from attest.kernels.annotations import Out
from attest.kernels.call.options import NAMES_OF_FLAX, check_flag, check_size, refuse
from attest.kernels.choice.choose import Device, Traits, described, device_of, fastest_for, implementation_for
from attest.kernels.choice.neutral_sizes import neutral, understood
from attest.kernels.config import implementation_of
from attest.kernels.configs.rows import Row
from attest.kernels.contract import Implementation
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.operations.abstract_call import AbstractCall, abstract_call, plain_arguments
from attest.kernels.operations.configs import FlashAttentionConfig
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.kernel import Kernel, named_arguments
from attest.kernels.operations.platforms import Platform, check_platform, check_runs_on, implementation_name
from attest.kernels.operations.registry import kernel_registry
from attest.kernels.operations.sharded import part_of_call, sharded_call
from attest.kernels.operations.specs import checked_specs
from attest.kernels.sharding.mesh_functions import check_devices

type _Invocation = Invocation[FlashAttentionConfig, Out]


# What `run` takes by position, in the order of ejKernel without its paged cache.
_POSITIONAL = (
    "query", "key", "value", "attention_mask", "bias", "softmax_scale", "dropout_prob", "causal",
    "dropout_seed", "cum_seqlens_q", "cum_seqlens_k", "sliding_window", "logits_soft_cap", "softmax_aux",
    "normalize_output", "precision", "logits_dtype", "platform",
)  # fmt: skip
_PLATFORMS = frozenset(x.value for x in Platform)
# What the configuration says in place of the call, and what no call has.
_CONFIGURED = frozenset({"fwd_params", "bwd_params", "config", *NAMES_OF_FLAX})
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention.flash_attention).parameters.items()
    if name not in _CONFIGURED
}


class FlashAttention(Kernel[FlashAttentionConfig, Out]):
    """Flash attention [B, Sq, Hq, D] -> [B, Sq, Hq, Dv], by the fastest kernel and configuration there is.

    Its arguments are those of `attest.flash_attention`, without fwd_params, bwd_params and config, which are
    in `cfg`. The order by position is query, key, value, attention_mask, bias, softmax_scale, dropout_prob,
    causal, dropout_seed, cum_seqlens_q, cum_seqlens_k, sliding_window, logits_soft_cap, softmax_aux,
    normalize_output, precision, logits_dtype, platform.
    """

    op_id = "flash_attention"
    version = "1"
    config_type = FlashAttentionConfig

    def __init__(self, op_id: str | None = None, most_candidates: int | None = None) -> None:
        """Name the operation. most_candidates: sizes of each kernel that a tuner tries, by default 12."""
        super().__init__(op_id)
        self._most = None if most_candidates is None else check_size("most_candidates", most_candidates)

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments by name, without those that are their defaults.

        Raises: TypeError for an argument that does not exist, or is given twice.
        """
        return (), named_arguments(args, kwargs, _POSITIONAL, _DEFAULTS)

    def run(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> Out:
        """Compute attention with a configuration; see `attest.flash_attention`.

        Raises: what that function raises; ValueError for a configuration that does not fit the call.
        """
        _, arguments = self.prepare(*args, **kwargs)
        platform = _check_platforms(arguments.pop("platform", None), cfg)
        config = cfg.config
        if config is None and (cfg.fwd_params is not None or cfg.bwd_params is not None):
            config = _Resolved.of(cfg, abstract_call(arguments), _device(arguments), platform).config
        return self._kernel(cfg, platform)(**arguments, **({} if config is None else {"config": config}))

    def _kernel(self, cfg: FlashAttentionConfig, platform: str) -> Callable[..., Out]:
        """Return the kernel that runs a configuration on the platform that a call and it agree on."""
        named = cfg.config is None and cfg.platform != platform
        return self.get_impl(replace(cfg, platform=platform) if named else cfg)

    def get_impl(self, cfg: FlashAttentionConfig) -> Callable[..., Out]:
        """Return the kernel that runs a configuration: `attest.flash_attention`, of a platform if it has one.

        Raises: NoImplementationError where the registry has no kernel for the platform on this hardware.
        """
        if cfg.platform == "auto":
            return attention.flash_attention
        if cfg.platform in _PLATFORMS:
            return kernel_registry.get("flash_attention", cfg.platform, device_of().backend)
        return partial(attention.flash_attention, platform=cfg.platform)

    def heuristic_cfg(self, inv: _Invocation) -> FlashAttentionConfig:
        """Return the platform of the call, "auto" by default: the tables choose blocks when it runs."""
        return FlashAttentionConfig(platform=check_platform(inv.kwargs.get("platform")))

    heuristic_cfg_gpu = heuristic_cfg_tpu = heuristic_cfg_xla = heuristic_cfg

    def candidate_cfgs(self, inv: _Invocation) -> tuple[FlashAttentionConfig, ...]:
        """Return the candidates of the implementation that runs the call, the tables' choice first.

        Where another one runs it without gradients, that one's candidates follow.
        """
        resolved = _Resolved.of_call(inv)
        found = (resolved.candidates(x, self._most) for x in resolved.implementations)
        return tuple(chain.from_iterable(found))

    candidate_cfgs_gpu = candidate_cfgs_tpu = candidate_cfgs_xla = candidate_cfgs
    candidate_cfgs_shard_map_gpu = candidate_cfgs_shard_map_tpu = candidate_cfgs_shard_map_xla = (
        candidate_cfgs
    )

    def combined_cfg(
        self, timed: Iterable[tuple[FlashAttentionConfig, float]]
    ) -> FlashAttentionConfig | None:
        """Return the fastest choice for each kernel of the fastest candidate's implementation.

        Each of an implementation's candidates differs from its first in one of them.
        """
        found = list(timed)
        if not found:
            return None
        platform = min(found, key=lambda x: x[1])[0].platform
        found = [x for x in found if x[0].platform == platform]
        first = found[0][0]
        fastest = {path: (seconds, x) for seconds in (found[0][1],) for path, x in _parts(first.config)}
        for cfg, seconds in found[1:]:
            for path, x in _parts(cfg.config):
                if path in fastest and x != dict(_parts(first.config))[path] and seconds < fastest[path][0]:
                    fastest[path] = (seconds, x)
        return replace(first, config=_with_parts(first.config, {path: x for path, (_, x) in fastest.items()}))

    def forward_part(self, cfg: FlashAttentionConfig) -> Any:
        """Return the configuration without the choices for backward kernels."""
        parts = _parts(cfg.config)
        return replace(cfg, config=None, bwd_params=None), tuple(
            x for x in parts if x[0][:1] != ("backward",)
        )

    def check_cfg(self, cfg: Any, inv: _Invocation) -> FlashAttentionConfig:
        """Return a configuration that a call gives: a `FlashAttentionConfig`, or that of an implementation.

        Raises: ValueError for one of another operation, platform or backend.
        """
        if not isinstance(cfg, FlashAttentionConfig):
            if not any(type(cfg) is x.config() for x in IMPLEMENTATIONS):
                expected = "a FlashAttentionConfig, or the Config of an implementation"
                refuse("cfg", f"a {type(cfg).__name__}", expected, "Build it as FlashAttentionConfig.")
            cfg = FlashAttentionConfig(config=cfg)
        check_runs_on(cfg.backend, _device_of(inv))
        _check_platforms(inv.kwargs.get("platform"), cfg)
        return cfg

    def check_cached(self, cfg: FlashAttentionConfig, inv: _Invocation) -> FlashAttentionConfig:
        """Return a configuration from the disk, checked: an implementation that supports the call has it.

        Raises: ValueError or NotImplementedError for one that does not fit the call.
        """
        checked = self.check_cfg(cfg, inv)
        resolved = _Resolved.of_call(inv, checked)
        check_chosen_for(resolved.implementation, inv, _device_of(inv), resolved.call.traits)
        return checked

    def complete(self, cfg: FlashAttentionConfig, inv: _Invocation) -> FlashAttentionConfig:
        """Return the configuration with the implementation that runs the call, and all its block sizes.

        Where gradients decide which one it is, the platform is "auto", and there are no sizes: see
        `implementation_of`.
        """
        resolved = _Resolved.of_call(inv, cfg)
        backend = _device_of(inv).backend
        if resolved.apart:
            return FlashAttentionConfig(backend=backend)
        config = resolved.config
        tunable = resolved.implementation.tunable()
        if config is None and tunable is not None:
            config = tunable.chosen(resolved.call.call)
        return FlashAttentionConfig(platform=resolved.implementation.name, backend=backend, config=config)

    def plain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the call with one batch dimension, its MaskInfo as arrays, and its seed as a number."""
        return plain_arguments(arguments)

    def unused(self, cfg: FlashAttentionConfig, inv: _Invocation) -> tuple[str, ...]:
        """Return the sizes that the implementation does not have."""
        return _Resolved.of_call(inv, cfg).unused

    def implementation_of(self, cfg: FlashAttentionConfig, inv: _Invocation) -> str:
        """Return the name of what runs a configuration, and of another one that does without gradients."""
        resolved = _Resolved.of_call(inv, cfg)
        name = resolved.implementation.name
        return f"{name}, {resolved.alone.name} without gradients" if resolved.apart else name

    def table_rows(self, cfg: FlashAttentionConfig, inv: _Invocation) -> tuple[Row, ...]:
        """Return the rows of a table of block sizes by which calls like this one get a configuration."""
        resolved = _Resolved.of_call(inv, cfg)
        tunable, config = resolved.implementation.tunable(), self.complete(cfg, inv).config
        return () if tunable is None or config is None else tunable.rows(resolved.call.call, config)

    def runner(self, inv: _Invocation, gradients: bool) -> str:
        """Return the name of the implementation that runs a call, with gradients or without."""
        resolved = _Resolved.of_call(inv)
        return (resolved.implementation if gradients else resolved.alone).name

    def capped_cfg(self, inv: _Invocation, q_blocksize: int, kv_blocksize: int) -> FlashAttentionConfig:
        """Return the tables' choice with forward blocks of at most so many rows and keys."""
        resolved = _Resolved.of_call(inv)
        tunable = resolved.implementation.tunable()
        if tunable is None:
            return self.heuristic_cfg(inv)
        return FlashAttentionConfig(config=tunable.capped(resolved.call.call, q_blocksize, kv_blocksize))

    def part_of(self, inv: _Invocation) -> _Invocation | None:
        """Return the call on the shapes of one device, which has a part of the batch and of the heads.

        Raises: ValueError for specs that do not fit, or that split a sequence.
        """
        part = part_of_call(inv.kwargs, inv.mesh, inv.in_specs, inv.out_specs)
        return Invocation(inv.op_id, kwargs=part, version=inv.version, device=inv.device)

    def create_shard_map_wrapper(
        self,
        *args: Any,
        cfg: FlashAttentionConfig | None = None,
        mesh: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
        check_vma: bool = False,
        **kwargs: Any,
    ) -> tuple[Callable[..., Out], tuple[Any, ...]]:
        """Return a function under jax.shard_map, and its arguments: the call, over batch and heads of a mesh.

        cfg: the configuration, by default what the tables choose. in_specs: of query, key, value, bias,
        cum_seqlens_q, cum_seqlens_k and softmax_aux, in that order; None and what is left out is whole on
        every device. Masks, segments, positions and a MaskInfo are split like query. check_vma: as in
        jax.shard_map. Each device computes its part in coordinates of the whole (S21).

        Raises: ValueError where mesh, in_specs or out_specs is left out, and for specs that do not fit, or
        that split a sequence.
        """
        mesh, in_specs, out_specs = checked_specs(mesh, in_specs, out_specs, needed=True)
        check_flag("check_vma", check_vma)
        _, arguments = self.prepare(*args, **kwargs)
        check_devices(mesh, arguments.get("query"))
        inv = Invocation(self.op_id, kwargs=arguments, version=self.version)
        cfg = self.heuristic_cfg(inv) if cfg is None else self.check_cfg(cfg, inv)
        kernel = self._kernel(cfg, _check_platforms(arguments.get("platform"), cfg))
        # A kernel that somebody else registered need not take keys in another dtype than query.
        ours = getattr(kernel, "func", kernel) is attention.flash_attention
        run = _Run(self.run, cfg)
        return sharded_call(run, arguments, mesh, in_specs, out_specs, widens=ours, check_vma=check_vma)


@dataclass(frozen=True)
class _Run:
    """`run` of an operation with a configuration, equal for equal ones."""

    run: Callable[..., Out]
    cfg: FlashAttentionConfig

    def __call__(self, **arguments: Any) -> Out:
        return self.run(cfg=self.cfg, **arguments)


class _Resolved:
    """The implementation that runs a configuration of a call, and its own configurations.

    alone: the one that runs it where no gradients are taken; apart: whether it is another one.
    """

    def __init__(
        self,
        implementation: Implementation,
        config: Any,
        call: AbstractCall,
        unused: tuple[str, ...],
        alone: Implementation | None = None,
    ):
        self.implementation, self.config, self.call, self.unused = implementation, config, call, unused
        self.alone = alone or implementation

    @property
    def apart(self) -> bool:
        return self.alone is not self.implementation

    @property
    def implementations(self) -> tuple[Implementation, ...]:
        return (self.implementation, self.alone) if self.apart else (self.implementation,)

    def candidates(
        self, implementation: Implementation, most: int | None
    ) -> tuple[FlashAttentionConfig, ...]:
        """Return those of one implementation, the choice of its tables first."""
        tunable = implementation.tunable()
        found = () if tunable is None else tunable.candidates(self.call.call, most)
        return tuple(FlashAttentionConfig(platform=implementation.name, config=x) for x in found)

    @classmethod
    def of_call(cls, inv: _Invocation, cfg: FlashAttentionConfig | None = None) -> "_Resolved":
        """Resolve a configuration, by default that of the tables."""
        arguments = dict(inv.kwargs)
        platform = _check_platforms(arguments.pop("platform", None), cfg or FlashAttentionConfig())
        return cls.of(cfg or FlashAttentionConfig(), abstract_call(arguments), _device_of(inv), platform)

    @classmethod
    def of(cls, cfg: FlashAttentionConfig, call: AbstractCall, device: Device, platform: str) -> "_Resolved":
        """Resolve a configuration on a device, by the platform of the call and the configuration."""
        if cfg.config is not None:
            return cls(implementation_of(cfg.config), cfg.config, call, ())
        forward, backward = neutral(cfg.fwd_params), neutral(cfg.bwd_params)
        name = implementation_name(platform, device)
        if name is None and not (forward or backward):
            implementation, alone = fastest_for(device, call.traits, call.sizes)
            return cls(implementation, None, call, (), alone)
        implementation = implementation_for(device, call.traits, name)
        tunable = implementation.tunable()
        if tunable is None or not (forward or backward):
            return cls(implementation, None, call, ())
        unused: list[str] = []
        if platform == "auto":
            forward = understood("fwd_params", forward, tunable, implementation.name, unused)
            backward = understood("bwd_params", backward, tunable, implementation.name, unused)
        return cls(implementation, tunable.translated(call.call, forward, backward), call, tuple(unused))


def check_chosen_for(implementation: Implementation, inv: _Invocation, device: Device, call: Traits) -> None:
    """Refuse an implementation that does not support a call, or runs on its device only if it is named.

    Raises: ValueError or NotImplementedError.
    """
    implementation_for(device, call, implementation.name)
    backends = implementation.capabilities.backends
    if check_platform(inv.kwargs.get("platform")) == "auto" and device.backend not in (
        backends or (device.backend,)
    ):
        expected = f"one of an implementation for {device.backend}"
        refuse("config", f"one of {implementation.name!r}", expected, "Name it by platform to run it here.")


def _check_platforms(platform: Any, cfg: FlashAttentionConfig) -> str:
    """Return the platform of a call and of its configuration, which must not contradict each other."""
    of_call, of_cfg = check_platform(platform), cfg.platform
    if of_cfg == "auto" and cfg.config is not None:
        of_cfg = implementation_of(cfg.config).name
    if of_cfg == "auto":
        return of_call
    pallas = of_call == Platform.PALLAS.value and of_cfg in ("mosaic_gpu", "pallas_tpu")
    if of_call not in ("auto", of_cfg) and not pallas:
        expected = f"{of_cfg!r}, the platform of cfg, or none"
        refuse("platform", repr(of_call), expected, "Leave platform out, or give another cfg.")
    return of_cfg


def _device(arguments: dict[str, Any]) -> Device:
    return device_of(*(arguments.get(name) for name in ("query", "key", "value")))


def _device_of(inv: _Invocation) -> Device:
    if inv.device is None:
        return device_of()
    return described(inv.device)


def _parts(config: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the choices for single kernels in a configuration, each with the names of its fields."""
    if not is_dataclass(config) or (path and type(config).__name__ != "BackwardSizes"):
        return [(path, config)]
    return [part for x in fields(config) for part in _parts(getattr(config, x.name), (*path, x.name))]


def _with_parts(config: Any, parts: dict[tuple[str, ...], Any]) -> Any:
    """Return a configuration with other choices."""
    changes: dict[str, Any] = {}
    for x in fields(config):
        below = {path[1:]: part for path, part in parts.items() if path[0] == x.name}
        changes[x.name] = below[()] if () in below else _with_parts(getattr(config, x.name), below)
    return replace(config, **changes)
