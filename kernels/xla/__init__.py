"""Attention in plain JAX, which runs wherever JAX runs.

Numerics of `flash_attention`: inputs are widened to float32, which is exact, and every dot, exp and sum is
float32; P and dS stay float32 for the second dot; out and each gradient are rounded once, to their input's
dtype. Delta uses out as rounded. Gradients of bias and softmax_aux are summed over their broadcast axes in
float32. fwd_params and bwd_params are ChunkSizes. precision is what `jax.lax.dot_general` takes: None is full
float32, "default" the backend's choice, which is TF32 or bfloat16 products on accelerators.

`attention` here is the function; its module is reached by `importlib.import_module`.
"""

from functools import partial

from attest.kernels.attention import flash_attention as _flash_attention
from attest.kernels.attention import flash_attention_with_lse as _flash_attention_with_lse
from attest.kernels.implementations import XLA
from attest.kernels.xla.attention import attention
from attest.kernels.xla.blocks import ChunkSizes, Config

# The public functions, with this implementation whatever the device.
flash_attention = partial(_flash_attention, platform=XLA)
flash_attention_with_lse = partial(_flash_attention_with_lse, platform=XLA)

__all__ = ["ChunkSizes", "Config", "attention", "flash_attention", "flash_attention_with_lse"]
