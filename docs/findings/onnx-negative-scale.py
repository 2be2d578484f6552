# /// script
# requires-python = ">=3.12"
# dependencies = ["numpy==2.5.5", "onnx==1.23.2"]
# ///
"""Show that ONNX's reference of `Attention` gives NaN for a negative scale; exit status 1: shown."""

import sys

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def main() -> int:
    node = helper.make_node("Attention", ["Q", "K", "V"], ["Y"], scale=-0.5)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "QKV"]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)])
    query, key, value = np.random.default_rng(0).standard_normal((3, 1, 1, 4, 8), np.float32)
    with np.errstate(invalid="ignore"):
        (out,) = ReferenceEvaluator(model).run(None, {"Q": query, "K": key, "V": value})
    weights = np.exp(-0.5 * query.astype(np.float64) @ key.swapaxes(-1, -2))
    expected = weights / weights.sum(-1, keepdims=True) @ value
    print(f"scale=-0.5: {np.isnan(out).sum()} of {out.size} elements are NaN, expected none")
    return int(not np.allclose(out, expected, atol=1e-5))


if __name__ == "__main__":
    sys.exit(main())
