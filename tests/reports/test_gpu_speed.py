"""The parts of the GPU benchmarks that need no GPU: targets, verdicts, tables, what becomes of a failure."""

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from attest.kernels import xla
from benchmarks import gpu_speed, gpu_tune
from benchmarks.gpu.contenders import CONTENDERS, KERNELS
from benchmarks.gpu.problem import (
    DIRECTIONS,
    FORWARD,
    FORWARD_BACKWARD,
    Problem,
    draw,
    operations,
    visible_pairs,
)
from benchmarks.gpu.report import (
    OURS,
    PLAIN,
    Result,
    Row,
    Target,
    as_markdown,
    judge,
    read_rows,
    targets_table,
)
from benchmarks.gpu.timing import Absent, Timing, attempt, in_turns

SMALL = Problem(2, 16, 2, 8, causal=True)
TIMING = Timing(samples=2, sample_seconds=0.0001)
FILES = [gpu_speed.TARGETS / f"{family}.toml" for family in KERNELS]
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def row(*targets: Target, direction: str = FORWARD, **entries: Problem) -> Row:
    return Row("small", direction, {label: (label, problem) for label, problem in entries.items()}, targets)


def seen_pairs(problem: Problem) -> np.ndarray:
    """[length, length]: what each query sees."""
    i, j = np.ogrid[: problem.length, : problem.length]
    seen = (i >= 0) & (j >= 0)
    if problem.causal:
        seen &= j <= i
    if problem.window:
        seen &= i - j < problem.window
    if problem.segment:
        seen &= i // problem.segment == j // problem.segment
    return seen


def small_targets(folder: Path, family: str) -> Path:
    """A file of targets that any machine can measure, with one target."""
    problem = "{ batch = 2, length = 16, heads = 2, head_dim = 8, causal = true }"
    file = folder / f"{family}.toml"
    file.write_text(
        f"""
        ours = "our_{family}"
        contenders = ["cudnn"]
        timing = {{ samples = 2, sample_seconds = 0.0001, largest_difference = 0.05 }}
        peers = [{{ name = "plain", problem = {problem}, forward = {{ cudnn = 0.5 }} }}]
        features = [{{ name = "feature", problem = {problem}, plain = {problem}, plain_is = "the same" }}]
        """
    )
    return file


@each_file
def test_a_file_of_targets_is_whole(file: Path) -> None:
    rows, timing, largest_difference = read_rows(file)
    assert timing.samples >= 7
    assert 0 < largest_difference < 1
    assert len({it.title for it in rows}) == len(rows)
    assert {it.direction for it in rows} == set(DIRECTIONS)
    assert any(it.targets for it in rows)
    for it in rows:
        assert it.entries[OURS][0] == f"our_{file.stem}"
        assert {contender for contender, _ in it.entries.values()} <= set(CONTENDERS)
        assert all(target.other in it.entries for target in it.targets)
        if PLAIN not in it.entries:
            problem = it.entries[OURS][1]
            plain = Problem(*list(vars(problem).values())[:4], causal=problem.causal)
            assert problem == plain, "the peers' adapters read no features"


def test_mosaic_gpu_is_asked_for_nothing_that_it_refuses() -> None:
    rows, *_ = read_rows(gpu_speed.TARGETS / "mosaic_gpu.toml")
    assert all(problem.dropout == 0 for it in rows for _, problem in it.entries.values())


@each_file
def test_contenders_left_out_take_their_targets_along(file: Path) -> None:
    rows, *_ = read_rows(file, [OURS, "cudnn"])
    assert {target.other for it in rows for target in it.targets} == {"cudnn", PLAIN}
    rows, *_ = read_rows(file, ["cudnn"])
    assert rows
    assert not any(it.targets or OURS in it.entries for it in rows)


def test_a_row_may_have_no_target(tmp_path) -> None:
    rows, timing, largest_difference = read_rows(small_targets(tmp_path, "triton"))
    assert timing == TIMING
    assert [(it.title, len(it.targets)) for it in rows] == [
        ("plain, forward", 1),
        ("plain, forward + backward", 0),
        ("feature, forward", 0),
        ("feature, forward + backward", 0),
    ]
    untargeted = [(it, dict.fromkeys(it.entries, Result((0.001,)))) for it in rows[1:]]
    assert targets_table(untargeted).endswith("\n\n0 of 0 targets met.")
    assert "| feature, forward " in as_markdown({}, untargeted, largest_difference)


@each_file
def test_plain_problems_see_the_pairs_of_the_feature(file: Path) -> None:
    rows, *_ = read_rows(file, [OURS])
    by_ratio_alone = "window of 1024 at 32k"
    for it in rows:
        if PLAIN in it.entries and it.name != by_ratio_alone:
            ours, plain = (visible_pairs(it.entries[label][1]) for label in (OURS, PLAIN))
            assert ours == pytest.approx(plain, rel=0.004), it.name


