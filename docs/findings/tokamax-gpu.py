# /// script
# requires-python = ">=3.12"
# dependencies = ["jax[cuda13]==0.11.2", "numpy==2.5.5", "tokamax==0.0.17"]
# ///
"""Show faults of tokamax's attention on a Hopper GPU, in Triton and Mosaic GPU; exit status 1: shown.

Each line has what was got and what float64 NumPy expects. Causal order with a bias, which writes to memory of
other arrays, comes last.
"""

import logging
import sys
from functools import partial

import jax
import ml_dtypes
import numpy as np
import tokamax

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-11}  # products of float32 in TF32
NAMES = {"query": "dquery", "key": "dkey", "value": "dvalue", "bias": "dbias"}

logging.disable(logging.WARNING)  # tokamax warns of each call whose blocks were not tuned


def draw(
    queries=64, keys=64, heads=1, key_heads=1, dim=64, value_dim=None, batch=1, dtype="bfloat16", **more
):
    """Return random arrays in a dtype. more: further arrays, such as a bias."""
    rng = np.random.default_rng(0)
    shapes = {
        "query": (batch, queries, heads, dim),
        "key": (batch, keys, key_heads, dim),
        "value": (batch, keys, key_heads, value_dim or dim),
        "d_out": (batch, queries, heads, value_dim or dim),
    }
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()} | more
    return {name: np.asarray(array).astype(np.dtype(dtype)) for name, array in arrays.items()}


