"""The environments in which the project is checked; `uvx nox -l` lists them."""

import ctypes
import os
import re
import resource
import shutil
import sys
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nox
from nox.command import CommandFailed
from packaging.requirements import Requirement
from packaging.version import Version

nox.options.default_venv_backend = "uv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests"]

# What pyright checks.
_PACKAGES = ("attest", "reference", "kernels", "conformance", "reports", "benchmarks")

# With libtpu and the plugin for CUDA installed, to compile by, JAX would look for a TPU and for NVIDIA's
# libraries, and say at length that there are none.
_PLATFORMS = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}

# Where the environment forbids bytecode, each of the many processes would compile JAX and the project again.
_BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}

# For the tests, where compiling takes longer than running; the gates judge programs as XLA optimizes them.
_COMPILE_QUICKLY = {
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip(),
    # The same examples in every run, so that a change is red only for what it changed.
    "HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", "ci"),
}

# What the session versions judges. On a red version of JAX the compiler is at fault, see
# docs/reference/jax-versions.md.
_JAX = ("0.6.1", "0.8.0", "0.10.2", "0.11.0", "0.12.0.1")
_RED_JAX = ("0.11.0",)
# How `python -m tests.jax_versions` ends: see there.
_GREEN, _RED = 0, 1

# What a user installs, each on the lowest versions that pyproject.toml allows: the extras.
_INSTALLED = {
    "core": "",
    "suite": "[suite]",
    "triton": "[suite,triton]",
    "store": "[suite,store]",
    "cluster": "[suite,cluster]",
}
_TESTS_OF_EXTRAS = {"store": ("tests/conformance/store",), "cluster": ("tests/cluster",)}
# The tests that need neither Triton nor the newest JAX, in a few minutes.
_TESTS_OF_THE_SUITE = (
    "tests/adapters/test_flash_attention.py",
    "tests/conformance/cases",
    "tests/conformance/cli/test_outputs.py",
    "tests/conformance/cli/test_usage.py",
    "tests/conformance/judging",
    "tests/conformance/running/test_judge.py",
    "tests/kernels/xla/test_features.py",
    "tests/reports/test_compare.py",
    "tests/reports/test_html.py",
    "tests/reports/test_junit.py",
    "tests/reports/test_markdown.py",
    "tests/reports/test_terminal.py",
)
# The tests of the Triton kernels, and of the adapters of the libraries in the group `adapters`.
_TESTS_OF_TRITON = (
    "tests/adapters/test_equinox.py",
    "tests/adapters/test_flax_linen.py",
    "tests/adapters/test_flax_nnx.py",
    "tests/kernels/triton/test_blocks.py",
    "tests/kernels/triton/test_launch.py",
    "tests/kernels/triton/test_spec.py",
)

# Of prctl(2), and how long a process that was adopted may take to end.
_SET_CHILD_SUBREAPER = 36
_SECONDS_TO_END = 10

_MKDOCS = {"NO_MKDOCS_2_WARNING": "1"}

# The names of the browser, by distribution.
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

# A CPU of eight devices.
_EIGHT_DEVICES = {
    # Eight for each device: the launches of a pass wait in threads of XLA's.
    "PJRT_NPROC": "64",
    # First, since XLA reads none after a word that is no flag.
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}".strip(),
}
# One process judges operations on every kernel: in both interpreters, and over several devices of a CPU.
_OPERATIONS_ON = {"TRITON_INTERPRET": "1", **_EIGHT_DEVICES}
# Every operation with a configuration; what guards main beside `attest gate`, which judges those of XLA.
_OPERATIONS = ("operation.*.explicit", "operation.*.tuned", "operation.*.sharded")
_OPERATIONS_ON_MAIN = ("operation.triton.*", "operation.pallas.*.explicit", "operation.*.sharded")
# What `attest gate` judges on a CPU: whole on main, or a part of the cases.
_GATED_WHOLE = ("auto", "easydel.*", "jax.nn.*", "operation.*", "xla.flash_attention")
_GATED_IN_PART = ("xla.attention", "xla.pieces")
# Ring attention on CPUs; what guards main leaves out the operation, which calls the same function.
_RINGS_ON_MAIN = ("ring.xla", "ring.xla.inside")
_RINGS = (*_RINGS_ON_MAIN, "operation.ring_attention")

