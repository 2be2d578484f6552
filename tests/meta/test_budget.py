"""What runs when: the parts of the nox session `tests` fit their budget, and a page lists what left it."""

import re
import tomllib
from typing import Any

from tests.meta.processes import ROOT, python

MINUTES = tomllib.loads((ROOT / "tests" / "budget.toml").read_text())["minutes"]
MOVED = tomllib.loads((ROOT / "tests" / "nightly.toml").read_text())["moved"]
PAGE = (ROOT / "docs" / "reference" / "what-runs-when.md").read_text()
# What a change may wait for: 20 minutes of two cores.
TOTAL = 40


def test_the_parts_fit_the_whole() -> None:
    assert sum(MINUTES.values()) <= TOTAL
    assert min(MINUTES.values()) > 0


def test_the_parts_are_those_of_the_session() -> None:
    parts = re.findall(r'_part\(session, "([^"]+)"\)', (ROOT / "noxfile.py").read_text())
    assert parts == list(MINUTES)


def row(group: dict[str, Any]) -> str:
    """A group of moved tests in the table of the page: the tests by name, and what guards main."""
    names = dict.fromkeys(pattern.partition("[")[0].rstrip("*").rstrip(":") for pattern in group["tests"])
    shown = ", ".join(f"`{name.replace('::', '`: `')}`" for name in names)
    where = "in processes of their own: " if group.get("in_processes") else ""
    return f"| {where}{shown} | {group['guard']} |"


def test_the_page_lists_what_left_main_and_what_guards_it() -> None:
    table = "\n".join(["| tests | what guards `main` |", "|---|---|", *map(row, MOVED)])
    assert PAGE.endswith(f"\n\n{table}\n"), table


def test_the_page_names_the_parts() -> None:
    assert re.findall(r"^\| ([a-z ]+) \|", PAGE.partition("## At night")[0], re.M)[1:] == list(MINUTES)


def test_of_a_file_those_in_processes_move_but_for_the_ones_that_stay() -> None:
    file = "tests/kernels/ring/test_ring_page.py"
    done = python(
        ROOT, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", file, HYPOTHESIS_PROFILE="ci"
    )
    found = set(re.findall(rf"^{file}::(\w+)", done.stdout, re.M))
    assert {"test_the_table_has_every_strategy", "test_the_page_runs_on_eight_devices"} <= found
    assert "test_a_program_sends_the_bytes_of_the_page" not in found


def test_of_a_function_each_so_many_parameters_stay() -> None:
    file, function = "tests/kernels/call/test_integers.py", "test_arguments_of_functions"
    (group,) = (each for each in MOVED if f"{file}::{function}*" in each["tests"])

    def collected(*options: str) -> list[str]:
        asked = ("--collect-only", "-q", *options)
        done = python(ROOT, "-m", "pytest", "-p", "no:cacheprovider", *asked, HYPOTHESIS_PROFILE="ci")
        return re.findall(rf"^{file}::({function}.*)$", done.stdout, re.M)

    every = collected(file, "-m", "")
    assert collected(file) == every[:: group["every"]]
    assert collected(f"{file}::{every[1]}") == [every[1]]
