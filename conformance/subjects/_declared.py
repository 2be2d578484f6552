"""What a Subject of our own kernels declares of its implementation's capabilities."""

from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.kernels.implementation import Implementation

# The head dims that cases are drawn with, where an implementation supports all.
_LARGEST_HEAD_DIM = 256


def declared(implementation: Implementation) -> dict[str, Any]:
    """Return the features, dtypes and head dims of a Subject."""
    capabilities = implementation.capabilities
    unsupported = set() if capabilities.dropout else {"dropout", "origin"}
    unsupported |= set() if capabilities.kv_positions else {"positions"}
    return {
        "features": frozenset(ALL_FEATURES) - unsupported,
        "dtypes": capabilities.dtypes,
        "head_dims": (1, capabilities.largest_head_dim or _LARGEST_HEAD_DIM),
    }