def expect(query, key, value, d_out, bias=0.0, scale=None, causal=False, cap=None):
    """Compute out and all gradients in float64."""
    query, key, value, d_out, bias = (np.asarray(x, np.float64) for x in (query, key, value, d_out, bias))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    group = query.shape[2] // key.shape[2]
    keys, values = np.repeat(key, group, 2), np.repeat(value, group, 2)
    logits = scale * np.einsum("bqhd,bkhd->bhqk", query, keys) + bias
    slope = 1.0
    if cap is not None:
        slope = 1 - np.tanh(logits / cap) ** 2
        logits = cap * np.tanh(logits / cap)
    if causal:  # from the top-left corner
        logits = np.where(np.tri(query.shape[1], key.shape[1], dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = np.einsum("bqhd,bkhd->bhqk", d_out, values)
    d_logits = slope * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    shared = tuple(axis for axis, size in enumerate(bias.shape) if size < d_logits.shape[axis])

    def of_key_heads(array):
        return array.reshape(*key.shape[:3], group, -1).sum(3)

    return {
        "out": np.einsum("bhqk,bkhd->bqhd", weights, values),
        "dquery": scale * np.einsum("bhqk,bkhd->bqhd", d_logits, keys),
        "dkey": scale * of_key_heads(np.einsum("bhqk,bqhd->bkhd", d_logits, query)),
        "dvalue": of_key_heads(np.einsum("bhqk,bqhd->bkhd", weights, d_out)),
        "dbias": d_logits.sum(shared, keepdims=True) if bias.ndim else d_logits,
    }


def attend(arrays, implementation, scale=None, causal=False, cap=None):
    return tokamax.dot_product_attention(
        **arrays, scale=scale, is_causal=causal, logits_soft_cap=cap, implementation=implementation
    )


def gradients(arrays, d_out, **options):
    out, backward = jax.vjp(partial(attend, **options), arrays)
    return {"out": out} | {NAMES[name]: gradient for name, gradient in backward(d_out)[0].items()}


def compute(arrays, **options):
    given = {name: array for name, array in arrays.items() if name != "d_out"}
    found = jax.jit(partial(gradients, **options))(given, arrays["d_out"])
    return {name: np.asarray(array, np.float64) for name, array in found.items()}


def show(title, implementation, arrays, outputs, limit=16.0, **options):
    """Print the worst element of each output. Return whether one is off by more than so many roundings."""
    got = compute(arrays, implementation=implementation, **options)
    wanted = expect(**arrays, **options)
    shown = False
    for name in outputs:
        error = np.abs(got[name] - wanted[name])
        error = np.where(np.isnan(error), np.inf, error)
        at = np.unravel_index(np.argmax(error), error.shape)
        wrong = error > limit * ROUNDING[arrays["query"].dtype.name] * np.abs(wanted[name]).max()
        shown = shown or bool(wrong.any())
        print(
            f"{implementation or 'default'}, {title}: {name} is wrong in {wrong.sum()} of {wrong.size} "
            f"places; got {got[name][at]:.4g}, expected {wanted[name][at]:.4g}"
        )
    return shown


def refuses(title, implementation, arrays):
    try:
        compute(arrays, implementation=implementation)
    except ValueError as error:
        print(f"{implementation}, {title}: raised {str(error).splitlines()[0]}; expected gradients")
        return True
    print(f"{implementation}, {title}: gradients, as expected")
    return False


def with_logits(level, keys=33, dim=64, dtype="bfloat16", **more):
    """Return arrays whose logits are all near a level."""
    arrays = draw(keys=keys, dim=dim, dtype=dtype, **more)
    arrays["query"] = np.ones_like(arrays["query"])
    arrays["key"] = (level * dim**-0.5 + 0.02 * arrays["key"].astype(np.float64)).astype(arrays["key"].dtype)
    return arrays


def bias_of(*shape, level=0.0):
    return np.clip(np.random.default_rng(1).standard_normal(shape), -1, 1) + level


def hidden_first(count, keys):
    return np.where(np.arange(keys) < count, -np.inf, 0.0) * np.ones((1, 1, 64, 1))


def two_roundings():
    """Show that the backward pass rounds other operands: one key has weight 1, so dvalue is dO."""
    shown = []
    for dim in (64, 20):
        one = draw(queries=1, keys=1, dim=dim)
        one["query"], one["key"] = np.full_like(one["query"], 3.78125), np.full_like(one["key"], 3.921875)
        shown.append(show(f"one query and one key, head dim {dim}", "triton", one, ["dvalue"]))
    return any(shown)


def rounded_scale():
    """Show that the scale is rounded to bfloat16, with products that are exact in it.

    72 products of 8 and 8 make a logit of 543.06. The bias is -544, and the logit of the other key is 0.
    """
    found = []
    for dim in (64, 72):
        exact = draw(queries=1, keys=2, dim=dim)
        exact["query"], exact["key"] = np.full_like(exact["query"], 8), np.full_like(exact["key"], 8)
        exact["key"][:, 1] = 0
        level = np.round(8 * dim**0.5 * 8 / 4) * 4
        exact["bias"] = np.array([-level, 0.0]).reshape(1, 1, 1, 2).astype(exact["query"].dtype)
        found.append(show(f"scale of head dim {dim}", "triton", exact, ["out"]))
    return any(found)


def rounded_terms(implementation):
    """Show that dbias is a sum of rounded terms: the second half of the queries nearly cancels the first."""
    arrays = draw(queries=512, bias=bias_of(1, 1, 1, 64))
    d_out = np.sign(arrays["d_out"].astype(np.float64))
    arrays["query"][:, 256:], d_out[:, 256:] = arrays["query"][:, :256], -d_out[:, :256]
    d_out[:, 256:, :, 0] += 1 / 32
    arrays["d_out"] = d_out.astype(arrays["query"].dtype)
    errors = {}
    for dtype in (ml_dtypes.bfloat16, np.float32):
        arrays["bias"] = arrays["bias"].astype(dtype)
        got, wanted = compute(arrays, implementation=implementation)["dbias"], expect(**arrays)["dbias"]
        errors[np.dtype(dtype).name] = np.abs(got - wanted).max() / np.abs(wanted).max()
    in_words = ", ".join(f"{error:.2g} for a bias in {dtype}" for dtype, error in errors.items())
    print(
        f"{implementation}, a bias shared by 512 queries: the largest relative error of dbias is {in_words}"
    )
    return errors["bfloat16"] > 4 * ROUNDING["bfloat16"]


def compiles_again(implementation):
    arrays = jax.device_put(draw(dim=32))
    d_out = arrays.pop("d_out")
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )
    for _ in range(2):
        compiled.clear()
        jax.block_until_ready(gradients(arrays, d_out, implementation=implementation))
    print(f"{implementation}, the same gradients again: compiled {len(compiled)} programs, expected 0")
    return len(compiled) > 0


def widths():
    return [
        show("head dim 8, bfloat16", "triton", draw(dim=8), ["out", "dquery", "dkey", "dvalue"]),
        show("head dim 4, float32", "triton", draw(dim=4, dtype="float32"), ["out"]),
        show("value dim 8, bfloat16", "triton", draw(value_dim=8), ["dquery", "dkey"]),
    ]


def partial_blocks():
    tall = bias_of(1, 1, 1, 64, level=3.0)
    half = {"queries": 65, "dtype": "float16"}
    cancels = 1e4  # dquery is a difference of keys that are nearly equal, so rounding alone makes it inexact
    return [
        show("65 queries, float16", "triton", draw(**half), ["dvalue"]),
        show("65 queries, float16", "mosaic", draw(**half), ["dvalue"]),
        show("65 queries, bias of up to 4", "triton", draw(queries=65, bias=tall), ["dkey", "dvalue"]),
        show("65 queries, bias of up to 4", "mosaic", draw(queries=65, bias=tall), ["dkey", "dvalue"]),
        show("33 keys, logits near -100", "triton", with_logits(-100.0), ["dquery"], cancels),
        show("33 keys, logits near -100", "mosaic", with_logits(-100.0), ["dquery"], cancels),
        show("33 keys, logits near -20", "triton", with_logits(-20.0, dtype="float16"), ["dquery"], cancels),
        show("33 keys, logits near -20", "mosaic", with_logits(-20.0, dtype="float16"), ["dquery"], cancels),
    ]


def biases():
    by_head = np.arange(2).reshape(1, 2, 1, 1) * 100 + bias_of(1, 2, 1, 129)
    four, rows = bias_of(1, 4, 1, 64), bias_of(1, 1, 64, 65)
    first = ["out", "dquery", "dkey", "dvalue", "dbias"]
    return [
        show("bias -inf for keys 0-63", "triton", draw(keys=128, bias=hidden_first(64, 128)), first),
        show("bias -inf for keys 0-127", "mosaic", draw(keys=256, bias=hidden_first(128, 256)), first),
        show("a bias for each of 4 heads over 2", "mosaic", draw(heads=4, key_heads=2, bias=four), ["dkey"]),
        show("bias for 129 keys", "mosaic", draw(heads=2, key_heads=2, keys=129, bias=by_head), ["dquery"]),
        refuses("bias of 64 x 65", "mosaic", draw(keys=65, bias=rows)),
    ]


def scales():
    outputs = ["out", "dquery", "dkey", "dvalue"]
    large = draw(keys=128)
    large["query"] *= 4
    return [
        show("129 keys, scale 0", "mosaic", draw(keys=129), outputs, scale=0.0),
        show("129 keys, scale -1", "mosaic", draw(keys=129), outputs, scale=-1.0),
        show("128 keys, scale -1, logits of hundreds", "mosaic", large, outputs, scale=-1.0),
    ]


def caps():
    high = with_logits(1000.0, keys=64, dtype="float16")
    low = with_logits(-1000.0, keys=64, dtype="float16")
    return [
        show("float16, logits near a cap of 30", "mosaic", high, ["out", "dquery"], cap=30.0),
        show("float16, logits near -30, cap 30", "mosaic", low, ["out"], cap=30.0),
    ]


def causal():
    plain, short = draw(96, 96, batch=2), draw(64, 128, batch=2)
    biased = draw(96, 96, heads=2, key_heads=2, bias=bias_of(1, 2, 96, 96))
    options = {"causal": True}
    return [
        show("causal, 96 x 96", "triton", plain, ["dkey", "dvalue"], **options),
        show("causal, 64 x 128", "triton", short, ["dkey", "dvalue"], **options),
        show("causal, 96 x 96, float32", None, draw(96, 96, dtype="float32"), ["dkey"], **options),
        show("causal, 96 x 96, bias", "triton", biased, ["out", "dkey"], **options),
    ]


def main():
    shown = [*widths(), *partial_blocks(), *biases(), *scales(), *caps(), two_roundings(), rounded_scale()]
    for implementation in ("triton", "mosaic"):
        shown += [rounded_terms(implementation), compiles_again(implementation)]
    return int(any([*shown, *causal()]))


if __name__ == "__main__":
    sys.exit(main())
