"""EasyDeL's attention as a Subject: a missing environment is named, and its arguments are EasyDeL's."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.peers._elsewhere import easydel_calls as there
from attest.conformance.peers.easydel import VANILLA

QUERY, KEY = jnp.ones((2, 4, 2, 3), jnp.bfloat16), jnp.ones((2, 6, 1, 3), jnp.bfloat16)


@dataclass(frozen=True)
class MaskInfo:
    _attention_mask: Any


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that EasyDeL was called with last."""
    found: dict[str, Any] = {}

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def operation(metadata: Any) -> Any:
        def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
            found.update(metadata, query=query, **options)
            return SimpleNamespace(attention_outputs=query)

        return call

    for name in ("easydel", "easydel.infra", "easydel.operations.kernels", "ejkernel"):
        module(name)
    module("easydel.operations", OperationMetadata=dict)
    module("easydel.infra.base_config", EasyDeLBaseConfig=lambda: "config")
    module("easydel.operations.kernels.vanilla_attention", VanillaAttn=operation)
    module("ejkernel.types", MaskInfo=MaskInfo)
    there._operation.cache_clear()
    yield found
    there._operation.cache_clear()


def test_the_missing_environment_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTEST_PEER_PYTHON_EASYDEL", raising=False)
    missing = "needs ATTEST_PEER_PYTHON_EASYDEL, the interpreter of an environment with easydel 0.3.0"
    assert VANILLA.why_not_here("cpu") == missing


def test_it_computes_in_the_dtype_of_its_inputs(given: dict[str, Any]) -> None:
    there.vanilla.__wrapped__(QUERY, KEY, KEY, causal=True)
    assert (given["runtime_dtype"], given["runtime_softmax_dtype"]) == (jnp.bfloat16, jnp.float32)
    assert (given["base_config"], given["causal"]) == ("config", True)


def test_arrays_of_pairs_get_every_axis_and_an_open_window_a_side(given: dict[str, Any]) -> None:
    there.vanilla.__wrapped__(
        QUERY,
        KEY,
        KEY,
        bias=jnp.ones((1, 1, 4, 6)),
        attention_mask=jnp.ones((1, 1, 1, 6), bool),
        sliding_window=(None, 1),
    )
    assert given["bias"].shape == (2, 2, 4, 6)
    assert given["mask_info"]._attention_mask.shape == (2, 1, 4, 6)
    assert given["sliding_window"] == (10, 1)
    assert "attention_mask" not in given


@pytest.mark.parametrize("sinks", [[3.0], [3.0, 4.0], [3.0, 4.0, 5.0]])
def test_sinks_that_heads_share_are_never_as_many_as_heads(given: dict[str, Any], sinks: list[float]) -> None:
    there.vanilla.__wrapped__(QUERY, KEY, KEY, softmax_aux=jnp.asarray(sinks))
    got = np.asarray(given["softmax_aux"])
    assert len(got) == 3
    assert np.isclose(np.exp(got).sum(), np.exp(sinks).sum())
