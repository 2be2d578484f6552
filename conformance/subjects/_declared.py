"""What a Subject of our own kernels declares: capabilities of its implementation, and what all share."""

from collections.abc import Mapping
from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.kernels.implementation import Implementation
from attest.kernels.positions import KEY_GROUP

# Of the call that all implementations share: `attest.kernels.positions` and `attest.kernels.batching`.
SHARED: Mapping[str, Any] = {"origin_multiple": KEY_GROUP, "batch_dims": True}
# The head dims that cases are drawn with, where an implementation supports all.
_LARGEST_HEAD_DIM = 256


def declared(implementation: Implementation) -> dict[str, Any]:
    """Return the features, dtypes, head dims and limits of a Subject."""
    capabilities = implementation.capabilities
    unsupported = set() if capabilities.dropout else {"dropout", "origin", "shared_dropout"}
    unsupported |= set() if capabilities.kv_positions else {"positions"}
    unsupported |= set() if capabilities.alibi else {"alibi"}
    return {
        "features": frozenset(ALL_FEATURES) - unsupported,
        "dtypes": capabilities.dtypes,
        "head_dims": (1, capabilities.largest_head_dim or _LARGEST_HEAD_DIM),
        **SHARED,
    }
