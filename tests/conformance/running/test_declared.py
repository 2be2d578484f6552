"""A record keeps what its subjects declare, and the versions of the distributions that kernels come from."""

from dataclasses import replace
from importlib.metadata import version

import pytest

from attest.conformance.clauses import CLAUSES
from attest.conformance.peers import ejkernel, jax_nn, jax_tpu_flash
from attest.conformance.peers.__main__ import judged_apart
from attest.conformance.running.declared import declarations, declared_clauses, distributions
from attest.conformance.subject import Limits, Sharding, Subject, Tiling, find
from attest.reference.semantics import Semantics

PLAIN = Subject("toy", print, semantics=Semantics(gradients=frozenset()), limits=Limits(validates=False))
CAUSAL = replace(PLAIN, features=frozenset({"causal"}))
LEAKS = Semantics(gradients=frozenset(), hidden_nonfinite="leaks", empty_rows="unspecified")


def test_a_kernel_of_all_features_declares_all_clauses() -> None:
    assert declared_clauses(find("xla.flash_attention")) == list(CLAUSES)


@pytest.mark.parametrize(
    ("declared", "clauses"),
    [
        (PLAIN, "S1 S16 S17 S19 S22"),
        (CAUSAL, "S1 S4 S6 S10 S16 S17 S19 S22"),
        (replace(CAUSAL, semantics=LEAKS), "S1 S6 S16 S17 S19 S22"),
        (replace(PLAIN, semantics=replace(LEAKS, deterministic=False)), "S1 S16 S19 S22"),
        (replace(PLAIN, semantics=Semantics(gradients=frozenset({"value"}))), "S1 S14 S16 S17 S19 S22"),
        (replace(PLAIN, returns_lse=True), "S1 S13 S16 S17 S19 S22"),
        (replace(PLAIN, tilings=(Tiling({}, 8, 8), Tiling())), "S1 S16 S17 S18 S19 S22"),
        (replace(PLAIN, limits=Limits()), "S1 S16 S17 S19 S20 S22"),
        (replace(PLAIN, sharding=Sharding(meshes=("explicit",))), "S1 S16 S17 S19 S21 S22"),
        (replace(PLAIN, limits=Limits(validates=False, batch_dims=True)), "S1 S16 S17 S19 S22 S27"),
    ],
)
def test_the_clauses_follow_from_the_declarations(declared: Subject, clauses: str) -> None:
    assert declared_clauses(declared) == clauses.split()


def test_declarations_have_the_name_the_features_and_the_interpreter() -> None:
    found = declarations({"module:NAME": jax_tpu_flash.INTERPRETED})["module:NAME"]
    assert found["name"] == "jax.pallas.tpu.flash_attention.interpreted"
    assert found["interpreter"] == "Pallas for TPUs"
    assert found["features"] == ["bias", "causal", "scale", "segments"]
    assert found["dtypes"] == ["float32", "bfloat16"]
    assert found["dialect"]["causal"] == "top_left"
    assert found["dialect"]["gradients"] == "bias, key, query, value"
    assert "deterministic" not in found["dialect"]


def test_the_version_is_that_of_the_distribution_here() -> None:
    subjects = {"ours": find("xla.attention"), "theirs": jax_nn.XLA}
    assert distributions(subjects) == {"theirs": {"name": "jax", "version": version("jax")}}


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    missing = replace(jax_nn.XLA, distribution="no-such-distribution")
    assert distributions({"theirs": missing}) == {"theirs": {"name": "no-such-distribution", "version": ""}}


def test_the_version_of_a_kernel_elsewhere_is_that_of_the_environment_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATTEST_PEER_PYTHON_EJKERNEL", raising=False)
    unknown = {"name": "ejkernel", "version": ""}
    assert distributions({"ring": ejkernel.RING}) == {"ring": unknown}
    there = replace(ejkernel.RING, version=lambda: "1.2.3")
    assert distributions({"ring": there})["ring"]["version"] == "1.2.3"


def test_every_peer_names_its_distribution() -> None:
    assert all(subject.distribution for subject in judged_apart().values())
