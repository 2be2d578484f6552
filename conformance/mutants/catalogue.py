"""The catalogue of mutants: correct kernels with one planted defect each, and correct rewrites, as data.

Each TOML file of the folder `groups` is a group. An edit names a file of this package and a text that the
file holds exactly once, so that a kernel that has changed makes its mutants fail to load, and is never scored
without the defect.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from attest.conformance.typed import convert, decode_toml

_FOLDER = Path(__file__).with_name("groups")
_PACKAGE = Path(__file__).parents[2]
_CLEAN = "conformance/mutants/kernels"

# Each group with the folder, relative to the package, that the files of its edits are named from.
GROUPS: Mapping[str, str] = {"clean_kernel": _CLEAN, "nulls": _CLEAN, "kernels": "", "judges": ""}


@dataclass(frozen=True)
class Edit:
    """One edit of a file: the text as it is, which occurs once, and the text with the defect."""

    file: str
    correct: str
    planted: str


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One entry of the catalogue.

    name, group: its table and the file of it.
    change: what is wrong, in a sentence. source: the real bug that it is modelled on.
    defect_class, stage: of which kind it is, and where in the computation. clause: that it breaks.
    needs: features all of which it takes to change an answer. near: features of the cases to judge first.
    beyond: the size from which on it changes an answer, in words, if there is one.

    Of the clean kernel. lacks: features that the mutant does not declare. variant: of
    kernels/variants.py. compiled: whether it runs as JAX, because the defect lies there, and not in NumPy.
    quick: whether the quick profile must find it, too.

    Of the kernels of this package. subject: that is judged. check: that must find it. feature, tokens: the
    search that finds it, and the largest simplest case, queries and keys added. case, message: or one case,
    and the beginning of its message.

    Of what judges. test: the file of the project's tests that must notice it.
    """

    name: str = ""
    group: str = ""
    change: str
    defect_class: str = ""
    stage: str = ""
    clause: str = ""
    source: str = ""
    needs: tuple[str, ...] = ()
    near: tuple[str, ...] = ()
    beyond: str = ""
    edits: tuple[Edit, ...] = ()
    lacks: tuple[str, ...] = ()
    variant: str = "plain"
    compiled: bool = False
    quick: bool = False
    subject: str = ""
    check: str = ""
    feature: str = ""
    tokens: int = 0
    case: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)
    message: str = ""
    test: str = ""

    @property
    def null(self) -> bool:
        """Whether the edit is correct."""
        return self.group == "nulls"


@cache
def load(group: str) -> Mapping[str, Mutant]:
    """Return the mutants of a group by name. Raises ValueError that names the entry at fault."""
    path = _FOLDER / f"{group}.toml"
    tables = decode_toml(path.read_bytes(), path.name)
    return {name: _mutant(name, group, table, f"{path.name}, {name}") for name, table in tables.items()}


def _mutant(name: str, group: str, table: dict[str, Any], where: str) -> Mutant:
    given = {("defect_class" if key == "class" else key): value for key, value in table.items()}
    unknown = given.keys() - {each.name for each in fields(Mutant)}
    if unknown:
        raise ValueError(f"{where}: unknown keys {', '.join(sorted(unknown))}")
    return convert({**given, "name": name, "group": group}, Mutant, where)


def everything() -> Mapping[str, Mutant]:
    """Return the mutants of all groups by name. Raises ValueError if two have one name."""
    found: dict[str, Mutant] = {}
    for group in GROUPS:
        twice = found.keys() & load(group).keys()
        if twice:
            raise ValueError(f"two mutants are called {', '.join(sorted(twice))}")
        found |= load(group)
    return found


def of_class(defect_class: str) -> frozenset[str]:
    """Return the names of the defects of a class."""
    return frozenset(name for name, mutant in everything().items() if mutant.defect_class == defect_class)


def digest(group: str) -> str:
    """Return the first digits of a hash of a group: what two scores must share to be compared."""
    return hashlib.sha256((_FOLDER / f"{group}.toml").read_bytes()).hexdigest()[:12]


def home(mutant: Mutant) -> Path:
    """Return the folder, relative to the package, that the files of the mutant's edits are named from."""
    return Path(GROUPS[mutant.group])


def planted_text(text: str, file: str, mutant: Mutant) -> str:
    """Return the text of a file with the mutant's edits of it. Raises ValueError if an edit does not fit."""
    for edit in mutant.edits:
        if edit.file == file:
            if text.count(edit.correct) != 1:
                raise ValueError(
                    f"{mutant.name}: {edit.correct!r} occurs {text.count(edit.correct)} times in {file}, not"
                    " once: the kernel has changed, plant the defect anew"
                )
            text = text.replace(edit.correct, edit.planted)
    return text


def source_of(mutant: Mutant, file: str) -> str:
    """Return a file of this package with the mutant's edits. Raises ValueError if an edit does not fit."""
    path = _PACKAGE / home(mutant) / file
    return planted_text(path.read_text(encoding="utf-8"), file, mutant)
