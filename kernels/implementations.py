"""The table of implementations: the fastest first, and XLA, which supports every call, last."""

from functools import cache
from importlib import import_module

from attest.kernels.implementation import Capabilities, Implementation, Passes


def _loaded(name: str, module: str, capabilities: Capabilities) -> Implementation:
    """Return an implementation whose module is imported when a call first runs it."""

    @cache
    def load() -> Passes:
        return import_module(module).PASSES

    return Implementation(name, capabilities, load)


MOSAIC_GPU = _loaded(
    "mosaic_gpu",
    "attest.kernels.pallas.mosaic_gpu.passes",
    Capabilities(
        backends=("gpu",),
        named_on=("cpu",),
        compute_capability="9.0",
        dtypes=("bfloat16", "float16"),
        largest_head_dim=256,
        dropout=False,
    ),
)

TRITON = _loaded(
    "triton",
    "attest.kernels.triton.passes",
    Capabilities(
        backends=("gpu",), named_on=("cpu",), largest_head_dim=256, packages=("triton", "jax_triton")
    ),
)

PALLAS_TPU = _loaded(
    "pallas_tpu",
    "attest.kernels.pallas.tpu.passes",
    Capabilities(
        backends=("tpu",),
        named_on=("cpu",),
        dtypes=("float32", "bfloat16"),
        logits_dtypes=("float32", "bfloat16"),
        largest_head_dim=256,
    ),
)

XLA = _loaded("xla", "attest.kernels.xla.passes", Capabilities(kv_positions=True))

IMPLEMENTATIONS = (MOSAIC_GPU, TRITON, PALLAS_TPU, XLA)
