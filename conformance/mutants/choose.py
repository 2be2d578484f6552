"""The choice of mutants to score, by group, class and name."""

from collections.abc import Sequence

from attest.conformance.mutants.catalogue import GROUPS, Mutant, everything, load
from attest.conformance.text import nearest


def of_class_alone(defect_class: str) -> list[Mutant]:
    """Return the defects of a class of the clean kernel. Raises ValueError if there are none."""
    every = load("clean_kernel").values()
    found = [mutant for mutant in every if mutant.defect_class == defect_class]
    if not found:
        known = ", ".join(sorted({mutant.defect_class for mutant in every}))
        raise ValueError(f"--ablate: got {defect_class!r}, expected a class of clean_kernel: {known}")
    return found


def chosen(groups: Sequence[str], classes: Sequence[str], names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of groups and classes, or those of some names, whatever their group.

    Raises ValueError for a group, class or name that does not exist.
    """
    every = everything()
    for name in names:
        if name not in every:
            advice = nearest(name, every, "--json PATH lists those that were scored")
            raise ValueError(f"--only: no mutant is called {name!r}: {advice}")
    for group in groups:
        if group not in GROUPS:
            raise ValueError(f"--group: got {group!r}, expected {', '.join(GROUPS)}")
    known = sorted({mutant.defect_class for mutant in every.values()})
    for wanted in classes:
        if wanted not in known:
            raise ValueError(f"--class: got {wanted!r}, expected one of {', '.join(known)}")
    found = [every[name] for name in names] or [m for group in groups for m in load(group).values()]
    return [mutant for mutant in found if not classes or mutant.null or mutant.defect_class in classes]
