"""ONNX's own node cases of the operator `Attention`, from its wheel, on a backend that has no other operator.

ONNX's runner makes the tests, and compares the outputs.
"""

from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep
from onnx.backend.test import BackendTest

from attest.kernels.adapters import onnx as adapter


class Attention(BackendRep):
    """A model of one node."""

    def __init__(self, node: NodeProto) -> None:
        self.node = node

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Return the outputs that the node names. An input without a name is left out."""
        given = dict(zip(filter(None, self.node.input), inputs, strict=True))
        attributes = {each.name: helper.get_attribute_value(each) for each in self.node.attribute}
        wanted = [name for name in self.node.output if name]
        scores = adapter.Outputs._fields[-1] in wanted
        # Looked up in each call, since each test counts its own.
        outputs = adapter.attention(**given, **attributes, with_qk_matmul_output=scores)
        return tuple(np.asarray(getattr(outputs, name)) for name in wanted)


class OurBackend(Backend):
    """A backend that has attention alone."""

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **_: Any) -> Attention:
        """Return the operator of a model that has no other."""
        (node,) = model.graph.node
        assert node.op_type == "Attention"
        return Attention(node)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether tests are for the device that JAX has here."""
        return device == "CPU"


RUNNER = BackendTest(OurBackend, __name__)
# The same cases as graphs of operators that the backend lacks.
RUNNER.exclude("_expanded_")
OnnxBackendNodeModelTest = RUNNER.test_cases["OnnxBackendNodeModelTest"]