# The test suites of other projects, each with what to install for it.
_PEER_SUITES = tomllib.loads((Path(__file__).parent / "tests/peer_suites/suites.toml").read_text())

# The subjects of the matrix beside the peers of `gate-peers`, with the variables that their processes need.
_IN_MATRIX: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("jax.nn.dot_product_attention", "xla.flash_attention", "xla.attention", "xla.pieces"), {}),
    (("auto", "operation.attention", "operation.flash_attention", "easydel.flash_attn2"), {}),
    (("triton.interpret",), {"TRITON_INTERPRET": "1"}),
    (("pallas.tpu_interpret",), {"PJRT_NPROC": "8"}),
    (("ring.xla",), _EIGHT_DEVICES),
)
_RECORDS_OF_MATRIX = Path("reports/data/matrix")

# Interpreted kernels are slow, and so are some versions of JAX: on a busy machine a case takes minutes.
_PATIENTLY = ("--timeout", "900")


@nox.session
def tests(session: nox.Session) -> None:
    """Run what guards main: lint, types, pages, gates, the compile matrix, and the test suite at the end."""
    _install(session, "test", "lint", "types", "docs", "adapters", "hopper", "tpu")
    session.env.update(_PLATFORMS | _BYTECODE)
    with _part(session, "lint and types"):
        _lint(session)
        _types(session)
    with _part(session, "pages"):
        _docs(session)
    with _part(session, "gates"), _adopting():
        session.run("attest", "gate", *_subjects(_GATED_WHOLE))
        # Sessions of their own run all cases.
        session.run("attest", "gate", *_subjects(_GATED_IN_PART), "--shard", "1/6")
        _gate_triton_interpret(session, "--shard", "1/6")
        _gate_pallas_tpu_interpret(session, "--shard", "6/8")
        _gate_operations(session, _OPERATIONS_ON_MAIN)
        _gate_ring(session, _RINGS_ON_MAIN, "--shard", "1/4")
    with _part(session, "compile matrix"), _adopting():
        session.run("attest", "compile")
    with _part(session, "test suite"):
        session.run("pytest", "-n", "auto", "--cov", *session.posargs, env=_COMPILE_QUICKLY)


@nox.session
def gate(session: nox.Session) -> None:
    """Judge every kernel that this machine can run, by the quick profile: the main job."""
    _install(session)
    session.run("attest", "gate", *session.posargs)


@nox.session(name="gate-triton-interpret")
def gate_triton_interpret(session: nox.Session) -> None:
    """Judge the Triton kernels in Triton's interpreter, which needs no GPU."""
    _install(session)
    _gate_triton_interpret(session, *session.posargs)


@nox.session(name="gate-pallas-tpu-interpret")
def gate_pallas_tpu_interpret(session: nox.Session) -> None:
    """Judge the TPU kernels in Pallas's interpreter, which needs no TPU."""
    _install(session)
    _gate_pallas_tpu_interpret(session, *session.posargs)


@nox.session(name="gate-operations")
def gate_operations(session: nox.Session) -> None:
    """Judge operations with explicit and tuned configurations, and over devices, on every kernel."""
    _install(session)
    _gate_operations(session, _OPERATIONS, "--profile", "standard", *session.posargs)


@nox.session(name="gate-ring")
def gate_ring(session: nox.Session) -> None:
    """Judge ring attention, whose sequence is spread over up to eight devices of a CPU."""
    _install(session)
    _gate_ring(session, _RINGS, "--profile", "standard", *session.posargs)