@pytest.mark.parametrize(
    "problem",
    [
        Problem(1, 12, 1, 8),
        Problem(2, 12, 3, 8, causal=True),
        Problem(1, 12, 1, 8, segment=4),
        Problem(1, 12, 1, 8, causal=True, segment=5),
        Problem(1, 12, 1, 8, causal=True, window=3),
    ],
)
def test_visible_pairs_are_those_of_the_mask(problem: Problem) -> None:
    assert visible_pairs(problem) == problem.batch * problem.heads * seen_pairs(problem).sum()
    assert operations(problem, FORWARD_BACKWARD) == 3.5 * operations(problem, FORWARD)


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 12, 4, 8, key_heads=2, causal=True, window=3, sinks=3),
        Problem(1, 12, 2, 8, segment=5, soft_cap=0.5, bias=True),
    ],
)
def test_ours_is_asked_for_the_problem(
    family: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that run anywhere stand in for those that need a GPU, since all have one signature."""
    monkeypatch.setitem(sys.modules, KERNELS[family], xla)
    inputs = draw(problem)
    arrays = {name: np.asarray(it, np.float64) for name, it in inputs.items()}
    shared = problem.heads // (problem.key_heads or problem.heads)
    key, value = (np.repeat(arrays[name], shared, axis=2) for name in ("key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", arrays["query"], key) / np.sqrt(problem.head_dim)
    logits += arrays.get("bias", 0.0)
    if problem.soft_cap:
        logits = problem.soft_cap * np.tanh(logits / problem.soft_cap)
    weights = np.exp(logits) * seen_pairs(problem)
    total = weights.sum(-1, keepdims=True)
    if problem.sinks:
        total += np.exp(arrays["sinks"]).sum(-1)[:, None, None]
    expected = np.einsum("bhqk,bkhd->bqhd", weights / total, value)
    got = CONTENDERS[f"our_{family}"](problem)(inputs)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.02)


def test_verdicts() -> None:
    """Twice as fast as the peer; and half the time on a quarter of the pairs is twice the cost of a pair."""
    longer = Problem(2, 32, 2, 8)
    it = row(
        Target("peer", "speed", 2.0),
        Target("peer", "speed", 2.1),
        Target("longer", "cost", 2.0),
        Target("longer", "cost", 1.9),
        Target("gone", "speed", 1.0),
        ours=Problem(2, 16, 2, 8),
        peer=Problem(2, 16, 2, 8),
        longer=longer,
        gone=longer,
    )
    fast, slow = Result((0.5, 0.5, 9.0)), Result((1.0,))
    judged = judge(it, {"ours": fast, "peer": slow, "longer": slow, "gone": Absent("no wheel")})
    assert [each.ratio for each in judged] == [2.0, 2.0, 2.0, 2.0, None]
    assert [each.verdict for each in judged] == ["met", "missed", "met", "missed", "absent"]


def test_an_absent_peer_is_a_row() -> None:
    it = row(Target("gone", "speed", 1.0), ours=SMALL, gone=SMALL, other=SMALL)
    results = {"ours": Result((0.001,)), "gone": Absent("ImportError: a|b"), "other": Result((0.002,), 0.7)}
    text = as_markdown({"device": "toy"}, [(it, results)], largest_difference=0.05)
    lines = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines()]
    assert "- device: toy" in text
    assert ["gone", "(2, 16, 2, 8)", "absent: ImportError: a\\|b"] in [line[1:4] for line in lines]
    assert ["other", "(2, 16, 2, 8)", "2.000"] in [line[1:4] for line in lines]
    assert "7.0e-01 DIFFERS" in text
    assert targets_table([(it, results)]).endswith("0 of 1 targets met.")


def test_an_error_is_a_reason() -> None:
    def fail() -> None:
        raise ValueError("\n  the first line\nthe second")

    assert attempt(fail) == Absent("ValueError: the first line")


def test_turns() -> None:
    """One sample of each in every round; what fails later drops out alone."""
    calls: list[str] = []

    def steady() -> jax.Array:
        calls.append("steady")
        return jnp.zeros(())

    def failing() -> jax.Array:
        calls.append("failing")
        if calls.count("failing") > 2:
            raise RuntimeError("lost")
        return jnp.zeros(())

    samples = in_turns({"steady": steady, "failing": failing}, Timing(samples=3, sample_seconds=1e-9))
    assert samples["failing"] == Absent("RuntimeError: lost")
    assert len(samples["steady"]) == 3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_row_from_end_to_end(direction: str, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def attention(scale):
        def attend(inputs):
            logits = scale * jnp.einsum("bqhd,bkhd->bhqk", inputs["query"], inputs["key"])
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), inputs["value"])

        return lambda problem: attend

    def missing(problem):
        raise ImportError("no such wheel")

    def refusing(problem):
        def attend(inputs):
            raise NotImplementedError("no such shape")

        return attend

    toys = {"same": attention(1.0), "wrong": attention(3.0), "missing": missing, "refusing": refusing}
    for name, toy in toys.items():
        monkeypatch.setitem(CONTENDERS, name, toy)
    it = row(Target("missing", "speed", 1.0), direction=direction, **dict.fromkeys(toys, SMALL))
    results = gpu_speed.measure(it, gpu_speed.prepare([it]), TIMING)
    assert results["missing"] == Absent("ImportError: no such wheel")
    assert results["refusing"] == Absent("NotImplementedError: no such shape")
    assert results["same"].difference is None
    assert results["wrong"].difference > 0.05
    report = tmp_path / "reports" / "speed"
    gpu_speed.write(report, {"device": "toy"}, [(replace(it, targets=()), results)], 0.05)
    (written,) = json.loads(report.with_suffix(".json").read_text())["rows"]
    assert [entry["label"] for entry in written["entries"]] == list(toys)
    assert len(written["entries"][0]["samples_milliseconds"]) == TIMING.samples
    assert report.with_suffix(".md").read_text().count("absent: ") == 2


@pytest.mark.parametrize(
    ("family", "report"), [("triton", "gpu_speed"), ("mosaic_gpu", "gpu_speed_mosaic_gpu")]
)
def test_a_run_judges_the_kernels_that_it_is_told(
    family: str, report: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """On small problems, with the kernels that run anywhere in the place of those that need a GPU."""
    small_targets(tmp_path, family)
    monkeypatch.setattr(gpu_speed, "TARGETS", tmp_path)
    monkeypatch.setattr(gpu_speed, "need_gpu", lambda program: None)
    monkeypatch.setitem(sys.modules, KERNELS[family], xla)
    out = tmp_path / "out"
    gpu_speed.main(out, kernels=family, rows=", forward +")
    assert sorted(it.name for it in out.iterdir()) == [f"{report}.json", f"{report}.md"]
    data = json.loads((out / f"{report}.json").read_text())
    assert data["about"]["ours"] == KERNELS[family]
    peers, features = data["rows"]
    assert (peers["name"], features["name"]) == ("plain", "feature")
    assert [it["label"] for it in peers["entries"]] == [OURS, "cudnn"]
    assert [it["label"] for it in features["entries"]] == [OURS, PLAIN]
    measured = [it["contender"] for row in data["rows"] for it in row["entries"] if "absent" not in it]
    assert measured == [f"our_{family}"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernels": "pallas"}, r"^--kernels pallas: expected triton or mosaic_gpu\.$"),
        (
            {"contenders": "ours,cuda"},
            r"^--contenders cuda: expected some of ours, our_triton, .*ejkernel\.$",
        ),
    ],
)
def test_what_there_is_not_is_refused(
    options: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(gpu_speed, "need_gpu", lambda program: None)
    with pytest.raises(typer.BadParameter, match=message):
        gpu_speed.main(tmp_path, **options)


def test_inputs_of_every_feature() -> None:
    problem = Problem(2, 16, 4, 8, key_heads=2, segment=4, sinks=3, bias=True, dropout=0.1)
    shapes = {name: it.shape for name, it in jax.eval_shape(lambda: draw(problem)).items()}
    assert shapes["key"] == shapes["value"] == (2, 16, 2, 8)
    assert shapes["bias"] == (1, 4, 16, 16)
    assert shapes["sinks"] == (4, 3)
    assert shapes["segments"] == (2, 16)
    assert shapes["seed"] == (2,)


def test_tuning_shows_the_best_and_counts_what_failed() -> None:
    sweeps = gpu_tune.read_sweeps(tomllib.loads(gpu_tune.CANDIDATES.read_text()))
    assert {(it.kernel, it.problem.head_dim, it.problem.causal) for it in sweeps} == {
        (kernel, head_dim, causal)
        for kernel in ("forward", "query", "key")
        for head_dim in (64, 128, 256)
        for causal in (False, True)
    }
    own, first, second, *rest = sweeps[0].candidates
    times = dict.fromkeys(rest, Absent("out of resources")) | {own: 2.0, first: 3.0, second: 1.5}
    *_, line = gpu_tune.best_table([(sweeps[0], times)]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert own is None
    assert cells == [sweeps[0].title, str(second), "1.500", "2.000", f"{len(rest)} of {len(times)}"]


@pytest.mark.parametrize("program", [gpu_speed, gpu_tune])
def test_without_a_gpu_it_says_so(program, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit, match=r"^benchmarks\.gpu_\w+ needs a GPU, and JAX runs on cpu here\.$"):
        program.main(tmp_path)
