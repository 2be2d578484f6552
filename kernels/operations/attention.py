"""The operation `Attention`: attention that returns its weights. It has one implementation, in XLA."""

import inspect
from collections.abc import Callable
from typing import Any

from attest.kernels.annotations import Out, Weights
from attest.kernels.call.options import refuse
from attest.kernels.operations.configs import AttentionConfig
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.kernel import Kernel, as_python
from attest.kernels.operations.platforms import check_platform
from attest.kernels.operations.registry import kernel_registry
from attest.kernels.xla.attention import attention

type _Invocation = Invocation[AttentionConfig, tuple[Out, Weights]]

_PARAMETERS = inspect.signature(attention).parameters
_UNUSED = ("block_q", "block_k", "num_warps", "num_stages")


class Attention(Kernel[AttentionConfig, tuple[Out, Weights]]):
    """Attention that returns (out [B, Sq, Hq, Dv], weights [B, Hq, Sq, Sk]).

    Its arguments are those of `attest.kernels.xla.attention`, in that order, and platform. It is not tuned.
    """

    op_id = "attention"
    version = "1"
    config_type = AttentionConfig

    def prepare(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return all arguments by name, without those that are their defaults.

        Raises: TypeError for an argument that does not exist, or is given twice.
        """
        platform = check_platform(kwargs.pop("platform", None))
        if platform not in ("auto", "xla"):
            refuse("platform", repr(platform), "'auto' or 'xla'", "Weights come from XLA alone.")
        bound = inspect.signature(attention).bind(*args, **kwargs).arguments
        given = {name: as_python(x) for name, x in bound.items()}
        return (), {name: x for name, x in given.items() if x is not _PARAMETERS[name].default}

    def run(self, *args: Any, cfg: AttentionConfig, **kwargs: Any) -> tuple[Out, Weights]:
        """Compute out and weights; see `attest.kernels.xla.attention`."""
        _, arguments = self.prepare(*args, **kwargs)
        return self.get_impl(cfg)(**arguments)

    def get_impl(self, cfg: AttentionConfig) -> Callable[..., tuple[Out, Weights]]:
        """Return the function of the registry."""
        return kernel_registry.get("attention", cfg.platform)

    def heuristic_cfg(self, inv: _Invocation) -> AttentionConfig:
        """Return the one configuration that there is."""
        return AttentionConfig()

    def check_cfg(self, cfg: Any, inv: _Invocation) -> AttentionConfig:
        """Return a configuration that a call gives.

        Raises: ValueError for one of another operation.
        """
        if not isinstance(cfg, AttentionConfig):
            refuse("cfg", f"a {type(cfg).__name__}", "an AttentionConfig", "Build it as AttentionConfig.")
        return cfg

    def unused(self, cfg: AttentionConfig, inv: _Invocation) -> tuple[str, ...]:
        """Return the block sizes, as attention without blocks has no use for them."""
        given = [name for name in _UNUSED if getattr(cfg, name) is not None]
        return tuple(f"{name}: attention that returns its weights has no blocks" for name in given)
