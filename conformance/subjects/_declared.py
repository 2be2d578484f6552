"""The declarations of a Subject of our kernels: capabilities of its implementation, and what all share."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.subject import Limits, Mesh, Sharding
from attest.kernels.call.positions import KEY_GROUP
from attest.kernels.contract import Implementation

# Of the call that all implementations share: `positions` and `leading_axes` of `attest.kernels.call`.
_LIMITS = Limits(origin_multiple=KEY_GROUP, batch_dims=True)
SHARED: Mapping[str, Any] = {"limits": _LIMITS}
# The head dims that cases are drawn with, where an implementation supports all.
_LARGEST_HEAD_DIM = 256


def declared(
    implementation: Implementation, longest: int = _LIMITS.longest, meshes: tuple[Mesh, ...] = ()
) -> dict[str, Any]:
    """Return the features, dtypes, head dims, limits and sharding of a Subject.

    longest: as in Limits. meshes: as in Sharding, for calls with any of the features.
    """
    capabilities = implementation.capabilities
    unsupported = set() if capabilities.dropout else {"dropout", "origin", "shared_dropout"}
    unsupported |= set() if capabilities.kv_positions else {"positions"}
    unsupported |= set() if capabilities.alibi else {"alibi"}
    features = frozenset(ALL_FEATURES) - unsupported
    return {
        "features": features,
        "dtypes": capabilities.dtypes,
        "head_dims": (1, capabilities.largest_head_dim or _LARGEST_HEAD_DIM),
        "limits": replace(_LIMITS, longest=longest),
        "sharding": Sharding(meshes, features if meshes else frozenset()),
    }
