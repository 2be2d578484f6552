"""The checks sharding.*: our kernels pass on eight devices, and each defect of a sharded call is seen."""

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.conformance.cases.case import Case
from attest.conformance.checks import all_checks
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.shards import shards
from attest.conformance.subject import Sharding, Subject, find
from attest.kernels.sharding import automatic as partitioned
from attest.kernels.sharding import explicit as dispatch
from tests.meta.processes import ROOT

DEVICES = 8
CHECKS = ("sharding.explicit", "sharding.automatic")
here = pytest.mark.process(devices=DEVICES)
on_one_and_on_eight = pytest.mark.parametrize("devices", [1, pytest.param(DEVICES, marks=here)])
KINDS = pytest.mark.parametrize("check", CHECKS)

XLA = find("xla.flash_attention")
# Two key heads on four devices, and pairs that are dropped by their place in the whole.
SHARED_KEYS = Case(
    batch=2, q_len=5, kv_len=6, q_heads=4, kv_heads=2, head_dim=4, value_dim=6, causal=True, dropout=0.3
)
BFLOAT16 = replace(SHARED_KEYS, dtype="bfloat16", batch=8, q_heads=8, kv_heads=1, dropout=0.0)


@pytest.fixture(autouse=True)
def without_programs_of_other_tests() -> Iterator[None]:
    if jax.device_count() >= DEVICES:
        jax.clear_caches()
    yield
    if jax.device_count() >= DEVICES:
        jax.clear_caches()


def red(subject: Subject, case: Case, check: str) -> str:
    (result,) = judge(subject, case, (check,))
    assert result.verdict is Verdict.FAIL, result
    assert "S21" in result.clauses
    return result.message


@here
def test_our_kernels_pass() -> None:
    planned = [
        (case, check)
        for task in tasks(XLA, load_profile("quick"), seed=0)
        for case, checks in task.cases
        for check in checks
        if check in CHECKS
    ]
    # Each call on either kind of mesh; small blocks and one piece are among them.
    calls = tomllib.loads((ROOT / "conformance" / "running" / "sharded.toml").read_text())["case"]
    assert len(planned) == len(CHECKS) * len(calls)
    assert {case.tiling for case, _ in planned} == {0, 1, 2}
    for case, check in planned:
        (result,) = judge(XLA, case, (check,))
        assert result.verdict is Verdict.PASS, (case, result)


def without(change: Callable[[Any], Any]) -> Any:
    """What reads the own part of a call, with a defect; it replaces that of both kinds of meshes."""
    original = dispatch.own_part

    def own_part(placement: Any, whole: Any, call: Any) -> Any:
        found = original(placement, whole, call)
        return replace(found, positions=change((placement, found)))

    return own_part


def own_coordinates(given: Any) -> Any:
    """Dropout counts from the first pair of the shard."""
    return replace(given[1].positions, origin=None)


def own_offset(given: Any) -> Any:
    """Each shard of the heads begins a row later than the one before."""
    placement, call = given
    shift = call.key.shape[1] - call.query.shape[1] + lax.axis_index(placement.heads)
    return replace(call.positions, q_offset=jnp.asarray(shift, jnp.int32)[None])


