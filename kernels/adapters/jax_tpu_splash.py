"""The makers of `jax.experimental.pallas.ops.tpu.splash_attention` on our kernels, with their signatures.

Masks, SegmentIds and BlockSizes are JAX's own. The page docs/how-to/adapters-peers.md lists what differs.
"""

from typing import Any

from attest.kernels.adapters.jax_tpu_splash_kernel import NAMES, SplashAttentionKernel
from attest.kernels.adapters.jax_tpu_splash_masks import mask_arguments
from attest.kernels.adapters.shared import renamed
from attest.kernels.call.options import check_flag, check_number, check_size, check_soft_cap, refuse

# JAX's default, -0.7 times the largest float32. Any logit that low has weight 0.
_MASK_VALUE = -0.7 * 3.4028234663852886e38
_HIGHEST_MASK_VALUE = -65504.0


def make_splash_mha(
    mask: Any,
    *,
    block_sizes: Any = None,
    is_mqa: bool = False,
    save_residuals: bool = False,
    mask_value: float = _MASK_VALUE,
    attn_logits_soft_cap: float | None = None,
    downcast_smem_data: bool = True,
    head_shards: int,
    q_seq_shards: int,
    residual_checkpoint_name: None = None,
    interpret: bool = False,
) -> SplashAttentionKernel:
    """Return the function of q, k and v that JAX's `make_splash_mha` makes, on our kernels.

    Args:
        mask: a MultiHeadMask of JAX, or [heads, Sq, Sk] bool.
        block_sizes: without effect, like downcast_smem_data, head_shards, q_seq_shards and interpret.
        is_mqa: whether k and v are without heads.
        save_residuals: whether to return (out, (lse,)): the natural logarithm, with the sinks.
        mask_value: at most -65504. Hidden pairs have weight 0, whatever it is.
        attn_logits_soft_cap: c in c * tanh(logits / c) (S3).
        downcast_smem_data: True or False.
        head_shards: a positive integer.
        q_seq_shards: a positive integer.
        residual_checkpoint_name: None. Policies of `jax.checkpoint` save "flash_attention_out" and
            "flash_attention_lse".
        interpret: True or False.

    Raises: ValueError naming the argument.
    """
    if block_sizes is not None and type(getattr(block_sizes, "block_q", None)) is not int:
        expected = "None, or BlockSizes of splash attention"
        refuse("block_sizes", f"a {type(block_sizes).__name__}", expected, "Leave it out.")
    for name, flag in (("downcast_smem_data", downcast_smem_data), ("interpret", interpret)):
        check_flag(name, flag)
    for name, size in (("head_shards", head_shards), ("q_seq_shards", q_seq_shards)):
        check_size(name, size)
    if check_number("mask_value", mask_value) > _HIGHEST_MASK_VALUE:
        advice = "Add finite values as a bias of attest.flash_attention."
        refuse("mask_value", mask_value, f"at most {_HIGHEST_MASK_VALUE}, which hides a pair", advice)
    if residual_checkpoint_name is not None:
        advice = 'Let the policy save "flash_attention_out" and "flash_attention_lse".'
        refuse("residual_checkpoint_name", f"a {type(residual_checkpoint_name).__name__}", "None", advice)
    with renamed(NAMES):
        cap = check_soft_cap(attn_logits_soft_cap)
    shape, options, array = mask_arguments(mask)
    if cap is not None:
        options["logits_soft_cap"] = cap
    flags = check_flag("is_mqa", is_mqa), check_flag("save_residuals", save_residuals)
    return SplashAttentionKernel(array, shape, tuple(options.items()), *flags)


def make_splash_mqa(mask: Any, **options: Any) -> SplashAttentionKernel:
    """Return a function of keys and values without heads. The options are those of `make_splash_mha`."""
    return make_splash_mha(mask, is_mqa=True, **options)


def make_splash_mha_single_device(mask: Any, **options: Any) -> SplashAttentionKernel:
    """Return `make_splash_mha` with one shard."""
    return make_splash_mha(mask, head_shards=1, q_seq_shards=1, **options)


def make_splash_mqa_single_device(mask: Any, **options: Any) -> SplashAttentionKernel:
    """Return `make_splash_mqa` with one shard."""
    return make_splash_mha(mask, is_mqa=True, head_shards=1, q_seq_shards=1, **options)
