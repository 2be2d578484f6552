"""The chain that finds a configuration: the order of its steps, and what each policy allows."""

from typing import Any

import jax
import numpy as np
import pytest

from attest.kernels.operations import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    Executor,
    PersistentCache,
    Tuner,
    judging,
    overlay_cache,
    policy_override,
)
from attest.kernels.operations import tuner as tuner_module
from attest.kernels.operations.executor import invocation
from tests.kernels.operations.toy import Judge, Toy, ToyConfig

X = np.ones((8, 8), np.float32)
FIRST, FAST, OTHER = ToyConfig("first", 3000), ToyConfig("fast"), ToyConfig("other")


def chain(tmp_path=None, **policy: Any) -> ConfigSelectorChain[Any, Any]:
    persistent = None if tmp_path is None else PersistentCache("toy", ToyConfig, tmp_path)
    return ConfigSelectorChain(
        policy=AutotunePolicy(**policy), tuner=Tuner(1, 3, Judge()), persistent=persistent
    )


def steps(executor: Executor[Any, Any], operation: Toy, **more: Any) -> list[tuple[str, bool]]:
    return [(x.name, x.found) for x in executor.explain(operation, X, **more).steps]


def test_each_step_wins_over_those_behind_it(tmp_path):
    operation = Toy((FIRST, FAST))
    selector = chain(tmp_path)
    executor = Executor(selector)
    inv = invocation(operation, (), {"x": X})
    missed = [("overlay", False), ("memory", False), ("persistent", False)]
    assert steps(executor, operation) == [*missed, ("autotune", False), ("heuristics", True)]
    assert executor.choose_config(operation, X) == FAST  # tuned
    selector.cache.clear()
    assert steps(executor, operation) == [*missed[:2], ("persistent", True)]
    assert executor.choose_config(operation, X) == FAST
    selector.cache.put(*inv.key, FIRST)
    assert steps(executor, operation) == [missed[0], ("memory", True)]
    assert executor.choose_config(operation, X) == FIRST
    with overlay_cache({inv.key: OTHER}):
        assert steps(executor, operation) == [("overlay", True)]
        assert executor.choose_config(operation, X) == OTHER
        with overlay_cache({"toy": FAST}):
            assert executor.choose_config(operation, X) == FAST
        assert executor.choose_config(operation, X, cfg=FIRST) == FIRST
        assert steps(executor, operation, cfg=FIRST) == [("explicit", True)]
    assert executor.choose_config(operation, X) == FIRST


def test_the_config_that_is_found_is_the_one_that_runs():
    operation = Toy((FIRST, FAST))
    executor = Executor(chain(cache_miss_fallback="heuristics"))
    np.testing.assert_array_equal(executor(operation, X), 3 * X)
    np.testing.assert_array_equal(executor(operation, X, cfg=OTHER), 3 * X)
    assert operation.ran == [FIRST, OTHER]


def test_an_explicit_config_is_not_kept():
    operation = Toy((FIRST,))
    executor = Executor(chain(cache_miss_fallback="heuristics"))
    executor(operation, X, cfg=OTHER)
    assert executor.choose_config(operation, X) == FIRST


def test_policies():
    operation = Toy((FIRST, FAST))
    selector = chain(cache_miss_fallback="heuristics")
    executor = Executor(selector)
    assert executor.choose_config(operation, X) == FIRST
    with policy_override(selector, allow_heuristics=False):
        assert executor.choose_config(operation, X) == FAST
    selector.cache.clear()
    with policy_override(selector, cache_miss_fallback="autotune", allow_autotune=False):
        assert executor.choose_config(operation, X) == FIRST
    with (
        policy_override(selector, allow_autotune=False, allow_heuristics=False),
        pytest.raises(ValueError, match=r"policy: got .*expected one that finds a configuration for toy"),
    ):
        executor.choose_config(operation, X)
    assert selector.policy == AutotunePolicy(cache_miss_fallback="heuristics")
    with (
        pytest.raises(ValueError, match="policy_override: got the field 'speed'"),
        policy_override(selector, speed=1),
    ):
        pass
    with pytest.raises(ValueError, match="cache_miss_fallback: got 'guess'"):
        AutotunePolicy(cache_miss_fallback="guess")  # pyright: ignore[reportArgumentType]


def test_nothing_is_tuned_inside_a_trace():
    operation = Toy((FIRST, FAST))
    executor = Executor(chain())
    jax.jit(lambda x: executor(operation, x))(X)
    assert operation.ran == [FIRST]
    executor.tune(operation, X)
    operation.ran.clear()
    jax.jit(lambda x: executor(operation, x))(X)
    assert operation.ran == [FAST]


def test_constants_of_a_traced_function_are_not_tuned_either():
    operation = Toy((FIRST, FAST))
    executor = Executor(chain())
    jax.jit(lambda: executor(operation, X))()
    assert operation.ran == [FIRST]
    # What was taken inside of the trace is not taken for the same call outside.
    assert executor.choose_config(operation, X) == FAST
    with pytest.raises(ValueError, match="tune: got a call while JAX traces; expected one outside of"):
        jax.jit(lambda: executor.tune(operation, X))()


