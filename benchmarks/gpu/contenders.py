"""The contenders: how our kernels and each peer are called.

An adapter takes a problem and gives what computes it. It imports its library only then, so that one that is
missing stops nobody else.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import jax

from benchmarks.gpu.problem import Attend, Problem

# Ours: a report judges one of them, and may time the other beside it.
KERNELS = {"triton": "attest.kernels.triton", "mosaic_gpu": "attest.kernels.pallas.mosaic_gpu"}


def ours(module: str, problem: Problem) -> Attend:
    flash_attention = import_module(module).flash_attention
    return lambda inputs: flash_attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        bias=inputs.get("bias"),
        dropout_prob=problem.dropout,
        dropout_seed=inputs.get("seed"),
        causal=problem.causal,
        sliding_window=None if problem.window is None else (problem.window - 1, 0),
        logits_soft_cap=problem.soft_cap,
        softmax_aux=inputs.get("sinks"),
        q_segment_ids=inputs.get("segments"),
        kv_segment_ids=inputs.get("segments"),
    )


def cudnn(problem: Problem) -> Attend:
    return lambda inputs: jax.nn.dot_product_attention(
        inputs["query"], inputs["key"], inputs["value"], is_causal=problem.causal, implementation="cudnn"
    )


def tokamax_triton(problem: Problem) -> Attend:
    return _tokamax(problem, "triton")


def tokamax_mosaic(problem: Problem) -> Attend:
    return _tokamax(problem, "mosaic")


def _tokamax(problem: Problem, implementation: str) -> Attend:
    """As installed: 0.0.17 ships tuned configurations for no H200, so its heuristics choose."""
    if "xprof" not in sys.modules and find_spec("xprof") is None:
        # tokamax imports this large profiler for its own benchmarks alone; attention never calls it.
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = ModuleType(name)
        sys.modules["xprof.cli.tools"].get_kernel_stats_tool = None
    import tokamax

    return lambda inputs: tokamax.dot_product_attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        is_causal=problem.causal,
        implementation=implementation,
    )


def ejkernel(problem: Problem) -> Attend:
    """Its own default block sizes: 128 x 128 forward, 32 x 32 backward."""
    from ejkernel.kernels._triton.flash_attention import flash_attention

    return lambda inputs: flash_attention(
        inputs["query"], inputs["key"], inputs["value"], causal=problem.causal
    )


# The peers are given plain problems only, by the files of targets.
CONTENDERS: dict[str, Callable[[Problem], Attend]] = {
    **{f"our_{name}": partial(ours, module) for name, module in KERNELS.items()},
    "cudnn": cudnn,
    "tokamax_triton": tokamax_triton,
    "tokamax_mosaic": tokamax_mosaic,
    "ejkernel": ejkernel,
}

# cuDNN captures a CUDA graph when it compiles; modules that other threads load meanwhile break the capture.
COMPILED_ALONE = frozenset({"cudnn"})

# Those whose versions a report names.
DISTRIBUTIONS = ("jax", "jaxlib", "triton", "jax-triton", "nvidia-cudnn-cu13", "tokamax", "ejkernel")
