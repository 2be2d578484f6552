"""The catalogue: every mutant can be planted, names a class and a clause, and is loud where it is not."""

import tomllib

import pytest

from attest.conformance.cases.features import ALL_FEATURES
from attest.conformance.checks import all_checks
from attest.conformance.clauses import CLAUSES
from attest.conformance.drawing.corpus import load_corpus
from attest.conformance.mutants import catalogue
from attest.conformance.mutants.catalogue import Edit, Mutant, everything, load, planted_text, source_of
from attest.conformance.mutants.choose import chosen
from attest.conformance.mutants.kernels.variants import VARIANTS
from attest.conformance.subject import discover
from tests.meta.processes import ROOT

GROUPS = ROOT / "conformance" / "mutants" / "groups"
WORDS = tomllib.loads((GROUPS / "classes.toml").read_text())
EVERY = everything()


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_mutant_names_what_exists(name):
    mutant = EVERY[name]
    assert mutant.change.strip() == mutant.change != ""
    assert mutant.defect_class in WORDS["classes"]
    assert mutant.stage in WORDS["stages"]
    assert mutant.null or mutant.clause in CLAUSES
    assert {*mutant.needs, *mutant.near, *mutant.lacks} <= set(ALL_FEATURES)
    assert mutant.variant in {variant.name for variant in VARIANTS}
    if mutant.group == "kernels":
        assert mutant.subject in discover()
        assert mutant.check in all_checks()
        assert bool(mutant.case) != bool(mutant.feature)


@pytest.mark.parametrize("name", sorted(EVERY))
def test_every_edit_changes_its_file(name):
    mutant = EVERY[name]
    assert mutant.edits or mutant.variant != "plain" or name == "nothing"
    plain = Mutant(change="", group=mutant.group)
    for file in {edit.file for edit in mutant.edits}:
        assert source_of(mutant, file) != source_of(plain, file)


def test_no_two_mutants_are_alike():
    edits = [(mutant.variant, mutant.edits) for mutant in EVERY.values()]
    assert len(set(edits)) == len(edits)
    changes = [(mutant.group, mutant.subject, mutant.change) for mutant in EVERY.values()]
    assert len(set(changes)) == len(changes)


@pytest.mark.parametrize("text", ["a = 1\n", "a = 2\nb = 2\na = 2\n"])
def test_a_target_that_has_gone_or_occurs_twice_is_loud(text):
    mutant = Mutant(name="one", change="", edits=(Edit("file.py", "a = 2", "a = 3"),))
    with pytest.raises(ValueError, match=r"^one: 'a = 2' occurs \d times in file.py, not once"):
        planted_text(text, "file.py", mutant)
    assert planted_text(text, "other.py", mutant) == text


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('change = "x"\nclas = "mask"', "nulls.toml, one: unknown keys clas"),
        ("change = 3", "nulls.toml, one, change: expected `str`, got `int`"),
        ('class = "mask"', "nulls.toml, one: object missing required field `change`"),
    ],
)
def test_a_broken_entry_is_named(monkeypatch, tmp_path, table, message):
    (tmp_path / "nulls.toml").write_text(f"[one]\n{table}\n")
    monkeypatch.setattr(catalogue, "_FOLDER", tmp_path)
    load.cache_clear()
    try:
        with pytest.raises(ValueError, match=message):
            load("nulls")
    finally:
        load.cache_clear()


def test_mutants_are_chosen_by_group_class_and_name():
    groups = ("clean_kernel", "nulls")
    assert {mutant.group for mutant in chosen(groups, (), ())} == {*groups}
    of_class = chosen(groups, ("sinks",), ())
    assert {mutant.defect_class for mutant in of_class if not mutant.null} == {"sinks"}
    assert [mutant.name for mutant in chosen(("nulls",), (), ("causal_top_left",))] == ["causal_top_left"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("kernel",), (), ()), "--group: got 'kernel', expected clean_kernel, nulls, kernels, judges"),
        ((("nulls",), ("sink",), ()), "--class: got 'sink', expected one of "),
        (
            (("nulls",), (), ("causal_topleft",)),
            "--only: no mutant is called 'causal_topleft': did you mean ",
        ),
    ],
)
def test_an_unknown_choice_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        chosen(*arguments)


def made_for():
    """Yield each class of sizes, row, listed case and known bug with the defects in its `because`."""
    tables = tomllib.loads((ROOT / "conformance" / "drawing" / "drawing.toml").read_text())
    yield from tables["because"].items()
    for kind in ("together", "edges"):
        for number, table in enumerate(tables[kind]):
            yield f"{kind} {number}", table.get("because", ())
    for entry in load_corpus():
        yield entry.name, entry.because


@pytest.mark.parametrize(("what", "because"), [*made_for()])
def test_what_was_made_for_defects_names_some_of_the_clean_kernel(what, because):
    assert set(because) <= load("clean_kernel").keys()