@here
@KINDS
@pytest.mark.parametrize("change", [own_coordinates, own_offset])
def test_coordinates_of_the_shard_are_seen(change: Any, check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = without(change)
    for module in (dispatch, partitioned):
        monkeypatch.setattr(module, "own_part", wrong)
    assert red(XLA, SHARED_KEYS, check).startswith("on 2 x 4 devices outside the error model: ")


@here
@KINDS
def test_key_heads_of_other_devices_are_seen(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device reads the first key head, as if there were one for each."""

    def first(placement: Any, x: jax.Array, heads: int, first: Any) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, 0 * first, 1, 2)

    monkeypatch.setattr(dispatch, "_own_key_heads", first)
    case = replace(SHARED_KEYS, dropout=0.0)
    assert red(XLA, case, check).startswith("on 2 x 4 devices outside the error model: ")


@here
def test_a_sum_of_rounded_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_widened", lambda _, call: call)
    assert "outside the error model: dkey" in red(XLA, BFLOAT16, "sharding.explicit")


def calling(change: Callable[[dict[str, Any]], Any], **declared: Any) -> Subject:
    """Our kernel, called in another way: `change` gets its arguments and returns out and lse."""

    def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return change({"query": query, "key": key, "value": value, **options})

    return replace(XLA, call=call, **declared)


def on_a_mesh() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


@here
@KINDS
def test_a_gather_is_seen(check: str) -> None:
    def gathered(arguments: dict[str, Any]) -> Any:
        mesh: Any = jax.sharding.get_abstract_mesh()
        if on_a_mesh():
            whole = NamedSharding(mesh, PartitionSpec())
            explicit = AxisType.Explicit in mesh.axis_types
            put: Any = jax.sharding.reshard if explicit else lax.with_sharding_constraint
            arguments["value"] = put(arguments["value"], whole)
        return XLA.call(**arguments)

    case = replace(SHARED_KEYS, q_heads=4, kv_heads=4)
    assert red(calling(gathered), case, check).startswith("on 2 x 4 devices the program has all-gather")


@here
def test_pairs_that_only_one_hot_values_show_are_seen() -> None:
    """The defect leaves all but a call without queries as it is."""

    def defective(arguments: dict[str, Any]) -> Any:
        out, lse = XLA.call(**arguments)
        if not on_a_mesh():
            return out, lse
        without_queries = (arguments["query"] == 0).all(axis=(1, 3), keepdims=True)
        return jnp.where(without_queries, jnp.ones_like(out), out), lse

    message = "on 2 x 4 devices other pairs are seen and kept than on one device"
    assert red(calling(defective), SHARED_KEYS, "sharding.explicit") == message


@here
def test_bits_are_compared_where_they_are_declared() -> None:
    def rounded(arguments: dict[str, Any]) -> Any:
        out, lse = XLA.call(**arguments)
        return (out * (1 + 2.0**-23) if on_a_mesh() else out), lse

    subject = calling(rounded, sharding=replace(XLA.sharding, bits=frozenset({"out"})))
    assert red(subject, SHARED_KEYS, "sharding.explicit") == "2 x 4 devices changed the bits of out"


@here
@KINDS
def test_nothing_to_shard_is_inconclusive(check: str) -> None:
    (result,) = judge(XLA, Case(q_len=3, kv_len=3), (check,))
    assert result.verdict is Verdict.INCONCLUSIVE


def test_as_many_devices_as_divide_the_batch_and_the_heads() -> None:
    assert [shards(*sizes, 8) for sizes in ((2, 4), (4, 8), (1, 12), (8, 1), (3, 5))] == [
        (2, 4),
        (2, 4),
        (1, 6),
        (8, 1),
        (1, 5),
    ]
    assert [shards(4, 4, 2), shards(1, 1, 8)] == [(1, 2), (1, 1)]


@on_one_and_on_eight
def test_it_applies_to_what_declares_meshes_where_there_are_several_devices(devices: int) -> None:
    check = all_checks()["sharding.automatic"]
    assert check.applies(Subject("toy", call=print)) == "does not declare automatic meshes"
    explicit = replace(XLA, sharding=Sharding(("explicit",)))
    assert check.applies(explicit) == "does not declare automatic meshes"
    assert jax.device_count() >= devices
    reason = None if jax.device_count() > 1 else "needs several devices, and JAX has one"
    assert check.applies(XLA) == reason


@on_one_and_on_eight
def test_a_subject_gets_the_calls_whose_features_it_declares(devices: int) -> None:
    few = Sharding(("explicit",), frozenset({"causal", "dropout", "gqa", "value_dim"}))
    drawn = [
        task.case
        for task in tasks(replace(XLA, sharding=few), load_profile("quick"), seed=0)
        if set(task.checks) <= set(CHECKS)
    ]
    assert jax.device_count() >= devices
    assert len(drawn) == (1 if jax.device_count() > 1 else 0)


@pytest.mark.parametrize(
    ("named", "declared"),
    [
        ("sharding, meshes", {"meshes": ("manual",)}),
        ("subject 'toy', sharding.features", {"features": frozenset({"causal"})}),
        ("subject 'toy', sharding.bits", {"bits": frozenset({"weights"})}),
    ],
)
def test_what_is_declared_is_checked(named: str, declared: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{named}: got"):
        Subject("toy", call=print, sharding=Sharding(**declared))