@nox.session(name="gate-peers", default=False)
def gate_peers(session: nox.Session) -> None:
    """Judge kernels of other projects that a CPU can run, by the quick profile; `-- --list` names them."""
    _install(session, "peers")
    session.env.update(_PLATFORMS)
    listing = ("python", "-m", "attest.conformance.peers")
    if "--list" in session.posargs:
        session.run(*listing, "--list")
        return
    failed: list[str] = []
    for name in str(session.run(*listing, silent=True)).split():
        try:
            session.run("attest", "check", name, *_PATIENTLY, *session.posargs)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Make the records of the conformance matrix, in hours, and from them its JSON and its page."""
    _install(session, "peers")
    session.env.update(_PLATFORMS)
    peers = str(session.run("python", "-m", "attest.conformance.peers", silent=True)).split()
    asked = [(name, env) for names, env in _IN_MATRIX for name in names] + [(name, {}) for name in peers]
    # Beside the environment: in the checkout, they would be changes of the commit that the next record names.
    folder = Path(session.virtualenv.location).absolute() / "matrix"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, env in asked:
        file = folder / f"{name.removeprefix('attest.conformance.peers.').replace(':', '.').lower()}.jsonl.gz"
        options = ("--profile", "quick", "--seed", "0", "--json", str(file), *_PATIENTLY, *session.posargs)
        # What fails is what the matrix shows.
        session.run("attest", "check", name, *options, env=env, success_codes=[0, 1])
    for file in folder.glob("*.jsonl.gz"):
        shutil.copy(file, _RECORDS_OF_MATRIX)
    session.run("attest", "matrix", "--json", "docs/matrix.json", "--html", "docs/matrix.html")


@nox.session(name="compile")
def compile_matrix(session: nox.Session) -> None:
    """Compile every kernel for every GPU and TPU that we support, none of which need be here."""
    _install(session, "hopper", "tpu")
    session.run("attest", "compile", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check rules and format by ruff, imports by import-linter, workflows by actionlint and zizmor."""
    _install(session, "lint")
    _lint(session)


@nox.session
def types(session: nox.Session) -> None:
    """Check types by pyright, strict on our packages."""
    _install(session, "types", "adapters")
    _types(session)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages; a link that leads nowhere fails."""
    _install(session, "docs")
    _docs(session, *session.posargs)


@nox.session(default=False)
def benchmarks(session: nox.Session) -> None:
    """Measure speed and memory beside jax.nn, in one run, against benchmarks/targets.toml."""
    _install(session)
    with TemporaryDirectory() as out:
        session.run("python", "-m", "benchmarks.cpu", "--out", out, *session.posargs)


@nox.session(default=False)
def alarms(session: nox.Session) -> None:
    """Count false alarms of correct kernels over fresh seeds; `-- --seconds 540` runs longer."""
    _install(session)
    options = ["--profile", "quick", "--seconds", "180", "--out", f"{session.create_tmp()}/alarms.jsonl"]
    session.run("python", "-m", "tests.alarms.run", *options, *session.posargs)


@nox.session(default=False)
def nightly(session: nox.Session) -> None:
    """Run the tests of tests/nightly.toml, properties with many examples, then other gates, each night."""
    _install(session, "test", "adapters", "hopper", "tpu")
    session.env.update(_PLATFORMS)
    session.run("pytest", "-m", "nightly", "-n", "auto", *session.posargs, env=_COMPILE_QUICKLY)
    many = {**_COMPILE_QUICKLY, "HYPOTHESIS_PROFILE": "nightly"}
    session.run("pytest", "-m", "hypothesis", "-n", "auto", *session.posargs, env=many)
    for other in ("", "-triton-interpret", "-pallas-tpu-interpret", "-operations", "-ring", "-peers"):
        session.notify(f"gate{other}", posargs=())
    for suite in _PEER_SUITES:
        session.notify(f"peer-tests({suite})", posargs=())


@nox.session(default=False)
def defects(session: nox.Session) -> None:
    """Plant each known defect in a clean kernel and see that the standard profile kills it, each night."""
    _install(session, "test")
    options = ["--profile", "standard", "--seed", "0", "1", "2", "--workers", str(os.cpu_count() or 1)]
    session.run("attest", "mutants", *options, *session.posargs)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Test the pages in headless Chromium by axe-core and screenshots; `-- --refresh` takes new ones."""
    chromium = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if chromium is None or shutil.which("npm") is None:
        session.skip("it needs Chromium and npm: apt-get install chromium npm")
    _install(session, "test", "browser")
    session.env.update({**_PLATFORMS, "ATTEST_CHROMIUM": str(chromium)})
    if "--refresh" in session.posargs:
        session.run("python", "-m", "tests.browser.screenshots")
        return
    version = tomllib.loads(Path("tests/browser/browser.toml").read_text())["axe"]["version"]
    folder = session.virtualenv.location
    session.run("npm", "pack", f"axe-core@{version}", "--silent", "--pack-destination", folder, external=True)
    shutil.unpack_archive(f"{folder}/axe-core-{version}.tgz", folder)
    session.env["ATTEST_AXE"] = f"{folder}/package/axe.min.js"
    session.run("pytest", *map(str, sorted(Path("tests/browser").glob("*_suite.py"))), *session.posargs)


