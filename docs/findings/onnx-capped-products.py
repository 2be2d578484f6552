# /// script
# requires-python = ">=3.12"
# dependencies = ["numpy==2.5.5", "onnx==1.23.2"]
# ///
"""Show that ONNX's reference caps the products that should be raw; exit status 1: shown."""

import sys

import numpy as np
from onnx import FunctionProto, NodeProto, TensorProto, defs, helper
from onnx.reference import ReferenceEvaluator

SHAPE = [1, 1, 2, 4]
Q, K, V = (5 * np.random.default_rng(seed).standard_normal(SHAPE, np.float32) for seed in range(3))


def node(mode: int) -> NodeProto:
    """Return the operator with a soft cap of 1."""
    outputs = ["Y", "", "", "S"]
    return helper.make_node("Attention", ["Q", "K", "V"], outputs, softcap=1.0, qk_matmul_output_mode=mode)


def products(opset: int, mode: int) -> np.ndarray:
    """Return the fourth output of the operator."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "QKV"]
    output = helper.make_tensor_value_info("S", TensorProto.FLOAT, None)
    graph = helper.make_graph([node(mode)], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return ReferenceEvaluator(model).run(None, {"Q": Q, "K": K, "V": V})[0]


def in_the_function(opset: int, mode: int) -> list[str]:
    """Return what the fourth output is made of in the function that ONNX gives the operator."""
    types = [helper.make_tensor_type_proto(TensorProto.FLOAT, SHAPE).SerializeToString()] * 3
    schema = defs.get_schema("Attention", opset)
    body = FunctionProto()
    body.ParseFromString(schema.get_context_dependent_function(node(mode).SerializeToString(), types))
    made = {output: each for each in body.node for output in each.output}
    return list(made["qk_matmul_output"].input)


def main() -> int:
    raw = Q @ K.swapaxes(-1, -2) / 2
    wrong = 0
    for opset in (23, 24, 25):
        for mode, expected in enumerate((raw, np.tanh(raw))):
            got = products(opset, mode)
            wrong += not np.allclose(got, expected, rtol=1e-4)
            print(f"opset {opset}, mode {mode}: got {got.ravel()}, expected {expected.ravel()}")
            print(f"  the function of the operator returns {in_the_function(opset, mode)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
