"""Adapters of other projects' kernels; libraries that need a GPU are replaced by ones that note the call."""

import pkgutil
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.conformance import peers
from attest.conformance.peers import ejkernel, jax_nn, tokamax
from attest.conformance.subject import Subject, discover, find
from benchmarks.contenders import PEERS

NAMES = [info.name for info in pkgutil.iter_modules(peers.__path__) if not info.name.startswith("_")]
MODULES = [import_module(f"{peers.__name__}.{name}") for name in NAMES]
OPTIONS = {"bias": "b", "softmax_scale": 0.5, "causal": True}


class Call:
    """Notes the arguments that it is called with."""

    def __call__(self, *arrays: Any, **options: Any) -> str:
        self.arrays, self.options = arrays, options
        return "out"


@pytest.fixture
def call() -> Call:
    return Call()


def unconfirmed() -> list[Subject]:
    return [subject for module in MODULES for subject in module.UNCONFIRMED]


def apart() -> list[Subject]:
    return [subject for module in MODULES for subject in getattr(module, "APART", ())]


def test_the_gate_knows_the_confirmed_peers_only() -> None:
    confirmed = {subject.name for module in MODULES for subject in module.SUBJECTS}
    assert confirmed <= discover().keys()
    assert not {subject.name for subject in [*unconfirmed(), *apart()]} & discover().keys()


def test_benchmarks_time_subjects_of_peers() -> None:
    every = [subject for module in MODULES for subject in (*module.SUBJECTS, *module.UNCONFIRMED)]
    assert {subject.name for subject in PEERS.values()} <= {subject.name for subject in every}
    calls = [*(subject.call for subject in every), jax_nn.call_cudnn]
    assert all(subject.call in calls for subject in PEERS.values())
    assert find("attest.conformance.peers.jax_nn:CUDNN") is jax_nn.CUDNN


def test_cudnn_is_timed_and_tested_by_the_same_call_but_for_odd_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_nn, "call_cudnn", lambda *arrays, **options: (arrays, options))
    even, odd = jnp.zeros((1, 4, 1, 8)), jnp.zeros((1, 3, 1, 8))
    arrays, options = jax_nn.CUDNN.call(even, even, even, causal=True)
    assert all(x is even for x in arrays)
    assert options == {"causal": True}
    with pytest.raises(NotImplementedError, match="multiples of 2"):
        jax_nn.CUDNN.call(odd, even, even)


ELSEWHERE = [subject for subject in unconfirmed() if subject.backend in ("gpu", "tpu")]


@pytest.mark.parametrize("subject", ELSEWHERE, ids=lambda subject: subject.name)
def test_peers_for_accelerators_are_not_run_elsewhere(subject: Subject) -> None:
    assert subject.why_not_here("cpu") == f"runs on {subject.backend}, this machine has cpu"


@pytest.mark.parametrize("subject", [ejkernel.TRITON], ids=lambda subject: subject.name)
def test_a_peer_that_is_not_installed_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    package = subject.name.partition(".")[0]
    module = import_module(f"attest.conformance.peers.{package}")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert subject.why_not_here("gpu") == f"needs the package {package}, which is not installed"
    monkeypatch.setattr(module, "find_spec", lambda name: "found")
    assert subject.why_not_here("gpu") is None


def test_cudnn_is_called_by_jax_nn(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.nn, "dot_product_attention", call)
    arrays = (np.zeros((1, 4, 1, 8)), np.ones((1, 4, 1, 8)), np.ones((1, 4, 1, 8)))
    assert jax_nn.CUDNN.call(*arrays, **OPTIONS, sliding_window=(3, 0)) == "out"
    assert all(got is given for got, given in zip(call.arrays, arrays, strict=True))
    asked = {name: value for name, value in call.options.items() if value is not None}
    assert asked == {
        "bias": "b",
        "scale": 0.5,
        "is_causal": True,
        "local_window_size": (3, 0),
        "implementation": "cudnn",
        "return_residual": False,
    }


@pytest.mark.parametrize("subject", [tokamax.TRITON, tokamax.MOSAIC], ids=lambda subject: subject.name)
def test_tokamax_is_called_without_its_profiler(
    subject: Subject, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("tokamax")
    vars(library)["dot_product_attention"] = call
    monkeypatch.setattr(sys, "modules", {**sys.modules, "tokamax": library})
    monkeypatch.setattr(tokamax, "find_spec", lambda name: None)
    assert subject.call("q", "k", "v", **OPTIONS, logits_soft_cap=2.0) == "out"
    assert call.arrays == ("q", "k", "v")
    assert call.options == {
        "bias": "b",
        "scale": 0.5,
        "is_causal": True,
        "mask": None,
        "local_window_size": None,
        "logits_soft_cap": 2.0,
        "implementation": subject.name.partition(".")[2],
    }
    assert sys.modules["xprof.cli.tools"].get_kernel_stats_tool is None


def test_ejkernel_is_called_by_our_names(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "ejkernel.kernels._triton.flash_attention"
    library = ModuleType(name)
    vars(library)["flash_attention"] = call
    parents = [".".join(name.split(".")[:end]) for end in range(1, 4)]
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, library)
    assert ejkernel.TRITON.call("q", "k", "v", causal=True, softmax_scale=0.5) == "out"
    assert (call.arrays, call.options) == (("q", "k", "v"), {"causal": True, "softmax_scale": 0.5})
