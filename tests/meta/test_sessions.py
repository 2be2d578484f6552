"""What the nox sessions install and run, seen without installing or running it."""

import importlib.util
import re
import tomllib
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.meta.processes import ROOT

pytest.importorskip("nox")

from nox.command import CommandFailed

from attest.conformance.running.gate import runnable_subjects
from attest.conformance.running.plan import load_profile, tasks
from attest.conformance.running.runner import in_shard
from attest.conformance.subject import find

# What users install of ours, by the name that the session gives it.
ENVIRONMENTS = ("core", "suite", "triton", "store", "cluster")


class Session:
    """A session of nox that notes what it is asked to install and to run."""

    def __init__(self) -> None:
        self.installed: list[tuple[str, ...]] = []
        self.commands: list[tuple[str, ...]] = []
        self.env: dict[str, str] = {}
        self.posargs: list[str] = []
        self.virtualenv = SimpleNamespace(location="venv")

    def install(self, *arguments: str) -> None:
        self.installed.append(arguments)

    def run(self, *arguments: str, **options: Any) -> None:
        self.commands.append(arguments)


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    spec = importlib.util.spec_from_file_location("noxfile", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def noted(run: Callable[..., None], *arguments: str) -> Session:
    session = Session()
    run(session, *arguments)
    return session


def test_main_gates_every_subject_of_the_gate_whole_or_in_part(noxfile: ModuleType) -> None:
    patterns = (*noxfile._GATED_WHOLE, *noxfile._GATED_IN_PART)
    assert runnable_subjects("cpu", patterns).subjects.keys() == runnable_subjects("cpu").subjects.keys()


@pytest.mark.parametrize(
    ("subject", "call"),
    [
        ("xla.attention", "*_subjects(_GATED_IN_PART)"),
        ("xla.pieces", "*_subjects(_GATED_IN_PART)"),
        ("triton.interpret", "_gate_triton_interpret(session"),
        ("pallas.tpu_interpret", "_gate_pallas_tpu_interpret(session"),
        ("ring.xla", "_gate_ring(session, _RINGS_ON_MAIN"),
    ],
)
def test_the_part_of_a_gate_on_main_has_cases(subject: str, call: str) -> None:
    """Which cases are in a shard follows from what they are: it may be none."""
    source = (ROOT / "noxfile.py").read_text()
    (found,) = re.findall(rf'{re.escape(call)}, "--shard", "(\d+)/(\d+)"', source)
    shard = int(found[0]), int(found[1])
    planned = tasks(find(subject), load_profile("quick"), 0)
    differentiated = (task for task in planned if "gradients" in task.checks)
    here = (task for task in differentiated if in_shard(subject, task, shard))
    assert len(list(islice(here, 3))) == 3


@pytest.mark.found_outside
def test_versions_installs_each_requirement_but_jax(noxfile: ModuleType) -> None:
    session = noted(noxfile.versions.func, "0.8.0")
    installed = {Requirement(each).name: str(Requirement(each).specifier) for each in session.installed[0]}
    project = noxfile.nox.project.load_toml(ROOT / "pyproject.toml")["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["suite"]]
    assert {*installed} == {Requirement(each).name for each in needed}
    assert (installed["jax"], installed["jaxlib"]) == ("==0.8.0", "==0.8.0")


@pytest.mark.found_outside
@pytest.mark.parametrize("installed", ENVIRONMENTS)
def test_minimums_installs_what_users_do_with_the_lowest_jax(installed: str, noxfile: ModuleType) -> None:
    session = noted(noxfile.minimums.func, installed)
    extras = {"core": ".", "suite": ".[suite]"}.get(installed, f".[suite,{installed}]")
    lowest = "jax==0.11.2" if installed == "triton" else "jax==0.6.1"
    for arguments in session.installed:
        assert {"--resolution", "lowest-direct", lowest, "--editable", extras} <= {*arguments}
    # Before anything is installed that users do not have.
    assert session.commands[0][-1] == "tests.core_alone"
    assert set(session.installed[0]) == {"--resolution", "lowest-direct", lowest, "--editable", extras}
    assert (len(session.installed) == 1) == (installed == "core")


class SkippedError(Exception):
    """Raised where nox skips a session."""


class Browsing(Session):
    """A session that may be skipped, and installs from the lock file."""

    def skip(self, reason: str) -> None:
        raise SkippedError(reason)

    def run_install(self, *arguments: str, **options: Any) -> None:
        self.installed.append(arguments)


@pytest.mark.parametrize("missing", ["chromium", "npm"])
def test_browser_is_skipped_without_a_browser(
    missing: str, noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: None if missing in name else f"/usr/bin/{name}")
    monkeypatch.setattr(noxfile, "_CHROMIUM", ("chromium", "chromium-browser"))
    with pytest.raises(SkippedError, match="apt-get install chromium npm"):
        noxfile.browser.func(Browsing())


def test_browser_runs_the_browser_that_is_here_with_the_pinned_axe(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"google-chrome": "/opt/chrome", "npm": "/usr/bin/npm"}
    unpacked: list[str] = []
    monkeypatch.setattr(noxfile.shutil, "which", here.get)
    monkeypatch.setattr(noxfile.shutil, "unpack_archive", lambda file, folder: unpacked.append(file))
    session = Browsing()
    noxfile.browser.func(session)
    assert "--group=browser" in session.installed[0]
    pinned = tomllib.loads((ROOT / "tests" / "browser" / "browser.toml").read_text())["axe"]["version"]
    assert f"axe-core@{pinned}" in session.commands[0]
    assert unpacked == [f"venv/axe-core-{pinned}.tgz"]
    assert session.env["ATTEST_CHROMIUM"] == "/opt/chrome"
    suites = ("tests/browser/matrix_suite.py", "tests/browser/report_suite.py")
    assert session.commands[1:] == [("pytest", *suites)]
    refreshing = Browsing()
    refreshing.posargs = ["--refresh"]
    noxfile.browser.func(refreshing)
    assert refreshing.commands == [("python", "-m", "tests.browser.screenshots")]


class Judging(Browsing):
    """A session in which two peers are listed, and the checks of some peers fail."""

    def __init__(self, *posargs: str, failing: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.posargs = [*posargs]
        self.failing = failing
        self.notified: list[str] = []

    def run(self, *arguments: str, **options: Any) -> str:
        super().run(*arguments)
        if arguments[2] in self.failing:
            raise CommandFailed
        return "peers.a:A\npeers.b:B\n"

    def notify(self, name: str, posargs: object) -> None:
        self.notified.append(name)

    def error(self, sentence: str) -> None:
        raise SkippedError(sentence)


@pytest.mark.parametrize("posargs", [(), ("tokamax", "-k", "causal")])
def test_peer_tests_installs_a_suite_and_runs_it(posargs: tuple[str, ...], noxfile: ModuleType) -> None:
    session = Judging(*posargs)
    noxfile.peer_tests.func(session, "tokamax")
    assert "tokamax==0.0.17" in session.installed[0]
    assert session.commands == [("python", "-m", "tests.peer_suites", "tokamax", *posargs[1:])]


def test_peer_tests_runs_only_the_suites_that_are_named(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile, "_PEER_SUITES", {"tokamax": {}, "another": {}})
    session = Judging("another")
    with pytest.raises(SkippedError, match="the suites asked for are another"):
        noxfile.peer_tests.func(session, "tokamax")
    assert session.installed == session.commands == []


def test_the_night_runs_every_suite_of_a_peer(noxfile: ModuleType) -> None:
    session = Judging()
    noxfile.nightly.func(session)
    suites = {f"peer-tests({name})" for name in noxfile._PEER_SUITES}
    assert suites
    assert suites <= {*session.notified}


def test_gate_peers_judges_each_peer_that_is_listed(noxfile: ModuleType) -> None:
    session = Judging("--shard", "1/2")
    noxfile.gate_peers.func(session)
    assert "--group=peers" in session.installed[0]
    listing, *checks = session.commands
    assert listing == ("python", "-m", "attest.conformance.peers")
    assert [each[:3] for each in checks] == [("attest", "check", name) for name in ("peers.a:A", "peers.b:B")]
    assert all(each[-2:] == ("--shard", "1/2") for each in checks)


def test_gate_peers_names_those_that_fail_after_all_are_judged(noxfile: ModuleType) -> None:
    session = Judging(failing=("peers.a:A",))
    with pytest.raises(SkippedError, match=r"^failed: peers\.a:A$"):
        noxfile.gate_peers.func(session)
    assert [each[2] for each in session.commands[1:]] == ["peers.a:A", "peers.b:B"]


def test_gate_peers_lists_the_peers(noxfile: ModuleType) -> None:
    session = Judging("--list")
    noxfile.gate_peers.func(session)
    assert session.commands == [("python", "-m", "attest.conformance.peers", "--list")]


def test_minimums_has_each_extra(noxfile: ModuleType) -> None:
    extras = noxfile.nox.project.load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    assert set(ENVIRONMENTS) == {"core", *extras} == set(noxfile._INSTALLED)


def test_the_tests_that_minimums_names_exist(noxfile: ModuleType) -> None:
    named = (*noxfile._TESTS_OF_THE_SUITE, *noxfile._TESTS_OF_TRITON)
    assert [name for name in named if not (ROOT / name).exists()] == []


# About what a terminal or a page of a forge shows first.
FIRST_SCREEN = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])


def minutes(session: str) -> int:
    """What the README says that a session takes on two cores, beside its command."""
    found = re.search(rf"^uvx nox -s {session} +# .*: (\d+) minutes on two cores$", FIRST_SCREEN, re.M)
    assert found is not None, session
    return int(found[1])


@pytest.mark.found_outside
def test_the_first_screen_of_readme_has_two_commands_with_their_times(noxfile: ModuleType) -> None:
    steps = [
        "pip install uv ",
        "git clone URL attest && cd attest\n",
        "uvx nox -s gate ",
        "uvx nox -s tests ",
    ]
    places = [FIRST_SCREEN.find(f"\n{step}") for step in steps]
    assert -1 < places[0] < places[1] < places[2] < places[3]
    assert minutes("gate") < minutes("tests")
    page = (ROOT / "docs" / "reference" / "what-runs-when.md").read_text()
    assert f"It takes {minutes('tests')} minutes on two cores." in page
    assert callable(noxfile.gate)
    assert callable(noxfile.tests)


@pytest.mark.found_outside
def test_a_bare_checkout_is_tested_by_the_command_of_readme() -> None:
    *_, last = (ROOT / ".ci" / "run").read_text().splitlines()
    # uvx is short for uv tool run.
    assert last.replace("python3 -m uv tool run", "uvx") == "exec uvx nox -s tests"
    assert "\nuvx nox -s tests " in FIRST_SCREEN


@pytest.mark.found_outside
def test_readme_installs_pytest_for_a_test_of_one_s_own() -> None:
    assert '`pip install ".[suite]" pytest`' in FIRST_SCREEN


def test_matrix_makes_a_record_of_each_subject_and_then_the_matrix(
    noxfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Written(Session):
        def run(self, *arguments: str, **options: Any) -> str:
            super().run(*arguments, **options)
            if "--json" in arguments and arguments[1] == "check":
                Path(arguments[arguments.index("--json") + 1]).touch()
                assert options["success_codes"] == [0, 1]
            return "attest.conformance.peers.some:KERNEL"

        def run_install(self, *arguments: str, **options: Any) -> None:
            self.installed.append(arguments)

    session = Written()
    session.virtualenv.location = str(tmp_path)
    (tmp_path / "kept").mkdir()
    monkeypatch.setattr(noxfile, "_RECORDS_OF_MATRIX", tmp_path / "kept")
    noxfile.matrix.func(session)
    written = {path.name for path in (tmp_path / "kept").iterdir()}
    assert {"some.kernel.jsonl.gz", "xla.attention.jsonl.gz", "ring.xla.jsonl.gz"} <= written
    assert session.commands[-1][:2] == ("attest", "matrix")
    assert "--group=peers" in session.installed[0]
