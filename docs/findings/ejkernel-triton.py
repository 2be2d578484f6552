# /// script
# requires-python = ">=3.12"
# dependencies = ["ejkernel==0.0.80.3", "jax==0.10.2", "numpy==2.5.5", "triton==3.9.0"]
# ///
"""Show three faults of ejKernel's Triton flash attention in the interpreter; exit status 1: shown.

It needs no GPU. It needs a checkout of attest around it, whose interpreter runs the kernels. What is expected
is computed here, in float64.
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "conformance" / "peers" / "_elsewhere")]

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel_triton import flash

HALF = 2.0**-11  # half a unit in the last place of float16, relative


def arrays(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float16) for shape in shapes]


def attend(query, key, value):
    return flash(*map(jnp.asarray, (query, key, value)), q_block=16, kv_block=16)


def exact(query, key, value, d_out, out=None):
    """Return dquery, dkey and dvalue in float64; with D computed from `out`, if that is given."""
    q, k, v, do = (x[0].astype(np.float64) for x in (query, key, value, d_out))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scale = q.shape[-1] ** -0.5
    weights = np.exp(scale * np.einsum("qhd,khd->hqk", q, k))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("qhd,khd->hqk", do, v)
    delta = (weights * d_weights).sum(-1) if out is None else np.einsum("qhd,qhd->hq", do, out[0])
    d_logits = weights * (d_weights - delta[..., None])
    d_query = scale * np.einsum("hqk,khd->qhd", d_logits, k)
    d_key = scale * np.einsum("hqk,qhd->khd", d_logits, q)
    d_value = np.einsum("hqk,qhd->khd", weights, do)
    return [d_query] + [x.reshape(x.shape[0], -1, group, x.shape[-1]).sum(2) for x in (d_key, d_value)]


def gradients(query, key, value, d_out):
    """Return out, dquery, dkey and dvalue of the kernels as float64."""
    out, pull = jax.vjp(attend, *map(jnp.asarray, (query, key, value)))
    return [np.asarray(x, np.float64) for x in (out, *pull(jnp.asarray(d_out)))]


def gradients_of_grouped_heads(q_heads, kv_heads):
    queries, keys = (1, 16, q_heads, 16), (1, 16, kv_heads, 16)
    query, key, value, d_out = arrays(0, queries, keys, keys, queries)
    got, expected = gradients(query, key, value, d_out)[2:], exact(query, key, value, d_out)[1:]
    wrong = []
    for name, mine, right in zip(("dkey", "dvalue"), got, expected, strict=True):
        close = np.isclose(mine[0], right, rtol=0.02, atol=0.02)
        unwritten = np.isnan(mine).sum()
        print(
            f"heads {q_heads} over {kv_heads}: {name}: {(~close).sum()} of {close.size} are wrong,",
            f"{unwritten} NaN",
        )
        wrong.append(not close.all())
    return any(wrong)


def output_beyond_the_values(keys):
    query, key = np.zeros((1, 1, 1, 16), np.float16), np.zeros((1, keys, 1, 16), np.float16)
    out = np.asarray(attend(query, key, np.ones_like(key)), np.float64)
    print(f"float16, {keys} keys in blocks of 16, all values 1: {out.max():.4f}, expected 1")
    return abs(out - 1).max() > 2 * HALF


def error_of_one_key():
    """Attend to one key, so that nothing is summed and the output is its value."""
    (value,) = arrays(1, (1, 1, 1, 16))
    out = attend(np.zeros_like(value), np.zeros_like(value), value)
    error = np.abs(np.asarray(out, np.float64) / value.astype(np.float64) - 1).max()
    print(f"float16, one key: out differs from the value by {error:.1e} of it, {error / HALF:.1f} roundings")
    return error > 2 * HALF


def delta_of_a_rounded_output():
    """Take values that are far from 0: then dP and D are large and nearly equal."""
    query, key, value, d_out = arrays(0, (1, 33, 1, 32), (1, 17, 1, 32), (1, 17, 1, 32), (1, 33, 1, 32))
    value += np.float16(5)
    out, got, *_ = gradients(query, key, value, d_out)

    def error(expected):
        return float(np.sqrt(np.mean((got[0] - expected) ** 2) / np.mean(expected**2)))

    right, rounded = exact(query, key, value, d_out)[0], exact(query, key, value, d_out, out)[0]
    print(
        f"float16: dquery differs by {error(right):.1e} (rms);",
        f"with D from the returned out by {error(rounded):.1e}",
    )
    return error(right) > 100 * error(rounded)


if __name__ == "__main__":
    alone, grouped = gradients_of_grouped_heads(1, 1), gradients_of_grouped_heads(2, 1)
    output = [error_of_one_key(), output_beyond_the_values(128), output_beyond_the_values(1024)]
    sys.exit(int(any([grouped and not alone, *output, delta_of_a_rounded_output()])))
