# /// script
# requires-python = ">=3.12"
# dependencies = ["flash-attn-jax==0.6.2", "jax==0.8.3", "einops"]
# ///
"""Show that the gradients of `flash_attn_jax` are wrong under `jax.vmap`; exit status 1: shown.

The kernels need a GPU. The rules that map them over a further axis are Python, and run here on attention in
plain JAX in the place of the kernels.
"""

import sys
from types import ModuleType

kernels = ModuleType("flash_attn_jax_lib.flash_api")
kernels.get_ffi_registrations = dict
package = ModuleType("flash_attn_jax_lib")
package.flash_api = kernels
sys.modules |= {"flash_attn_jax_lib": package, "flash_attn_jax_lib.flash_api": kernels}

import jax
import jax.numpy as jnp
from flash_attn_jax import flash_bwd

MAPPED, BATCH = 3, 2


def attention(query, key, value):
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.einsum("nqhd,nkhd->nhqk", query, key) / query.shape[-1] ** 0.5
    return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(logits), value)


def gradients(d_out, query, key, value, out, lse, **options):
    return jax.vjp(attention, query, key, value)[1](d_out)


def main() -> int:
    flash_bwd.flash_mha_bwd = gradients
    keys = jax.random.split(jax.random.key(0), 4)
    d_out, query, key, value = (jax.random.normal(each, (MAPPED, BATCH, 5, 2, 4)) for each in keys)
    out, lse = query, query[..., 0].swapaxes(2, 3)  # only their shapes count here
    got, _ = flash_bwd.mha_bwd_batch((d_out, query, key, value, out, lse), (0,) * 6)
    expected = jax.vmap(gradients)(d_out, query, key, value, out, lse)
    mixed = [float(jnp.abs(a - b).max()) for a, b in zip(got, expected, strict=True)]
    swapped = [
        float(jnp.abs(a.swapaxes(0, 1).reshape(a.shape) - b).max())
        for a, b in zip(got, expected, strict=True)
    ]
    print("all arrays mapped: dquery, dkey, dvalue are off by", mixed, "and, in the other order, by", swapped)
    shared = (d_out, query, key[0], value[0], out, lse)
    axes = (0, 0, None, None, 0, 0)
    got, out_axes = flash_bwd.mha_bwd_batch(shared, axes)
    expected = jax.vmap(gradients, axes)(*shared)
    print("key and value shared: dkey has the shape", got[1].shape, "expected", expected[1].shape)
    print("it is the sum over the mapped axis:", bool(jnp.allclose(got[1], expected[1].sum(0), atol=1e-5)))
    return int(max(mixed) > 0.1 or out_axes[1] is None)


if __name__ == "__main__":
    sys.exit(main())
