"""ejKernel's XLA kernels as Subjects: a missing environment is named, and their arguments are ejKernel's."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance.peers._elsewhere import ejkernel_calls as there
from attest.conformance.peers.ejkernel import ATTENTION, FLASH, INTERPRETED, RING
from attest.conformance.subject import Subject

VARIABLE = "ATTEST_PEER_PYTHON_EJKERNEL"
QUERY, KEY = jnp.ones((2, 4, 2, 3), jnp.bfloat16), jnp.ones((2, 5, 1, 3), jnp.bfloat16)

subjects = pytest.mark.parametrize(
    "subject", [INTERPRETED, FLASH, ATTENTION, RING], ids=lambda subject: subject.name
)


@dataclass(frozen=True)
class FwdParams:
    q_blocksize: int
    kv_blocksize: int


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that ejKernel's functions were called with last."""
    found: dict[str, Any] = {}

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def noting(result: Callable[[Any, Any], Any]) -> Callable[..., Any]:
        def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
            found.update(query=query, key=key, value=value, **options)
            return result(query, value)

        return call

    for name in ("ejkernel", "ejkernel.kernels", "ejkernel.kernels._xla"):
        module(name)
    module("ejkernel.ops", FwdParams=FwdParams)
    module("ejkernel.kernels._xla.flash_attention", flash_attention=noting(lambda query, _: query))
    module("ejkernel.kernels._xla.attention", attention=noting(lambda query, _: (query, None)))
    module("ejkernel.kernels._xla.ring_attention", ring_attention=noting(lambda _, value: value))
    return found


@subjects
def test_the_missing_environment_is_asked_for(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    missing = f"needs {VARIABLE}, the interpreter of an environment with ejkernel 0.0.80.3"
    assert subject.why_not_here("cpu") == missing
    with pytest.raises(RuntimeError, match=f"{subject.name} {missing}"):
        subject.call(QUERY, KEY, KEY)
    monkeypatch.setenv(VARIABLE, "/no/python")
    assert subject.why_not_here("cpu") == f"needs {VARIABLE} to be an interpreter, got '/no/python'"
    monkeypatch.setenv(VARIABLE, sys.executable)
    assert subject.why_not_here("cpu") is None


@pytest.mark.parametrize("subject", [INTERPRETED, FLASH], ids=lambda subject: subject.name)
def test_an_environment_without_ejkernel_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, sys.executable)
    with pytest.raises(RuntimeError, match="raised ModuleNotFoundError: No module named 'ejkernel'"):
        subject.call(QUERY, QUERY, QUERY, **subject.tilings[0].options)


def test_arrays_of_pairs_get_every_axis_and_an_open_window_a_side(given: dict[str, Any]) -> None:
    there.flash.__wrapped__(
        QUERY,
        KEY,
        KEY,
        bias=jnp.ones((1, 1, 4, 5)),
        attention_mask=jnp.ones((1, 1, 1, 5), bool),
        sliding_window=(3, None),
        q_block=16,
        kv_block=32,
        causal=True,
    )
    assert (given["bias"].shape, given["attention_mask"].shape) == ((2, 2, 4, 5), (2, 1, 4, 5))
    assert given["sliding_window"] == (3, 9)
    assert given["fwd_params"] == FwdParams(16, 32)
    assert given["causal"] is True
    assert not {"q_block", "kv_block"} & given.keys()


@pytest.mark.parametrize(("sinks", "expected"), [([3.0], 3), ([3.0, 4.0], 3), ([3.0, 4.0, 5.0], 3)])
def test_sinks_that_heads_share_are_never_as_many_as_heads(
    given: dict[str, Any], sinks: list[float], expected: int
) -> None:
    there.flash.__wrapped__(QUERY, KEY, KEY, softmax_aux=jnp.asarray(sinks))
    got = np.asarray(given["softmax_aux"])
    assert len(got) == expected
    assert np.isclose(np.exp(got).sum(), np.exp(sinks).sum())


def test_attention_computes_in_the_dtype_of_its_inputs_and_drops_by_a_key(given: dict[str, Any]) -> None:
    there.attention.__wrapped__(QUERY, KEY, KEY, dropout_prob=0.5, dropout_seed=7)
    assert given["dtype"] == jnp.bfloat16
    assert given["deterministic"] is False
    assert given["dropout_rng"].tolist() == [0, 7]
    assert "dropout_seed" not in given


def test_the_ring_gets_positions_by_its_names_and_always_both(given: dict[str, Any]) -> None:
    positions = jnp.zeros((2, 4), jnp.int32)
    out = there.ring.__wrapped__(QUERY, QUERY, QUERY, q_positions=positions)
    assert given["q_position_ids"] is positions
    assert given["kv_position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert not {"q_positions", "kv_positions"} & given.keys()
    assert (given["query"].dtype, out.dtype) == (jnp.float32, jnp.bfloat16)


def test_the_ring_gets_no_positions_where_there_are_none(given: dict[str, Any]) -> None:
    there.ring.__wrapped__(QUERY, QUERY, QUERY)
    assert not {"q_position_ids", "kv_position_ids"} & given.keys()
