"""Configurations from the disk: one that does not fit the call is skipped, whoever wrote the file."""

import json
import os
import warnings
from typing import Any

import numpy as np
import pytest

from attest.kernels import triton, xla
from attest.kernels.configs import tunable
from attest.kernels.operations import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    FlashAttention,
    FlashAttentionConfig,
    FwdParams,
    PersistentCache,
    RingAttention,
    Tuner,
    create_default_executor,
    flash_attention,
)
from attest.kernels.operations.executor import invocation
from attest.kernels.operations.judging import Judgement
from attest.kernels.pallas import tpu
from tests.kernels.kernel_cases import qkv
from tests.kernels.operations.toy import Judge, Toy, ToyConfig

QKV = qkv(1, 16, 16, 2, 2, 8, 8)
NAMES = ("query", "key", "value")
OTHERS: dict[str, Any] = {
    "a config of Triton": FlashAttentionConfig(config=triton.Config()),
    "a config of TPUs": FlashAttentionConfig(platform="pallas_tpu", config=tpu.Config()),
    "a platform": FlashAttentionConfig(platform="mosaic_gpu"),
    "a backend": FlashAttentionConfig(backend="gpu"),
    "sizes that the platform does not have": FlashAttentionConfig(FwdParams(num_warps=4), platform="xla"),
}


def written(executor: Executor[Any, Any], operation: Any, config: Any, **arguments: Any) -> Any:
    """The file of a call, with this configuration."""
    _, arguments = operation.prepare(**arguments)
    key = invocation(operation, (), arguments).key
    return executor.chooser.persistent.put(*key, config)


@pytest.mark.found_outside
@pytest.mark.parametrize("operation", [FlashAttention(), RingAttention()], ids=["flash", "ring"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_configuration_that_does_not_fit_is_skipped_with_one_warning(name: str, operation: Any) -> None:
    executor = create_default_executor()
    call = dict(zip(NAMES, QKV, strict=True))
    path = written(executor, operation, OTHERS[name], **call, causal=True)
    with pytest.warns(UserWarning, match=f"{path.name}: skipped"):
        out = executor(operation, **call, causal=True)
    np.testing.assert_array_equal(out, xla.flash_attention(*QKV, causal=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor(operation, **call, causal=True)
        explained = executor.explain(operation, **call, causal=True)
    assert [step.name for step in explained.steps if step.found] == ["heuristics"]


def test_a_configuration_that_fits_is_taken() -> None:
    executor = create_default_executor()
    config = FlashAttentionConfig(config=xla.Config(xla.ChunkSizes(8, 8)))
    written(executor, FlashAttention(), config, **dict(zip(NAMES, QKV, strict=True)))
    assert executor.choose_config(FlashAttention(), *QKV) == config


def test_it_is_rewritten_when_the_call_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunable, "MOST_CANDIDATES", 1)
    executor = create_default_executor()
    executor.chooser.tuner = Tuner(1, 1, lambda call: Judgement(True))
    path = written(
        executor, FlashAttention(), OTHERS["a config of Triton"], **dict(zip(NAMES, QKV, strict=True))
    )
    winner = executor.tune(FlashAttention(), *QKV).winner()
    assert json.loads(path.read_text())["config"] == json.loads(winner.to_json())
    assert create_default_executor().choose_config(FlashAttention(), *QKV) == winner


@pytest.mark.found_outside
def test_a_pipe_in_the_folder_does_not_block_a_call() -> None:
    executor = create_default_executor()
    path = written(executor, FlashAttention(), OTHERS["a platform"], **dict(zip(NAMES, QKV, strict=True)))
    path.unlink()
    os.mkfifo(path)
    with pytest.warns(UserWarning, match="it is no regular file"):
        out = flash_attention(*QKV)
    np.testing.assert_array_equal(out, xla.flash_attention(*QKV))


@pytest.mark.found_outside
@pytest.mark.parametrize("name", ["toy", "flash-attention"])
def test_a_cache_without_a_class_takes_that_of_the_operation(tmp_path: Any, name: str) -> None:
    """`PersistentCache(name)` as modules of ejKernel write it, and a cache of another class."""
    first, fast = ToyConfig("first", 3000), ToyConfig("fast")

    def executor() -> Executor[Any, Any]:
        cache = PersistentCache(name, FlashAttentionConfig if name != "toy" else None, folder=tmp_path)
        return Executor(
            ConfigSelectorChain(policy=AutotunePolicy(), tuner=Tuner(1, 3, Judge()), persistent=cache)
        )

    operation, x = Toy((first, fast)), np.ones((8, 8), np.float32)
    assert executor().tune(operation, x).winner() == fast
    again = executor()
    assert again.choose_config(operation, x) == fast
    assert again.explain(operation, x).steps[-1].name == "memory"


@pytest.mark.found_outside
def test_what_cannot_be_written_is_kept_in_memory(tmp_path: Any) -> None:
    class Untyped(Toy):
        config_type = None

    selector = ConfigSelectorChain[Any, Any](
        tuner=Tuner(1, 3, Judge()), persistent=PersistentCache("toy", folder=tmp_path)
    )
    operation, x = Untyped((ToyConfig("first", 3000), ToyConfig("fast"))), np.ones((8, 8), np.float32)
    with pytest.warns(UserWarning, match=r"config: got a ToyConfig; expected a JSON value.* in memory alone"):
        winner = Executor(selector).tune(operation, x).winner()
    assert Executor(selector).choose_config(operation, x) == winner
