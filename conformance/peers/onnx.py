"""The Subject of the operator `Attention` in ONNX's reference evaluator, which computes in NumPy.

Its documentation is at https://onnx.ai/onnx/operators/onnx__Attention.html, of opset 25. In our words:

- Q and K are multiplied by sqrt(scale), then with each other. scale is 1 / sqrt(head_size) unless given.
  After that come the soft cap, the sum with `attn_mask`, the softmax, and the product with V. This last one
  takes all values, so a NaN in a hidden one leaks.
- `attn_mask` is a mask, where True means to take part, or a bias, and broadcasts to (batch_size, q_num_heads,
  q_sequence_length, total_sequence_length). There is one such input, so a call has a mask or a bias. A last
  axis that is shorter is padded with -inf, also one of size 1, which the adapter broadcasts therefore.
- Without a cache, causal order and windows start in the top-left corner. A window includes both ends, and -1
  leaves a side open.
- A row that sees no key "produces a zero output row, not NaN".
- Query heads may be grouped. Values may have a width of their own.
- No refusal of malformed arguments is described.

It is called on the host, from compiled programs too, and has no gradients. Only float32 is declared: in 16
bits sqrt(scale) is rounded to them, which no field of Numerics expresses.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from attest.conformance.peers._packages import why_not_installed
from attest.conformance.peers._windows import Window, sides_of
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics
from attest.reference.semantics import Semantics

_OPSET = 25


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    sliding_window: Window = None,
    logits_soft_cap: float | None = None,
) -> Any:
    """Call the evaluator on the host."""
    if attention_mask is not None and bias is not None:
        raise NotImplementedError("attention_mask and bias: got both, expected one of them: `attn_mask`")
    left, right = (-1 if side is None else side for side in sides_of(sliding_window))
    given = {
        "is_causal": int(causal),
        "scale": softmax_scale,
        "softcap": logits_soft_cap,
        "left_window_size": left,
        "right_window_size": right,
    }
    attributes = tuple((name, x) for name, x in given.items() if x is not None)
    planes = [x for x in (attention_mask, bias) if x is not None]
    added = [jnp.broadcast_to(x, (*x.shape[:-1], key.shape[1])) for x in planes]
    run = _evaluator(attributes, len(added))
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
    return jax.pure_callback(run, out, query, key, value, *added, vmap_method="sequential")


@cache
def _evaluator(attributes: tuple[tuple[str, Any], ...], added: int) -> Callable[..., NDArray[Any]]:
    """Return the function of arrays that evaluates one operator, with one `attn_mask` or with none."""
    onnx, reference = import_module("onnx"), import_module("onnx.reference")
    names = ["Q", "K", "V", *["attn_mask"][:added]]
    node = onnx.helper.make_node("Attention", names, ["Y"], **dict(attributes))
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names]
    outputs = [onnx.helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, None)]
    graph = onnx.helper.make_graph([node], "attention", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", _OPSET)])
    evaluator = reference.ReferenceEvaluator(model)

    def run(*arrays: Any) -> NDArray[Any]:
        given = [np.asarray(x) for x in arrays]
        given[:3] = [x.transpose(0, 2, 1, 3) for x in given[:3]]
        (out,) = evaluator.run(None, dict(zip(names, given, strict=True)))
        return out.transpose(0, 2, 1, 3)

    return run


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return its arithmetic: queries and keys are scaled by a rounded factor before their product."""
    return replace(default_numerics(dtype, tiling), input_rounding=2.0**-23, materialised=True)


REFERENCE = Subject(
    name="onnx.reference.attention",
    distribution="onnx",
    call=_call,
    features=frozenset(
        {"scale", "bias", "mask", "broadcast", "causal", "window", "soft_cap", "gqa", "value_dim"}
    ),
    semantics=Semantics(
        bias="after_cap",
        hidden_nonfinite="leaks",
        causal="top_left",
        window="top_left",
        gradients=frozenset(),
        lse_gradient=False,
    ),
    numerics=_numerics,
    limits=Limits(excludes=(frozenset({"bias", "mask"}),), validates=False),
    ready=lambda: why_not_installed("onnx"),
)

SUBJECTS: tuple[Subject, ...] = ()
APART = (REFERENCE,)
UNCONFIRMED: tuple[Subject, ...] = ()
