# /// script
# requires-python = ">=3.12"
# dependencies = ["jax==0.11.2", "keras==3.15.1", "numpy==2.5.5"]
# ///
"""Show what `keras.ops.dot_product_attention` computes on a TPU, interpreted on a CPU; exit status 1: shown.

Keras chooses its kernel by the platform of `jax.devices()[0]`, which this script sets to "tpu". The kernel is
JAX's splash attention, in Pallas's interpreter. Each result is compared with float64 NumPy.
"""

import os
import sys
from types import SimpleNamespace
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from jax.experimental.pallas import tpu as pltpu

SHAPE = (2, 128, 2, 64)  # batch, tokens, heads, head dim
# What the results of the calls equal.
EQUAL = {
    "no option": "causal attention without a scale",
    "is_causal=True": "causal attention without a scale",
    "scale=0.2": "causal attention with the scale 0.2 * sqrt(64)",
    "mask": "the first mask for all entries, without a scale",
    "bias": "causal attention without a scale and a bias",
}
QUERY, KEY, VALUE = np.random.default_rng(0).standard_normal((3, *SHAPE), np.float32)


def keras_on_a_tpu(**options):
    device = SimpleNamespace(platform="tpu")
    with mock.patch.object(jax, "devices", return_value=[device]), pltpu.force_tpu_interpret_mode(True):
        return np.asarray(keras.ops.dot_product_attention(QUERY, KEY, VALUE, **options), np.float64)


def attention(bias=0.0, mask=True, scale=SHAPE[-1] ** -0.5, is_causal=False):
    logits = np.einsum("bqhd,bkhd->bhqk", QUERY, KEY, dtype=np.float64) * scale + bias
    if is_causal:
        mask = mask & np.tri(SHAPE[1], dtype=bool)
    weights = np.where(mask, np.exp(logits - logits.max(-1, keepdims=True)), 0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), VALUE)


def main() -> int:
    mask = np.ones((2, 1, 128, 128), bool)
    mask[1, :, :, :64] = False  # of the second batch entry alone
    bias = np.random.default_rng(1).standard_normal((1, 1, 128, 128)).astype(np.float32)
    # What is asked for, and what the result equals.
    calls = {
        "no option": ({}, {"is_causal": True, "scale": 1.0}),
        "is_causal=True": ({"is_causal": True}, {"is_causal": True, "scale": 1.0}),
        "scale=0.2": (
            {"scale": 0.2, "is_causal": True},
            {"is_causal": True, "scale": 0.2 * SHAPE[-1] ** 0.5},
        ),
        "mask": ({"mask": mask}, {"mask": mask[:1], "scale": 1.0}),
        "bias": ({"bias": bias, "is_causal": True}, {"is_causal": True, "scale": 1.0}),
    }
    shown = 0
    for name, (asked, equal) in calls.items():
        got = keras_on_a_tpu(**asked)
        wrong = np.abs(got - attention(**asked)).max()
        same = np.abs(got - attention(**equal)).max()
        shown += wrong > 0.1
        print(f"{name}: off by {wrong:.3g} from what is documented, by {same:.1g} from {EQUAL[name]}")
    return int(shown > 0)


if __name__ == "__main__":
    sys.exit(main())
