"""tokamax's own attention tests, from its wheel, on our adapter.

The tests of the operation are given ours as theirs are given each implementation. Those of the public
function find ours in its place.
"""

from typing import Any

import pytest
from tokamax._src.ops.attention import api, test_base
from tokamax._src.ops.attention.api_sharding_test import ApiShardingTest
from tokamax._src.ops.attention.api_test import (
    DotProductAttentionTest,
    DotProductAttentionXlaChunkedTest,
    DotProductAttentionXlaTest,
)

from attest.kernels.adapters.tokamax import attention_op, dot_product_attention

__all__ = [
    "ApiShardingTest",
    "DotProductAttentionTest",
    "DotProductAttentionXlaChunkedTest",
    "DotProductAttentionXlaTest",
    "OperationTest",
]


class OperationTest(test_base.AttentionTestBase):
    """The tests that every implementation of tokamax passes, with nothing declared as unsupported."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, attention_fn=attention_op)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put our function in place of tokamax's."""
    monkeypatch.setattr(api, "dot_product_attention", dot_product_attention)
