"""The law of vmap: one argument that a kernel does not map is found."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.checks.laws import vmapped
from attest.conformance.judging.trial import Trial
from attest.conformance.record import Verdict
from tests.conformance.checks.laws.test_laws import PLAIN, kernel, verdict

# Arrays that are not differentiated, and the fields of a case that has them.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "attention_mask": {"mask": "bh", "integer_mask": True},
    "q_segment_ids": {"segments": 3},
    "kv_positions": {"positions": "shuffled", "causal": True},
    "cum_seqlens_k": {"batch": 2, "lengths": ((3, 4), (9, 12))},
    "alibi_slopes": {"alibi": "heads"},
}


@jax.custom_batching.custom_vmap
def _first(array: Any) -> Any:
    """Return an array; under a map, the first entry for all."""
    return array


@_first.def_vmap
def _rule(_size: int, batched: list[bool], array: Any) -> tuple[Any, bool]:
    return jnp.broadcast_to(array[:1], array.shape), batched[0]


def _subject(name: str) -> Any:
    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return kernel().call(query, key, value, **(options | {name: _first(options[name])}))

    return kernel(call=call)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_is_not_mapped_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vmapped, "arguments", lambda _trial: ("value", name))
    case = replace(PLAIN, **ARGUMENTS[name])
    result = verdict(_subject(name), "vmap", case)
    assert result.verdict is Verdict.FAIL
    assert f"out over {name}" in result.message
    assert "over value" not in result.message
    assert verdict(kernel(), "vmap", case).verdict is Verdict.PASS


def test_each_entry_has_one_other_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the same recipe with another seed has equal numbers, as lengths and slopes are."""
    case = replace(PLAIN, lengths=((3, 4), (9, 12)), alibi="heads", q_offset=(1, 2), causal=True)
    monkeypatch.setattr(vmapped, "mapped_arguments", lambda: 99)
    trial = Trial(kernel(), case)
    first, *others = vmapped.vmapped(trial).calls
    seconds = others[::3]
    changed = [
        [
            name
            for name, array in vars(each.built.problem).items()
            if array is not vars(first.built.problem)[name]
        ]
        for each in seconds
    ]
    names = ["query", "key", "value", "cum_seqlens_q", "cum_seqlens_k", "alibi_slopes", "q_offset"]
    assert sorted(changed) == sorted([*([name] for name in names), []])
    assert changed == [[name] if name in names else [] for name in vmapped.arguments(trial)]
    reversed_lengths = seconds[changed.index(["cum_seqlens_q"])].built.problem.cum_seqlens_q
    assert reversed_lengths is not None
    assert reversed_lengths.tolist() == [0, 9, 12]
    assert seconds[changed.index([])].built.cotangents is not first.built.cotangents


def test_the_seed_chooses_the_arguments() -> None:
    chosen = [vmapped.arguments(Trial(kernel(), replace(PLAIN, seed=seed))) for seed in range(12)]
    assert all(len(names) == 2 for names in chosen)
    assert {name for names in chosen for name in names} == {"query", "key", "value", "cotangents"}
