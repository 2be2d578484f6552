"""The declarations and the distributions of subjects, for records."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.clauses import CLAUSES
from attest.conformance.running.environment import installed_version
from attest.conformance.subject import Subject
from attest.reference.semantics import STANDARD, Semantics

# Clauses that hold for every kernel.
_ALWAYS = frozenset({"S1", "S16", "S19", "S22"})
# Features with which a call hides keys.
_HIDING = frozenset({"mask", "causal", "window", "segments", "padded", "packed", "chunks", "ranges"})


def declarations(subjects: Mapping[str, Subject]) -> dict[str, dict[str, Any]]:
    """Return the features, dtypes, clauses, dialects and interpreters of subjects, and their own names.

    By the names in the record, which may be `module:attribute`.
    """
    return {
        name: {
            "name": subject.name,
            "interpreter": subject.interpreter,
            "features": sorted(subject.features),
            "dtypes": list(subject.dtypes),
            "clauses": declared_clauses(subject),
            "dialect": dialect(subject.semantics),
        }
        for name, subject in subjects.items()
    }


def declared_clauses(subject: Subject) -> list[str]:
    """Return the clauses that a subject declares, in their order: a result can be wrong by each of them.

    What a dialect leaves open is not declared: S4 by a kernel whose hidden NaN leaks, S10 by one whose rows
    without a key are unspecified, S20 by one that does not check its arguments.
    """
    semantics, limits, sharding = subject.semantics, subject.limits, subject.sharding
    hides = bool(subject.features & _HIDING)
    by_declaration = {
        "S4": hides and semantics.hidden_nonfinite == "ignored",
        "S10": hides and semantics.empty_rows != "unspecified",
        "S13": subject.returns_lse,
        "S14": bool(semantics.gradients),
        "S17": semantics.deterministic,
        "S18": len(subject.tilings) > 1,
        "S20": limits.validates or subject.implementation is not None or bool(subject.ways),
        "S21": bool(sharding.meshes) or sharding.sequence,
        "S27": limits.batch_dims,
    }
    declared = _ALWAYS | {ALL_FEATURES[name].clause for name in subject.features}
    declared |= {clause for clause, holds in by_declaration.items() if holds}
    return [clause for clause in CLAUSES if clause in declared]


def dialect(semantics: Semantics) -> dict[str, str]:
    """Return the fields in which a dialect differs from the standard, with their values in words."""
    values = {each.name: getattr(semantics, each.name) for each in fields(Semantics)}
    return {
        name: ", ".join(sorted(value)) or "none" if isinstance(value, frozenset) else str(value)
        for name, value in values.items()
        if value != getattr(STANDARD, name)
    }


def distributions(subjects: Mapping[str, Subject]) -> dict[str, dict[str, str]]:
    """Return the distribution of each kernel that names one and its version, by the subject's name.

    The version is that of the environment in which the kernel runs; "" if it is not installed there.
    """
    return {
        name: {"name": subject.distribution, "version": _version_of(subject)}
        for name, subject in subjects.items()
        if subject.distribution
    }


def _version_of(subject: Subject) -> str:
    return installed_version(subject.distribution) or "" if subject.version is None else subject.version()
