"""Operations: attention as model code calls it, above the kernels: chosen, tuned, cached and sharded.

`MaskInfo` describes who sees whom. `flash_attention` and `attention` are functions; `FlashAttention` and
`Attention` are the operations behind them, which an `Executor` runs, as it does `RingAttention`.
"""

from attest.kernels.masks.mask_info import MaskInfo
from attest.kernels.operations.attention import Attention
from attest.kernels.operations.caches import ConfigCache, overlay_cache
from attest.kernels.operations.configs import AttentionConfig, BwdParams, FlashAttentionConfig, FwdParams
from attest.kernels.operations.executor import Executor, create_default_executor
from attest.kernels.operations.flash_attention import FlashAttention
from attest.kernels.operations.functions import attention, default_executor, flash_attention
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.kernel import Kernel
from attest.kernels.operations.persistent import PersistentCache
from attest.kernels.operations.platforms import Backend, Platform
from attest.kernels.operations.policy import AutotunePolicy, policy_override
from attest.kernels.operations.registry import NoImplementationError, detect_platform, kernel_registry
from attest.kernels.operations.ring_attention import RingAttention
from attest.kernels.operations.selector import ConfigSelectorChain, Explanation
from attest.kernels.operations.tuner import Tuner, TuningRecord

__all__ = [
    "Attention",
    "AttentionConfig",
    "AutotunePolicy",
    "Backend",
    "BwdParams",
    "ConfigCache",
    "ConfigSelectorChain",
    "Executor",
    "Explanation",
    "FlashAttention",
    "FlashAttentionConfig",
    "FwdParams",
    "Invocation",
    "Kernel",
    "MaskInfo",
    "NoImplementationError",
    "PersistentCache",
    "Platform",
    "RingAttention",
    "Tuner",
    "TuningRecord",
    "attention",
    "create_default_executor",
    "default_executor",
    "detect_platform",
    "flash_attention",
    "kernel_registry",
    "overlay_cache",
    "policy_override",
]