@nox.session(name="peer-tests", default=False)
@nox.parametrize("suite", [nox.param(name, id=name) for name in _PEER_SUITES])
def peer_tests(session: nox.Session, suite: str) -> None:
    """Run tests of other projects, unmodified, on our adapters; `-- keras` runs one suite of them."""
    named = {*session.posargs} & {*_PEER_SUITES}
    if named and suite not in named:
        session.skip(f"the suites asked for are {', '.join(sorted(named))}")
    options = [each for each in session.posargs if each not in named]
    session.install("--editable", ".", "pytest>=8.4", *_PEER_SUITES[suite]["requirements"])
    # Not _COMPILE_QUICKLY: limits of these tests are for optimized programs.
    session.run("python", "-m", "tests.peer_suites", suite, *options, env=_PLATFORMS)


@nox.session(default=False)
@nox.parametrize("installed", list(_INSTALLED))
def minimums(session: nox.Session, installed: str) -> None:
    """Test what users install, on the lowest versions allowed: the core, the suite and each extra."""
    project = nox.project.load_toml()
    extras = _INSTALLED[installed]
    needed = [
        *project["project"]["dependencies"],
        *_extra(project, "triton" if installed == "triton" else ""),
    ]
    # The lowest version by name, so that nothing else that is installed can raise it.
    lowest = ("--resolution", "lowest-direct", f"jax=={_lowest('jax', needed)}")
    session.install(*lowest, "--editable", f".{extras}")
    session.env.update(_PLATFORMS)
    session.run("python", "-W", "error", "-m", "tests.core_alone")
    if installed == "core":
        return
    subject = "triton.interpret" if installed == "triton" else "xla.flash_attention"
    interpret = {"TRITON_INTERPRET": "1"} if installed == "triton" else {}
    session.run("attest", "check", subject, "--shard", "1/8", *_PATIENTLY, env=interpret)
    groups = ("test", "adapters") if installed == "triton" else ("test",)
    session.install(*lowest, "--editable", f".{extras}", *nox.project.dependency_groups(project, *groups))
    asked = {"triton": _TESTS_OF_TRITON, **_TESTS_OF_EXTRAS}.get(installed, _TESTS_OF_THE_SUITE)
    session.run("pytest", "-n", "auto", *asked, *session.posargs, env=_COMPILE_QUICKLY)


