# /// script
# requires-python = ">=3.12"
# dependencies = ["numpy==2.5.5", "onnx==1.23.2"]
# ///
"""Show that a mask that all queries share changes causal order in ONNX's reference; exit status 1: shown."""

import sys

import numpy as np
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


def attention(opset: int, mask: np.ndarray) -> np.ndarray:
    """Return the output for values 0 to 3 and equal logits: the mean of the keys that each row sees."""
    node = helper.make_node("Attention", ["Q", "K", "V", "M"], ["Y"], is_causal=1)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "QKVM"]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "attention", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    query = np.zeros((1, 1, 4, 8), np.float32)
    value = np.arange(4, dtype=np.float32)[:, None] + query
    return ReferenceEvaluator(model).run(None, {"Q": query, "K": query, "V": value, "M": mask})[0][0, 0, :, 0]


def main() -> int:
    wrong = 0
    for opset in (23, 24, 25):
        for name, mask in (
            ("bool", np.ones((1, 1, 1, 4), bool)),
            ("float", np.zeros((1, 1, 1, 4), np.float32)),
        ):
            out = attention(opset, mask)
            same = attention(opset, np.broadcast_to(mask, (1, 1, 4, 4)).copy())
            wrong += not np.array_equal(out, same)
            print(f"opset {opset}, {name} mask of [1, 1, 1, 4]: got {out}, with [1, 1, 4, 4] {same}")
            try:
                attention(opset, mask[0, 0, 0])
            except ValueError as error:
                wrong += 1
                print(f"opset {opset}, {name} mask of [4]: {error}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