def test_an_operation_without_candidates_is_not_tuned():
    executor = Executor(chain())
    with pytest.raises(ValueError, match="op: got toy, which has one configuration here; expected several"):
        executor.tune(Toy(()), X)
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ValueError, match="mesh: got a mesh for toy; expected an operation that is tuned by"):
        executor.tune(Toy((FIRST,)), X, mesh=mesh, in_specs=(), out_specs=())


def test_nothing_is_tuned_without_a_judge(monkeypatch):
    monkeypatch.setattr(tuner_module, "installed_judge", lambda: None)
    operation = Toy((FIRST, FAST))
    executor = Executor(ConfigSelectorChain(tuner=Tuner(1, 1)))
    assert executor.choose_config(operation, X) == FIRST
    reasons = {x.name: x.why for x in executor.explain(operation, X).steps}
    assert "no judge is installed" in reasons["autotune"]
    with pytest.raises(ValueError, match="judge: got none; expected a judge of candidates"):
        executor.tune(operation, X)


def test_several_judges_are_refused(monkeypatch):
    class Point:
        def __init__(self, value):
            self.value = value

    judging.installed_judge.cache_clear()
    monkeypatch.setattr(judging, "entry_points", lambda group: [Point("a:judge"), Point("b:judge")])
    with pytest.raises(ValueError, match="a:judge, b:judge; expected one"):
        judging.installed_judge()
    judging.installed_judge.cache_clear()


def test_a_run_that_fails_caches_nothing_and_is_not_tried_again(tmp_path):
    operation = Toy((ToyConfig("wrong"), ToyConfig("crashes")))
    selector = chain(tmp_path)
    executor = Executor(selector)
    with pytest.warns(UserWarning, match="toy was not tuned: candidates: got none"):
        assert executor.choose_config(operation, X) == ToyConfig("wrong")  # what the tables say
    assert selector.cache.size() == 0
    assert not (tmp_path / "toy").exists()
    executor.chooser.cache.changes += 1
    assert executor.choose_config(operation, X) == ToyConfig("wrong")


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("")
    operation = Toy((FIRST, FAST))
    executor = Executor(chain(tmp_path / "file"))
    with pytest.warns(UserWarning, match="ATTEST_CACHE_DIR: got .* kept in memory alone"):
        executor.tune(operation, X)
    assert executor.choose_config(operation, X) == FAST


def test_steps_are_logged_and_reported(caplog):
    events: list[Any] = []
    selector = ConfigSelectorChain[Any, Any](on_event=lambda *event: events.append(event))
    operation = Toy((FIRST,))
    with caplog.at_level("DEBUG", "attest.operations"):
        Executor(selector).choose_config(operation, X)
    assert [(name, found) for name, found, _ in events][-1] == ("heuristics", True)
    assert "toy: heuristics: found, the operation's tables have it" in caplog.messages
    assert "heuristics: found" in str(Executor(selector).explain(operation, X))


def test_keys_say_what_speed_depends_on():
    operation = Toy()

    def key(**arguments: Any) -> str:
        return invocation(operation, (), arguments).call_key

    assert key(x=X) == key(x=X + 1) == key(x=jax.ShapeDtypeStruct(X.shape, X.dtype)) == key(x=X, causal=False)
    different = [
        key(x=X), key(x=X[1:]), key(x=X.astype(np.int32)), key(x=X, causal=True),
        key(x=X, sliding_window=3), key(x=X, sliding_window=(3, 0)), key(x=X, dropout_prob=0.1),
    ]  # fmt: skip
    assert len(set(different)) == len(different)
    assert key(x=X, dropout_prob=0.1) == key(x=X, dropout_prob=0.2)
    assert key(x=X, softmax_scale=0.1) == key(x=X, softmax_scale=0.2) != key(x=X)
    assert invocation(operation, (), {"x": X}).make_key(lambda inv: inv.op_id) == "toy"


def test_the_environment_is_part_of_the_key(monkeypatch):
    from attest.kernels.operations import environment

    operation = Toy()
    before = invocation(operation, (), {"x": X}).key
    monkeypatch.setattr(environment, "source_hash", lambda: "another source")
    after = invocation(operation, (), {"x": X}).key
    assert before[0] != after[0]
    assert before[1:] == after[1:]
    monkeypatch.setattr(Toy, "version", "2")
    assert invocation(operation, (), {"x": X}).key[1] == "toy@2"


def test_a_memory_cache_counts():
    cache = ConfigCache[str]()
    cache.put("e", "o", "c", "config")
    assert (cache.size(), cache.keys(), cache.get("e", "o", "c")) == (1, [("e", "o", "c")], "config")
    cache.clear()
    assert cache.get("e", "o", "c") is None
