"""Operators with the interface of EasyDeL: `FlashAttn` ("flash_attn2") and `VanillaAttn` ("vanilla").

They run on every backend, CPUs included, and need no mesh. Masks, segment ids and a bias all count (S5).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, PartitionSpec

from attest.kernels.annotations import (
    AttentionMask,
    Bias,
    CumSeqlens,
    DropoutSeed,
    Flag,
    Key,
    KVSegmentIds,
    Number,
    Out,
    QSegmentIds,
    Query,
    RandomKey,
    Sinks,
    SlidingWindow,
    Value,
    Weights,
)
from attest.kernels.call.options import (
    check_dropout_prob,
    check_dtype,
    check_scale,
    check_size,
    refuse,
    shown,
)
from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.attention import Attention
from attest.kernels.operations.configs import AttentionConfig, FlashAttentionConfig
from attest.kernels.operations.executor import Executor, create_default_executor, invocation
from attest.kernels.operations.flash_attention import FlashAttention
from attest.kernels.operations.platforms import check_backend, check_platform
from attest.kernels.operations.registry import NoImplementationError

_BLOCKS = (512, 1024)
# What EasyDeL's layers pass along and no operator computes with.
_HARMLESS = frozenset({"cache_metadata", "cache_view", "mode"})


@dataclass(frozen=True)
class OperationMetadata:
    """The arguments that all calls of an operator share; those of a call win over it. All are optional.

    runtime_dtype: query, key, value and bias are cast to it; by default they stay. runtime_softmax_dtype: of
    the logits, `logits_dtype` of `attest.flash_attention`. blocksize_q, blocksize_k: blocks are no larger.
    mesh: with it a call runs under jax.shard_map, the batch over batch_axis and the heads over head_axis, as
    far as the mesh has them and they divide. sequence_axis_name: the axis of the mesh for the sequence, over
    which this operator does not split. partition_axis: an object whose batch_axis, head_axis and
    sequence_axis count in place of those three. platform, backend: as in `FlashAttentionConfig`.
    operation_configs: configurations by the name of an operator. base_config, requires_cache: not used.
    """

    runtime_dtype: Any = None
    runtime_softmax_dtype: Any = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    blocksize_q: int = _BLOCKS[0]
    blocksize_k: int = _BLOCKS[1]
    mesh: Mesh | None = None
    batch_axis: str | tuple[str, ...] = ("fsdp", "dp")
    head_axis: str | tuple[str, ...] = "tp"
    sequence_axis_name: str = "sp"
    partition_axis: Any = None
    platform: str | None = None
    backend: str | None = None
    operation_configs: Mapping[str, Any] | None = None
    base_config: Any = None
    requires_cache: bool | None = None

    def __post_init__(self) -> None:
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_dtype(name, getattr(self, name)))
        if self.softmax_scale is not None:
            check_scale("softmax_scale", self.softmax_scale)
        check_dropout_prob(self.dropout_prob)
        check_size("blocksize_q", self.blocksize_q)
        check_size("blocksize_k", self.blocksize_k)
        check_platform(self.platform)
        check_backend(self.backend)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionOutput:
    """The results of an operator.

    attention_weights: [B, Hq, Sq, Sk], or None where they are not computed. attention_outputs: [B, Sq, Hq,
    Dv]. cache_view: None; it has the place that EasyDeL's caches fill.
    """

    attention_weights: Weights | None
    attention_outputs: Out
    cache_view: Any = None


class BaseOperation:
    """An operator: `forward_native`, and a method for each backend that calls it unless it is overridden."""

    metadata: OperationMetadata

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        """Return the names in the registry."""
        raise NotImplementedError(f"{cls.__name__}.get_impl_name: not written. Define it in the class.")

    def get_impl_metadata(self) -> OperationMetadata:
        """Return the metadata that the operator was built with."""
        return self.metadata

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on any backend."""
        name = type(self).__name__
        raise NotImplementedError(f"{name}.forward_native: not written. Define it in the class.")

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a CPU; the arguments are those of `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_gpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a GPU."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on an NVIDIA GPU."""
        return self.forward_gpu(*args, **kwargs)

    def forward_rocm(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on an AMD GPU."""
        return self.forward_gpu(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator on a TPU."""
        return self.forward_native(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the operator by the method for JAX's default backend."""
        by_backend = {"cpu": self.forward_cpu, "gpu": self.forward_gpu, "tpu": self.forward_tpu}
        return by_backend.get(jax.default_backend(), self.forward_native)(*args, **kwargs)


class OperationImpl(BaseOperation):
    """An operator that is built from its metadata."""

    def __init__(self, metadata: OperationMetadata | None = None) -> None:
        """Keep the metadata, by default that of `OperationMetadata()`."""
        given: Any = metadata
        if given is not None and not isinstance(given, OperationMetadata):
            expected = "an attest.kernels.operations.easydel.OperationMetadata"
            refuse("metadata", f"a {type(given).__name__}", expected, "Build it as that class.")
        self.metadata = metadata or OperationMetadata()


class OperationRegistry:
    """Operators by name."""

    _operators: ClassVar[dict[str, type[BaseOperation]]] = {}

    @classmethod
    def register[T: BaseOperation](cls, operator: type[T]) -> type[T]:
        """Register a class under its names, and return it: a decorator."""
        names = operator.get_impl_name()
        for name in (names,) if isinstance(names, str) else names:
            cls._operators[name] = operator
        return operator

    @classmethod
    def get(cls, impl_name: str) -> type[BaseOperation]:
        """Return the class of a name.

        Raises: NoImplementationError, a ValueError, naming those that exist.
        """
        found = cls._operators.get(impl_name)
        if found is None:
            there = ", ".join(map(repr, cls.list_implementations()))
            raise NoImplementationError(
                f"impl_name: got {shown(impl_name)}; expected one of {there}. Correct the name."
            )
        return found

    @classmethod
    def create(
        cls, impl_name: str, metadata: OperationMetadata | None = None, requires_cache: bool | None = None
    ) -> BaseOperation:
        """Return an operator of a name, built from metadata."""
        if requires_cache is not None:
            metadata = replace(metadata or OperationMetadata(), requires_cache=requires_cache)
        build: Any = cls.get(impl_name)
        return build(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Return all names, sorted."""
        return sorted(cls._operators)


@OperationRegistry.register
class FlashAttn(OperationImpl):
    """Flash attention, by `attest.kernels.operations.FlashAttention`."""

    executor: Executor[FlashAttentionConfig, Out] = create_default_executor()

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "flash_attn2"."""
        return "flash_attn2"

    def forward_native(
        self,
        query: Query,
        key: Key,
        value: Value,
        mask_info: MaskInfo | None = None,
        bias: Bias | None = None,
        softmax_scale: Number | None = None,
        dropout_prob: Number | None = None,
        causal: Flag = False,
        dropout_seed: DropoutSeed | None = None,
        cum_seqlens_q: CumSeqlens | None = None,
        cum_seqlens_k: CumSeqlens | None = None,
        sliding_window: SlidingWindow | None = None,
        logits_soft_cap: Number | None = None,
        softmax_aux: Sinks | None = None,
        normalize_output: Flag = True,
        precision: Any = None,
        *,
        attention_mask: AttentionMask | None = None,
        q_segment_ids: QSegmentIds | None = None,
        kv_segment_ids: KVSegmentIds | None = None,
        cfg: FlashAttentionConfig | None = None,
        **others: Any,
    ) -> AttentionOutput:
        """Compute attention; arguments are those of `attest.flash_attention`, weights are None.

        others: q_offset, q_positions, kv_positions, dropout_shared and logits_dtype; what EasyDeL's layers
        pass along without effect (cache_metadata, cache_view, mode) is dropped.

        Raises: TypeError for an argument that does not exist; ValueError naming the argument.
        """
        arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "mask_info": mask_info,
            "bias": bias,
            "softmax_scale": softmax_scale,
            "dropout_prob": dropout_prob,
            "causal": causal,
            "dropout_seed": dropout_seed,
            "cum_seqlens_q": cum_seqlens_q,
            "cum_seqlens_k": cum_seqlens_k,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "softmax_aux": softmax_aux,
            "normalize_output": normalize_output,
            "precision": precision,
            "attention_mask": attention_mask,
            "q_segment_ids": q_segment_ids,
            "kv_segment_ids": kv_segment_ids,
        }
        meta = self.metadata
        arguments |= {name: x for name, x in others.items() if name not in _HARMLESS}
        arguments.setdefault("logits_dtype", meta.runtime_softmax_dtype)
        arguments = _with_defaults(_cast(arguments, meta), meta)
        operation = FlashAttention()
        _, arguments = operation.prepare(**arguments)
        where = _shards(meta, arguments)
        cfg = cfg or self._config(operation, arguments)
        if meta.platform is not None and (cfg is None or cfg.platform == "auto"):
            arguments["platform"] = meta.platform
        return AttentionOutput(None, self.executor(operation, cfg=cfg, **arguments, **where))

    def _config(self, operation: FlashAttention, arguments: dict[str, Any]) -> FlashAttentionConfig | None:
        """Return the configuration in the metadata, or None."""
        meta = self.metadata
        found = (meta.operation_configs or {}).get("flash_attn2")
        if found is not None:
            return found
        if meta.blocksize_q >= _BLOCKS[0] and meta.blocksize_k >= _BLOCKS[1]:
            return None
        platform = {} if meta.platform is None else {"platform": meta.platform}
        inv = invocation(operation, (), {**arguments, **platform})
        return operation.capped_cfg(inv, meta.blocksize_q, meta.blocksize_k)


@OperationRegistry.register
class VanillaAttn(OperationImpl):
    """Attention that returns its weights, by `attest.kernels.operations.Attention`."""

    executor: Executor[AttentionConfig, tuple[Out, Weights]] = Executor()

    @classmethod
    def get_impl_name(cls) -> str:
        """Return "vanilla"."""
        return "vanilla"

    def forward_native(
        self,
        query: Query,
        key: Key,
        value: Value,
        mask_info: MaskInfo | None = None,
        bias: Bias | None = None,
        init_bias: Callable[[], Bias] | None = None,
        deterministic: Flag = True,
        dropout_rng: RandomKey | None = None,
        softmax_aux: Sinks | None = None,
        softmax_scale: Number | None = None,
        logits_soft_cap: Number | None = None,
        dropout_prob: Number | None = None,
        causal: Flag = False,
        sliding_window: SlidingWindow | None = None,
        **others: Any,
    ) -> AttentionOutput:
        """Compute attention and its weights; arguments are those of `attest.kernels.xla.attention`.

        Raises: TypeError for an argument that does not exist; ValueError naming the argument.
        """
        arguments: dict[str, Any] = {
            "query": query,
            "key": key,
            "value": value,
            "mask_info": mask_info,
            "bias": bias,
            "init_bias": init_bias,
            "deterministic": deterministic,
            "dropout_rng": dropout_rng,
            "softmax_aux": softmax_aux,
            "softmax_scale": softmax_scale,
            "logits_soft_cap": logits_soft_cap,
            "dropout_prob": dropout_prob,
            "causal": causal,
            "sliding_window": sliding_window,
        }
        meta = self.metadata
        arguments |= {name: x for name, x in others.items() if name not in _HARMLESS}
        arguments.setdefault("softmax_dtype", meta.runtime_softmax_dtype)
        arguments = _with_defaults(_cast(arguments, meta), meta)
        out, weights = self.executor(Attention(), **arguments)
        return AttentionOutput(weights, out)


def _cast(arguments: dict[str, Any], meta: OperationMetadata) -> dict[str, Any]:
    if meta.runtime_dtype is None:
        return arguments
    cast = {
        name: arguments[name] for name in ("query", "key", "value", "bias") if arguments[name] is not None
    }
    return {**arguments, **{name: x.astype(meta.runtime_dtype) for name, x in cast.items()}}


def _with_defaults(arguments: dict[str, Any], meta: OperationMetadata) -> dict[str, Any]:
    """Return the arguments, with those of the metadata in place of None."""
    defaults = {"softmax_scale": meta.softmax_scale, "dropout_prob": meta.dropout_prob}
    return {**arguments, **{name: x for name, x in defaults.items() if arguments[name] is None}}


def _shards(meta: OperationMetadata, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return mesh, in_specs and out_specs of a call; nothing if the mesh splits neither batch nor heads."""
    mesh = meta.mesh
    if mesh is None or mesh.size == 1:
        return {}
    query, key = arguments["query"], arguments["key"]
    by = meta.partition_axis
    batch = _dividing(mesh, meta.batch_axis if by is None else by.batch_axis, query.shape[0])
    heads = _dividing(mesh, meta.head_axis if by is None else by.head_axis, query.shape[2])
    whole_heads = _dividing(mesh, heads or (), key.shape[2]) != heads
    spec = PartitionSpec(batch, None, heads, None)
    of_keys = PartitionSpec(batch, None, None if whole_heads else heads, None)
    return {"mesh": mesh, "in_specs": (spec, of_keys, of_keys), "out_specs": spec}


def _dividing(mesh: Mesh, axes: Any, length: int) -> tuple[str, ...] | None:
    """Return those of some axes that the mesh has, from the first on, as long as they divide a length."""
    found: list[str] = []
    parts = 1
    for axis in (axes,) if isinstance(axes, str) else tuple(axes or ()):
        if axis in mesh.axis_names and length % (parts * mesh.shape[axis]) == 0:
            found.append(axis)
            parts *= mesh.shape[axis]
    return tuple(found) or None
