"""The table of implementations: the fastest first, and XLA, which supports every call, last."""

from functools import cache
from importlib import import_module
from typing import Any

from attest.kernels.configs.tunable import Tunable
from attest.kernels.contract import Capabilities, Implementation, Passes
from attest.kernels.versions import Versions

# Of TPUs and Hopper GPUs. Pallas changes from one version of JAX to the next.
_PALLAS_VERSIONS = Versions((0, 11, 2), (0, 11, 3))


def _loaded(name: str, package: str, capabilities: Capabilities) -> Implementation:
    """Return an implementation whose modules are imported when they are first used.

    They are `passes`, `blocks` and `candidates`.
    """

    @cache
    def load() -> Passes:
        return import_module(f"{package}.passes").PASSES

    @cache
    def config() -> type[Any]:
        return import_module(f"{package}.blocks").Config

    @cache
    def tunable() -> Tunable:
        return import_module(f"{package}.candidates").TUNABLE

    return Implementation(name, capabilities, load, config, tunable)


MOSAIC_GPU = _loaded(
    "mosaic_gpu",
    "attest.kernels.pallas.mosaic_gpu",
    Capabilities(
        backends=("gpu",),
        named_on=("cpu",),
        compute_capability="9.0",
        dtypes=("bfloat16", "float16"),
        largest_head_dim=256,
        alibi=True,
        jax_versions=_PALLAS_VERSIONS,
    ),
)

TRITON = _loaded(
    "triton",
    "attest.kernels.triton",
    Capabilities(
        backends=("gpu",),
        named_on=("cpu",),
        largest_head_dim=256,
        alibi=True,
        packages=("triton",),
        amd_packages=("jax_triton",),
        # It was judged on 0.11.2; jax 0.12 removes the internals that jax-triton 0.4.1 is built on.
        jax_versions=Versions((0, 11, 2), (0, 12)),
    ),
)

PALLAS_TPU = _loaded(
    "pallas_tpu",
    "attest.kernels.pallas.tpu",
    Capabilities(
        backends=("tpu",),
        named_on=("cpu",),
        dtypes=("float32", "bfloat16"),
        logits_dtypes=("float32", "bfloat16"),
        largest_head_dim=256,
        alibi=True,
        jax_versions=_PALLAS_VERSIONS,
    ),
)

XLA = _loaded(
    "xla",
    "attest.kernels.xla",
    Capabilities(
        kv_positions=True,
        alibi=True,
        symbolic=True,
        # jax.shard_map is there from 0.6.1. In 0.7.0 and 0.7.1 custom_partitioning lacks a part of the rules
        # that their partitioner needs. XLA in jax 0.11.0 miscompiles gradients on CPUs.
        jax_versions=Versions((0, 6, 1), (0, 13), without=((0, 7, 0), (0, 7, 1), (0, 11, 0))),
    ),
)

IMPLEMENTATIONS = (MOSAIC_GPU, TRITON, PALLAS_TPU, XLA)
