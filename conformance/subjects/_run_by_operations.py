"""The kernels that operations are judged on: which Subject declares each, and which sizes it is given."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from attest.conformance.subject import Subject
from attest.conformance.subjects import mosaic_gpu, pallas_tpu, triton, xla
from attest.kernels.operations import BwdParams, FlashAttention, FlashAttentionConfig, FwdParams
from attest.kernels.operations.executor import invocation
from attest.kernels.operations.invocation import Invocation

# A block size of all kernels of an implementation: query rows and keys.
type Sizes = tuple[int, int]

_BY_NAME = {
    subject.name: subject
    for subject in (*xla.SUBJECTS, *triton.SUBJECTS, *pallas_tpu.SUBJECTS, *mosaic_gpu.SUBJECTS)
}


@dataclass(frozen=True)
class JudgedKernel:
    """A kernel below an operation.

    declared: the Subject of the kernel. platform: the name of its implementation. given: sizes of the
    configurations that calls give, the last one large enough for long calls. candidates: sizes that are
    timed. traced: two sizes that the tables choose for no call, and that a trace of the kernel takes.
    operation: runs it. wrap_call: wraps a whole call of the operation, arguments by name. An interpreted
    kernel needs it, as JAX traces some rules, such as that of `vmap`, after the kernel.
    """

    declared: Subject
    platform: str
    given: tuple[Sizes, ...]
    candidates: tuple[Sizes, ...]
    traced: tuple[Sizes, Sizes]
    operation: Callable[[], FlashAttention] = FlashAttention
    wrap_call: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call


class OnAnyDevice(FlashAttention):
    """The operation; it also takes configurations from the disk of kernels that are interpreted here."""

    def check_cached(
        self, cfg: FlashAttentionConfig, inv: Invocation[FlashAttentionConfig, jax.Array]
    ) -> FlashAttentionConfig:
        return self.check_cfg(cfg, inv)


_interpreted = partial(pallas_tpu.interpreted_call, seed=1)


class _InterpretedOnTpu(FlashAttention):
    """The operation, with its kernels in Pallas's interpreter of TPUs."""

    def run(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> jax.Array:
        _, arguments = self.prepare(*args, **kwargs)
        return _interpreted(partial(super().run, cfg=cfg))(**arguments)


_SMALL_AND_LARGE = ((16, 16), (64, 128))
_LARGE = ((64, 64), (64, 128))
# Two that differ on the short call of the check `configuration`, where XLA reads no larger blocks.
_SHORT = ((32, 32), (64, 32))
_UNUSUAL = ((16, 16), (32, 16))
# Blocks of other sizes are not traced for TPUs, and (128, 128) is the tables' choice.
_OF_TPUS = ((256, 128), (128, 256))
# A consumer has 64 rows.
_OF_HOPPER = ((64, 64), (128, 64))

KERNELS = (
    JudgedKernel(_BY_NAME["xla.flash_attention"], "xla", _SMALL_AND_LARGE, _SHORT, _UNUSUAL),
    JudgedKernel(_BY_NAME["triton.interpret"], "triton", _SMALL_AND_LARGE, _LARGE, _UNUSUAL),
    JudgedKernel(_BY_NAME["triton.cuda"], "triton", ((16, 32), (64, 32)), ((32, 32), (64, 32)), _UNUSUAL),
    JudgedKernel(
        _BY_NAME["pallas.tpu_interpret"],
        "pallas_tpu",
        _SMALL_AND_LARGE,
        _OF_TPUS,
        _OF_TPUS,
        _InterpretedOnTpu,
        _interpreted,
    ),
    JudgedKernel(_BY_NAME["pallas.mosaic_gpu"], "mosaic_gpu", _OF_HOPPER, _OF_HOPPER, _OF_HOPPER),
)


def exact(platform: str, sizes: Sizes, arguments: dict[str, Any]) -> FlashAttentionConfig:
    """Return the configuration of an implementation whose kernels all have blocks of these sizes.

    arguments: of the call, by name. The platform is left out: the registry has no interpreted kernels.
    """
    rows, keys = sizes
    neutral = FlashAttentionConfig(
        FwdParams(q_blocksize=rows, kv_blocksize=keys),
        BwdParams(q_blocksize=rows, kv_blocksize=keys),
        platform=platform,
    )
    op = FlashAttention()
    _, given = op.prepare(**arguments)
    return FlashAttentionConfig(config=op.complete(neutral, invocation(op, (), given)).config)
