"""The check `configuration`: ours pass in every way, and an operation that runs another one is seen."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attest.conformance.checks import all_checks
from attest.conformance.record import Result, Verdict
from attest.conformance.running.judge import judge
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.subject import Way, find
from attest.conformance.subjects._run_by_operations import KERNELS
from attest.conformance.subjects._tuned import TunedKernel
from attest.conformance.subjects._ways import ways
from attest.kernels import flash_attention
from attest.kernels.operations import (
    ConfigSelectorChain,
    Executor,
    FlashAttention,
    FlashAttentionConfig,
    create_default_executor,
)
from tests.toys import toy

XLA = next(kernel for kernel in KERNELS if kernel.platform == "xla")
EXPLICIT = find("operation.xla.flash_attention.explicit")
(CASE,) = (
    case
    for task in tasks(EXPLICIT, load_profile("quick"), 0)
    for case, checks in task.cases
    if checks == ("configuration",)
)


def result(*found: Way) -> Result:
    (judged,) = judge(replace(EXPLICIT, ways=found), CASE, ("configuration",))
    return judged


def wrong_ways(judged: Result) -> set[str]:
    """The ways that a result names, each with what ran."""
    assert judged.verdict is Verdict.FAIL, judged
    assert judged.clauses == ("S20",)
    return {
        sentence.removesuffix(", not the configuration that was meant")
        for sentence in judged.message.split("; ")
    }


def test_our_operation_runs_what_is_meant_in_every_way() -> None:
    assert result(*EXPLICIT.ways).verdict is Verdict.PASS
    assert len({way.name for way in EXPLICIT.ways}) == len(EXPLICIT.ways) == 11


@settings(max_examples=3, deadline=None)
@given(st.lists(st.tuples(*(st.sampled_from((8, 16, 24, 32)),) * 2), min_size=2, max_size=2, unique=True))
def test_it_does_so_with_blocks_of_any_size(sizes: list[tuple[int, int]]) -> None:
    judged = result(*ways(replace(XLA, traced=(sizes[0], sizes[1]))))
    assert judged.verdict is Verdict.PASS, judged


class IgnoresItsConfiguration(FlashAttention):
    def run(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> jax.Array:
        return super().run(*args, cfg=FlashAttentionConfig(), **kwargs)


def test_an_operation_that_ignores_its_configuration_is_seen() -> None:
    wrong = wrong_ways(result(*ways(XLA, operation=IgnoresItsConfiguration)))
    assert wrong == {
        f"{way.name}: the tables' choice ran" for way in EXPLICIT.ways if "the tables' choice" in way.others
    }


class FallsBack(ConfigSelectorChain[Any, Any]):
    """Takes the tables before all else where they come first on a miss."""

    def choose(self, inv: Any, kernel: Any, arguments: Any = None) -> Any:
        if self.policy.cache_miss_fallback == "heuristics":
            return kernel.heuristic_cfg(inv)
        return super().choose(inv, kernel, arguments)


class PrefersTheCache(ConfigSelectorChain[Any, Any]):
    """Takes a cached configuration before an explicit one."""

    def choose(self, inv: Any, kernel: Any, arguments: Any = None) -> Any:
        return self.cache.get(*inv.key) or super().choose(inv, kernel, arguments)


class NeverForgets(ConfigSelectorChain[Any, Any]):
    """Takes what it found for a call before."""

    def choose(self, inv: Any, kernel: Any, arguments: Any = None) -> Any:
        self.found = getattr(self, "found", {})
        if inv.override_cfg is not None:
            return super().choose(inv, kernel, arguments)
        return self.found.setdefault(inv.key, super().choose(inv, kernel, arguments))


class ReadsAnyEnvironment(ConfigSelectorChain[Any, Any]):
    """Takes a file of any environment, the first by name."""

    def choose(self, inv: Any, kernel: Any, arguments: Any = None) -> Any:
        assert self.persistent is not None
        files = sorted(self.persistent.folder.glob(f"*-{inv.call_key}-*.json"))
        if files and inv.override_cfg is None:
            return FlashAttentionConfig.from_json(json.dumps(json.loads(files[0].read_text())["config"]))
        return super().choose(inv, kernel, arguments)


def executor(chain: type[ConfigSelectorChain[Any, Any]], folder: str) -> Executor[Any, Any]:
    plain = create_default_executor(folder).chooser
    return Executor(chain(policy=plain.policy, persistent=plain.persistent))


@pytest.mark.parametrize(
    ("chain", "wrong"),
    [
        (ConfigSelectorChain[Any, Any], set[str]()),
        (
            FallsBack,
            {
                f"{way.name}: the tables' choice ran"
                for way in EXPLICIT.ways
                if "the tables' choice" in way.others and "policy" not in way.name
            },
        ),
        (
            PrefersTheCache,
            {
                "an explicit one beside caches: the second configuration ran",
                "an overlay: the second configuration ran",
            },
        ),
        (NeverForgets, {"the memory cache, changed after a call: the first configuration ran"}),
        (
            ReadsAnyEnvironment,
            {
                "the memory cache: the second configuration ran",
                "the persistent cache of another environment: the first configuration ran",
                "the persistent cache of two environments: the first configuration ran",
            },
        ),
    ],
)
def test_an_executor_that_takes_another_configuration_is_seen(
    chain: type[ConfigSelectorChain[Any, Any]], wrong: set[str]
) -> None:
    judged = result(*ways(XLA, executor=partial(executor, chain)))
    if wrong:
        assert wrong_ways(judged) == wrong
    else:
        assert judged.verdict is Verdict.PASS


def calling(change: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    return lambda query, key, value, **options: change(
        {"query": query, "key": key, "value": value, **options}
    )


def test_another_program_than_any_that_is_known_is_seen() -> None:
    twice = calling(lambda arguments: flash_attention(**arguments) * 2)
    judged = result(Way("twice", twice, flash_attention, {}))
    assert wrong_ways(judged) == {"twice: another program ran"}


def test_programs_that_are_alike_say_nothing() -> None:
    judged = result(Way("alike", flash_attention, flash_attention, {"the same": flash_attention}))
    assert judged.verdict is Verdict.INCONCLUSIVE
    assert judged.message == "alike: the same gives the program that is meant"


def test_what_a_way_raises_is_a_failure_of_the_subject() -> None:
    def refused(_: Any) -> Any:
        raise ValueError("cfg: got 3")

    judged = result(Way("refused", calling(refused), flash_attention, {}))
    assert judged.verdict is Verdict.FAIL
    assert judged.message.startswith("raised ValueError: cfg: got 3")


def test_it_applies_to_what_declares_ways() -> None:
    check = all_checks()["configuration"]
    assert check.applies(toy()) == "declares no ways in which a call gets its configuration"
    assert check.applies(EXPLICIT) is None


def test_a_tuned_kernel_runs_what_the_file_says_and_not_what_the_tables_choose() -> None:
    kernel = TunedKernel(XLA)
    assert result(kernel.way()).verdict is Verdict.PASS
    (path,) = kernel.folder.rglob("*.json")
    content = json.loads(path.read_text())
    candidates = content["record"]["candidates"]
    assert [x["verdict"] for x in candidates[:2]] == ["right", "right"]
    # What was found before the file changed is stale; a process that begins then reads the file.
    others = [
        x["config"] for x in candidates if json.loads(x["config"])["config"] != content["config"]["config"]
    ]
    path.write_text(json.dumps({**content, "config": json.loads(others[0])}))
    assert wrong_ways(result(kernel.way())) == {"the file of a tuning run: another program ran"}
    kernel.executor = create_default_executor(str(kernel.folder))
    assert result(kernel.way()).verdict is Verdict.PASS
    kernel.executor = Executor()
    assert wrong_ways(result(kernel.way())) == {"the file of a tuning run: the tables' choice ran"}
