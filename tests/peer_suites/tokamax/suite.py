"""tokamax's own attention tests, from its wheel, with ours as one more implementation of the operation."""

from typing import Any

from tokamax._src.ops.attention import test_base
from tokamax._src.ops.attention.api_sharding_test import ApiShardingTest
from tokamax._src.ops.attention.api_test import (
    DotProductAttentionTest,
    DotProductAttentionXlaChunkedTest,
    DotProductAttentionXlaTest,
)

from attest.kernels.adapters import tokamax as adapter

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
        super().__init__(*args, attention_fn=_attention_op)


def _attention_op(*arrays: Any, **options: Any) -> Any:
    # Looked up in each call, since each test counts its own.
    return adapter.attention_op(*arrays, **options)
