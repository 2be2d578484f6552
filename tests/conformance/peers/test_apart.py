"""Peers that `nox -s gate-peers` judges: their names, what they refuse, and one case each where they are."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.peers import _packages, flash_attn_jax, jax_tpu_flash, tokamax
from attest.conformance.peers.__main__ import judged_apart, lines
from attest.conformance.record import Verdict
from attest.conformance.running.judge import judge
from attest.conformance.subject import Subject, find

APART = judged_apart()
# The others run in an environment of their own, which a variable names: test_ejkernel_peer.py.
HERE = [subject for subject in APART.values() if not subject.name.startswith("ejkernel.")]
NOT_ON_CPUS = (flash_attn_jax.MHA, tokamax.TRITON, tokamax.MOSAIC)
# Those that a package of their own computes.
OF_PACKAGES = [*(subject for subject in HERE if not subject.name.startswith("jax.")), *NOT_ON_CPUS]


def named(subject: Subject) -> str:
    return subject.name


def test_each_name_finds_its_subject() -> None:
    assert len(APART) > 10
    assert all(find(name) is subject for name, subject in APART.items())


def test_subjects_of_one_module_have_names_of_their_own() -> None:
    assert len({subject.name for subject in APART.values()}) == len(APART)


def test_a_line_is_a_name_or_the_reason_why_not() -> None:
    subjects = {
        "here": replace(tokamax.XLA, ready=lambda: None),
        "elsewhere": replace(tokamax.XLA, ready=lambda: "needs a moon"),
        "gpu": replace(tokamax.TRITON, ready=lambda: None),
    }
    reasons = ["elsewhere: needs a moon", "gpu: runs on gpu, this machine has cpu"]
    assert lines(subjects, "cpu", others=False) == ["here"]
    assert lines(subjects, "cpu", others=True) == ["here", *reasons]


@pytest.mark.parametrize("subject", OF_PACKAGES, ids=named)
def test_a_package_that_is_not_installed_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    package = subject.name.partition(".")[0]
    backend = "cpu" if subject.backend == "any" else subject.backend
    monkeypatch.setattr(_packages, "find_spec", lambda name: None)
    assert subject.why_not_here(backend) == f"needs the package {package}, which is not installed"
    monkeypatch.setattr(_packages, "find_spec", lambda name: "found" if name == package else None)
    assert subject.why_not_here(backend) is None


def undeclared(subject: Subject) -> list[str]:
    """The arguments of features that a subject does not declare, and that no declared feature has."""
    judged = subject.features | subject.unjudged
    known = {name for feature in judged for name in ALL_FEATURES[feature].arguments}
    return sorted({name for feature in ALL_FEATURES.values() for name in feature.arguments} - known)


@pytest.mark.parametrize("subject", [*HERE, *NOT_ON_CPUS], ids=named)
def test_no_undeclared_argument_is_ignored(subject: Subject) -> None:
    array = jnp.ones((1, 128, 1, 8))
    for name in undeclared(subject):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            subject.call(array, array, array, **dict(subject.tilings[0].options), **{name: None})


@pytest.mark.parametrize("subject", HERE, ids=named)
def test_a_peer_that_is_here_passes_a_case(subject: Subject) -> None:
    reason = subject.why_not_here("cpu")
    if reason is not None:
        pytest.skip(reason)
    length = max(16, subject.limits.length_multiple)
    case = Case(dtype=subject.dtypes[0], q_len=length, kv_len=length, q_heads=2, kv_heads=2, head_dim=8)
    causal = replace(case, causal="causal" in subject.features)
    # Compiling the interpreted backward kernels takes long, and is the same for all.
    interpreted = subject.limits.length_multiple > 1 and subject is not jax_tpu_flash.INTERPRETED
    forward = interpreted or not subject.semantics.gradients
    with jax.numpy_dtype_promotion("standard"):  # one of them mixes dtypes
        (result,) = judge(subject, causal, ("forward" if forward else "gradients",))
    assert result.verdict is Verdict.PASS, result.message
