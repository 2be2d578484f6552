# /// script
# requires-python = ">=3.12"
# dependencies = ["jax[cuda13]==0.11.2", "numpy==2.5.5"]
# ///
"""Show faults of `jax.nn.dot_product_attention` with `implementation="cudnn"`; exit status 1: shown.

It needs an NVIDIA GPU. What is expected is computed here, in float64.
"""

import sys

import jax
import numpy as np


def arrays(seed, queries, keys, head_dim, heads=1):
    rng = np.random.default_rng(seed)
    rows, columns = (1, queries, heads, head_dim), (1, keys, 1, head_dim)
    return [rng.standard_normal(shape).astype(np.float16) for shape in (rows, columns, columns, rows)]


def expected(query, key, value, d_out, scale, bias=0.0, visible=None):
    """Return out, dquery, dkey, dvalue and dbias in float64."""
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, d_out))
    group = q.shape[2]  # all heads share one key
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    logits = scale * np.einsum("btnh,bsnh->bnts", q, k) + bias
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    if visible is not None:
        weights *= visible
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("btnh,bsnh->bnts", do, v)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    return (
        np.einsum("bnts,bsnh->btnh", weights, v),
        scale * np.einsum("bnts,bsnh->btnh", d_logits, k),
        scale * np.einsum("bnts,btnh->bsnh", d_logits, q).sum(2, keepdims=True),
        np.einsum("bnts,btnh->bsnh", weights, do).sum(2, keepdims=True),
        d_logits,
    )


def gradients(implementation, query, key, value, d_out, bias=None, **options):
    """Return out and the gradients of query, key, value and of a bias, as float64."""

    def run(do, *inputs):
        out, pull = jax.vjp(
            lambda *given: jax.nn.dot_product_attention(*given, implementation=implementation, **options),
            *inputs,
        )
        return out, *pull(do)

    inputs = (query, key, value) if bias is None else (query, key, value, bias)
    return [np.asarray(x, np.float64) for x in jax.jit(run)(d_out, *inputs)]


def window_has_no_right_side():
    inputs = arrays(0, 16, 16, 64)
    row, column = np.arange(16)[:, None], np.arange(16)
    right = expected(*inputs, 0.125, visible=(column >= row - 3) & (column <= row))
    future = expected(*inputs, 0.125, visible=column >= row - 3)
    shown = False
    for implementation, causal in (("cudnn", False), ("cudnn", True), ("xla", False)):
        got = gradients(implementation, *inputs, local_window_size=(3, 0), is_causal=causal)
        error, other = (
            max(np.abs(x - y).max() for x, y in zip(got, z, strict=False)) for z in (right, future)
        )
        print(
            f"window (3, 0), {implementation}, causal {causal}: largest error {error:.2g};",
            f"if rows saw all later keys, {other:.2g}",
        )
        shown |= error > 0.1
    return shown


def queries_beyond_the_keys():
    query, key, value, _ = arrays(0, 6, 4, 64)
    try:
        jax.block_until_ready(
            jax.nn.dot_product_attention(
                query, key, value, is_causal=True, local_window_size=(1, 0), implementation="cudnn"
            )
        )
    except NotImplementedError:
        return False
    except Exception as error:  # the fault: any other kind is of interest, too
        print(f"causal window, 6 queries x 4 keys: {type(error).__name__}: {str(error).splitlines()[0]}")
        return True
    return False


def scale_of_zero_or_below():
    shown = False
    bias = np.random.default_rng(1).standard_normal((1, 1, 16, 16)).astype(np.float16)
    for scale in (0.125, 0.0, -0.5):
        for with_bias in (None, bias):
            for causal in (False, True):
                inputs = arrays(0, 16, 16, 64)
                got = gradients("cudnn", *inputs, with_bias, scale=scale, is_causal=causal)
                names = ("out", "dquery", "dkey", "dvalue", "dbias")
                bad = [n for n, x in zip(names, got, strict=False) if np.isnan(x).any()]
                given = f"scale {scale}, {'bias' if with_bias is not None else 'no bias'}, causal {causal}"
                print(f"{given}: NaN in {', '.join(bad) or 'nothing'}")
                shown |= bool(bad)
    return shown


def gradient_of_a_bias():
    """Take logits of 0: then dbias does not depend on the scale."""
    shown = False
    query, key, value, d_out = arrays(0, 2, 2, 32)
    query[:] = 0
    bias = np.zeros((1, 1, 2, 2), np.float16)
    right = expected(query, key, value, d_out, 1.0)[4][0, 0, 0, 0]
    for implementation in ("cudnn", "xla"):
        for scale in (1.0, 1e-3, 1e-6, 1e-7, 0.0):
            got = gradients(implementation, query, key, value, d_out, bias, scale=scale)[4][0, 0, 0, 0]
            print(f"dbias, {implementation}, scale {scale}: got {got:.5g}, expected {right:.5g}")
            shown |= not abs(got - right) < 0.05
    return shown


def float32_bias():
    """Give a bias of zeros in the dtype of the inputs, and in float32."""
    inputs = arrays(0, 16, 32, 64)
    right = expected(*inputs, 0.125)[4]
    shown = False
    for dtype in ("float16", "float32"):
        got = gradients("cudnn", *inputs, np.zeros((1, 1, 16, 32), dtype))[4]
        error = np.abs(got - right).max()
        print(
            f"dbias of a {dtype} bias: largest error {error:.2g}, largest expected {np.abs(right).max():.2g}"
        )
        shown |= not error < 0.05
    return shown


def sums_over_a_group():
    """Give two heads nearly opposite cotangents: dvalue is a small difference."""
    query, key = np.zeros((1, 2, 2, 64), np.float16), np.zeros((1, 6, 1, 64), np.float16)
    d_out = np.zeros_like(query)
    d_out[:, 0, 0], d_out[:, 0, 1] = 1.001, -1
    right = expected(query, key, key, d_out, 0.125)[3][0, 0, 0, 0]
    shown = False
    for implementation in ("cudnn", "xla"):
        got = gradients(implementation, query, key, key, d_out)[3][0, 0, 0, 0]
        print(
            f"dvalue of two heads that share a value, {implementation}: got {got:.4g}, expected {right:.4g}"
        )
        shown |= abs(got - right) > 0.01 * abs(right)
    return shown


def hidden_nan():
    query, key, value, _ = arrays(0, 16, 16, 64)
    value[:, -1] = np.nan
    out = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")
    rows = int(np.isnan(np.asarray(out)[0, :15]).any((1, 2)).sum())
    print(f"causal, NaN in the last value: {rows} of the 15 rows that cannot see it are NaN")
    return rows > 0


if __name__ == "__main__":
    if jax.default_backend() != "gpu":
        print("needs an NVIDIA GPU")
        sys.exit(2)
    shown = [
        window_has_no_right_side(),
        queries_beyond_the_keys(),
        scale_of_zero_or_below(),
        gradient_of_a_bias(),
        float32_bias(),
        sums_over_a_group(),
        hidden_nan(),
    ]
    sys.exit(int(any(shown)))