@nox.session(default=False)
@nox.parametrize("jax", _JAX)
def versions(session: nox.Session, jax: str) -> None:
    """Run the quick gate on a version of JAX, and write its row in docs/reference/jax-versions.md."""
    project = nox.project.load_toml()
    needed = [*project["project"]["dependencies"], *_extra(project, "suite")]
    # The project itself excludes the red versions.
    others = [each for each in needed if Requirement(each).name not in ("jax", "jaxlib")]
    session.install(f"jax=={jax}", f"jaxlib=={jax}", *others)
    session.install("--no-deps", "--editable", ".")
    # As users compile: at a lower optimization level, the fault of 0.11.0 does not show.
    session.env.update({**_PLATFORMS, "XLA_FLAGS": ""})
    records: list[str] = []
    for subject in ("xla.flash_attention", "xla.attention"):
        records.append(f"{session.virtualenv.location}/{subject}.json")
        # What is red is judged by the last command.
        options = ("--json", records[-1], *_PATIENTLY, *session.posargs)
        session.run("attest", "check", subject, *options, success_codes=[0, 1])
    expected = _RED if jax in _RED_JAX else _GREEN
    session.run("python", "-m", "tests.jax_versions", *records, success_codes=[expected])


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build wheel and sdist, and follow the README with each, installed alone; `-- --jax 0.6.2` picks one."""
    session.install("twine", "uv", "typer")
    session.run("python", "-m", "tests.release", *session.posargs, env=_PLATFORMS)


def _extra(project: Mapping[str, Any], name: str) -> list[str]:
    """Return the requirements of an extra that hold on this platform; "" is the core, which has no others."""
    extra = project["project"]["optional-dependencies"].get(name, [])
    return [each for each in extra if (marker := Requirement(each).marker) is None or marker.evaluate()]


def _lowest(name: str, requirements: Sequence[str]) -> str:
    """Return the lowest version of a package that all requirements allow."""
    found = [each for each in map(Requirement, requirements) if each.name == name]
    bounds = [Version(x.version) for each in found for x in each.specifier if x.operator == ">="]
    return str(max(bounds))


@contextmanager
def _part(session: nox.Session, name: str) -> Generator[None]:
    """Print the CPU minutes of a part of the session beside its budget."""
    budget = tomllib.loads(Path("tests/budget.toml").read_text())["minutes"][name]
    before = _cpu_seconds()
    try:
        yield
    finally:
        session.log(f"{name}: {(_cpu_seconds() - before) / 60:.1f} CPU minutes, budget {budget}")


@contextmanager
def _adopting() -> Generator[None]:
    """Wait for the fork servers of commands, for which nothing else does, so that their time counts.

    Not for the test suite, where some tests see whether a process has ended.
    """
    if sys.platform != "linux":
        yield
        return
    _adopt(True)
    try:
        yield
    finally:
        _adopt(False)
        deadline = time.monotonic() + _SECONDS_TO_END
        with suppress(ChildProcessError):  # none are left
            while time.monotonic() < deadline:
                ended, _ = os.waitpid(-1, os.WNOHANG)
                if not ended:
                    time.sleep(0.05)


def _adopt(whether: bool) -> None:
    """Let the system give this process the children of its descendants that end before them, or not."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _install(session: nox.Session, *groups: str) -> None:
    """Install the locked versions of the project and of some groups into the session's own environment."""
    session.run_install(
        "uv",
        "sync",
        "--locked",
        "--no-default-groups",
        "--all-extras",
        *(f"--group={group}" for group in groups),
        f"--python={session.virtualenv.location}",
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
        external=True,
    )


def _gate_triton_interpret(session: nox.Session, *options: str) -> None:
    # A process interprets kernels or it compiles them: `attest gate` cannot judge both.
    session.run("attest", "check", "triton.interpret", *_PATIENTLY, *options, env={"TRITON_INTERPRET": "1"})


def _gate_pallas_tpu_interpret(session: nox.Session, *options: str) -> None:
    # The interpreter waits in threads of XLA's, of which there are too few by default: see its module.
    session.run("attest", "check", "pallas.tpu_interpret", *_PATIENTLY, *options, env={"PJRT_NPROC": "8"})


def _subjects(patterns: Sequence[str]) -> list[str]:
    return [word for pattern in patterns for word in ("--subject", pattern)]


def _gate_operations(session: nox.Session, subjects: Sequence[str], *options: str) -> None:
    session.run(
        "attest", "gate", *_subjects(subjects), *_PATIENTLY, *options, env={**_PLATFORMS, **_OPERATIONS_ON}
    )


def _gate_ring(session: nox.Session, subjects: Sequence[str], *options: str) -> None:
    session.run(
        "attest", "gate", *_subjects(subjects), *_PATIENTLY, *options, env={**_PLATFORMS, **_EIGHT_DEVICES}
    )


def _lint(session: nox.Session) -> None:
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("lint-imports", "--no-cache", "--no-logo")
    workflows = [str(path) for path in sorted(Path(".github/workflows").glob("*.yml"))]
    session.run("actionlint", *workflows)
    session.run("zizmor", "--offline", "--quiet", ".github", "action.yml")


def _types(session: nox.Session) -> None:
    # Pyright follows no links, and says nothing of files that it has not seen.
    said = str(session.run("pyright", "--stats", silent=True))
    seen = re.search(r"Found (\d+) source files", said)
    files = [file for folder in _PACKAGES for file in Path(folder).rglob("*.py")]
    if seen is None or int(seen[1]) != len(files):
        session.error(f"pyright has seen {seen and seen[1]} of {len(files)} files: {said}")


def _docs(session: nox.Session, *options: str) -> None:
    # Beside the environment: create_tmp would put every later temporary file into the checkout.
    pages = f"{session.virtualenv.location}/pages"
    # Not --quiet: MkDocs then counts no warnings, and --strict finds nothing.
    session.run("mkdocs", "build", "--strict", "--site-dir", pages, *options, env=_MKDOCS)
