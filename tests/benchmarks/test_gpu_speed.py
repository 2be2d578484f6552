"""The parts of the GPU benchmarks that need no GPU: workloads, targets, tables, what becomes of a failure."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from attest.conformance.peers import jax_nn
from attest.conformance.tuning.workload import Workload, draw, options
from attest.kernels import xla
from benchmarks import gpu_compile, gpu_speed, ring_speed, targets
from benchmarks.contenders import CONTENDERS, KERNELS, ours, peer, program
from benchmarks.record import OURS, Absent, Entry, Report, Result, Row, Run, Samples, Target
from benchmarks.report import MILLISECONDS, TFLOPS, Layout, as_markdown, difference_column, targets_table
from benchmarks.targets import PLAIN, read_rows
from benchmarks.timing import Timing, attempt, in_turns, measure, prepare
from benchmarks.workload import (
    DIRECTIONS,
    FORWARD,
    FORWARD_BACKWARD,
    operations,
    visible_pairs,
    with_gradients,
)

SMALL = Workload(2, 16, 2, 8, causal=True)
TIMING = Timing(samples=2, sample_seconds=0.0001)
FILES = [targets.FOLDER / f"{family}.toml" for family in KERNELS]
RUN = Run("today", "abc", "toy", {})
LAYOUT = Layout("Toys", "In turns.", (MILLISECONDS, TFLOPS, difference_column(0.05)))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def row(*targets: Target, direction: str = FORWARD, **entries: Workload) -> Row:
    return Row("small", direction, {label: Entry(label, it) for label, it in entries.items()}, targets)


def seen_pairs(workload: Workload) -> np.ndarray:
    """[batch, length, keys]: what each query sees."""
    _, i, j = np.ogrid[: workload.batch, : workload.length, : workload.keys]
    some = workload.key_lengths[:, None, None]
    diagonal = i + (some if workload.lengths else workload.keys) - workload.length
    seen = (i >= 0) & (j < some)
    if workload.causal:
        seen &= j <= diagonal
    if workload.window:
        seen &= (diagonal - j < workload.window) & (j - diagonal <= workload.after)
    if workload.chunk:
        seen &= diagonal // workload.chunk == j // workload.chunk
    if workload.segment:
        seen &= i // workload.segment == j // workload.segment
    return seen


def small_targets(folder: Path, family: str) -> Path:
    """A file of targets that any machine can measure, with one target, and one workload of a model."""
    workload = "{ batch = 2, length = 16, heads = 2, head_dim = 8, causal = true }"
    file = folder / f"{family}.toml"
    file.write_text(
        f"""
        ours = "our_{family}"
        contenders = ["cudnn"]
        timing = {{ samples = 2, sample_seconds = 0.0001, largest_difference = 0.05 }}
        peers = [{{ name = "plain", workload = {workload}, forward = {{ cudnn = 0.5 }} }}]
        features = [{{ name = "feature", workload = {workload}, plain = {workload}, plain_is = "the same" }}]
        """
    )
    (folder / "models.toml").write_text(f'models = [{{ name = "model", workload = {workload} }}]')
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
        kind = "_default" if "precision default" in it.name else ""
        assert it.entries[OURS].contender == f"our_{file.stem}{kind}"
        assert {entry.contender for entry in it.entries.values()} <= set(CONTENDERS)
        assert all(target.other in it.entries for target in it.targets)


def test_mosaic_gpu_is_asked_for_nothing_that_it_refuses() -> None:
    rows, *_ = read_rows(targets.FOLDER / "mosaic_gpu.toml")
    assert all(entry.call().head_dim <= 256 for it in rows for entry in it.entries.values())


@each_file
def test_contenders_left_out_take_their_targets_along(file: Path) -> None:
    named = {target.other for it in read_rows(file)[0] for target in it.targets} - {PLAIN}
    rows, *_ = read_rows(file, [OURS, min(named)])
    assert {target.other for it in rows for target in it.targets} - {PLAIN} == {min(named)}
    rows, *_ = read_rows(file, ["cudnn"])
    assert rows
    assert not any(it.targets or OURS in it.entries for it in rows)


def test_a_row_may_have_no_target(tmp_path) -> None:
    file = small_targets(tmp_path, "triton")
    rows, timing, largest_difference = read_rows(file, models=tmp_path / "models.toml")
    assert timing == TIMING
    assert [(it.title, len(it.targets)) for it in rows] == [
        ("plain, forward", 1),
        ("plain, forward + backward", 0),
        ("model, forward", 0),
        ("model, forward + backward", 0),
        ("feature, forward", 0),
        ("feature, forward + backward", 0),
    ]
    untargeted = [Result(it, dict.fromkeys(it.entries, Samples((0.001,)))) for it in rows[1:]]
    assert targets_table(untargeted).endswith("\n\n0 of 0 targets met.")
    assert largest_difference == 0.05
    assert "| feature, forward " in as_markdown(Report(RUN, tuple(untargeted)), LAYOUT)


@each_file
def test_plain_workloads_see_the_pairs_of_the_feature(file: Path) -> None:
    rows, *_ = read_rows(file, [OURS])
    by_ratio_alone = "window of 1024 at 32k"
    for it in rows:
        if PLAIN in it.entries and it.name != by_ratio_alone:
            ours, plain = (visible_pairs(it.entries[label].call()) for label in (OURS, PLAIN))
            assert ours == pytest.approx(plain, rel=0.004), it.name


@pytest.mark.parametrize(
    "workload",
    [
        Workload(1, 12, 1, 8),
        Workload(2, 12, 3, 8, causal=True),
        Workload(1, 12, 1, 8, segment=4),
        Workload(1, 12, 1, 8, causal=True, segment=5),
        Workload(1, 12, 1, 8, causal=True, window=3),
        Workload(2, 3, 2, 8, key_length=12),
        Workload(2, 3, 2, 8, key_length=12, causal=True),
        Workload(1, 12, 2, 8, key_length=5, causal=True),
        Workload(1, 12, 2, 8, window=3, after=2),
        Workload(1, 12, 2, 8, causal=True, chunk=5),
        Workload(1, 5, 2, 8, key_length=12, chunk=5),
        Workload(3, 5, 2, 8, key_length=12, key_mask=True),
        Workload(3, 5, 2, 8, key_length=12, lengths=True, causal=True),
    ],
)
def test_visible_pairs_are_those_of_the_mask(workload: Workload) -> None:
    assert visible_pairs(workload) == workload.heads * seen_pairs(workload).sum()
    assert operations(workload, FORWARD_BACKWARD) == 3.5 * operations(workload, FORWARD)


def test_operations_count_both_widths() -> None:
    assert operations(Workload(1, 12, 1, 8), FORWARD) == 12 * 12 * 4 * 8
    assert operations(Workload(1, 12, 1, 8, value_dim=4), FORWARD) == 12 * 12 * 2 * (8 + 4)


@pytest.mark.parametrize("family", KERNELS)
@pytest.mark.parametrize(
    "workload",
    [
        Workload(2, 3, 4, 8, key_length=12, key_heads=2, value_dim=4, causal=True),
        Workload(2, 12, 4, 8, key_heads=2, causal=True, window=3, sinks=3),
        Workload(1, 12, 2, 8, segment=5, soft_cap=0.5, bias=True),
        Workload(2, 12, 2, 8, window=3, after=2, key_mask=True),
        Workload(1, 12, 2, 8, causal=True, chunk=5, alibi=True),
        Workload(3, 5, 2, 8, key_length=12, lengths=True),
    ],
)
def test_ours_is_asked_for_the_workload(
    family: str, workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that run anywhere stand in for those that need a GPU, since all have one signature."""
    monkeypatch.setitem(sys.modules, KERNELS[family], xla)
    inputs = draw(workload)
    arrays = {name: np.asarray(it, np.float64) for name, it in inputs.items()}
    shared = workload.heads // (workload.key_heads or workload.heads)
    key, value = (np.repeat(arrays[name], shared, axis=2) for name in ("key", "value"))
    logits = np.einsum("bqhd,bkhd->bhqk", arrays["query"], key) / np.sqrt(workload.head_dim)
    logits += arrays.get("bias", 0.0)
    if workload.soft_cap:
        logits = workload.soft_cap * np.tanh(logits / workload.soft_cap)
    if workload.alibi:
        i, j = np.ogrid[: workload.length, : workload.keys]
        distance = abs(i + workload.keys - workload.length - j)
        logits -= arrays["slopes"][:, None, None] * distance
    weights = np.exp(logits) * seen_pairs(workload)[:, None]
    total = weights.sum(-1, keepdims=True)
    if workload.sinks:
        total += np.exp(arrays["sinks"]).sum(-1)[:, None, None]
    expected = np.einsum("bhqk,bkhd->bqhd", weights / total, value)
    got = CONTENDERS[f"our_{family}"](workload)(inputs)
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, atol=0.02)


def test_outcomes() -> None:
    """Twice as fast as the peer; and half the time on a quarter of the pairs is twice the cost of a pair."""
    longer = Workload(2, 32, 2, 8)
    it = row(
        Target("peer", "speed", 2.0),
        Target("peer", "speed", 2.1),
        Target("longer", "cost", 2.0),
        Target("longer", "cost", 1.9),
        Target("gone", "speed", 1.0),
        ours=Workload(2, 16, 2, 8),
        peer=Workload(2, 16, 2, 8),
        longer=longer,
        gone=longer,
    )
    fast, slow = Samples((0.5, 0.5, 9.0)), Samples((1.0,))
    result = Result(it, {"ours": fast, "peer": slow, "longer": slow, "gone": Absent("no wheel")})
    assert [result.ratio(target) for target in it.targets] == [2.0, 2.0, 2.0, 2.0, None]
    assert [result.outcome(target) for target in it.targets] == ["met", "missed", "met", "missed", "absent"]


def test_an_absent_peer_is_a_row() -> None:
    it = row(Target("gone", "speed", 1.0), ours=SMALL, gone=SMALL, other=SMALL)
    measured = {
        "ours": Samples((0.001,)),
        "gone": Absent("ImportError: a|b"),
        "other": Samples((0.002,), 0.7),
    }
    result = Result(it, measured)
    text = as_markdown(Report(RUN, (result,)), LAYOUT)
    lines = [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines()]
    assert "- device: toy" in text
    assert ["gone", "2x16, 2, 8", "absent: ImportError: a\\|b"] in [line[1:4] for line in lines]
    assert ["other", "2x16, 2, 8", "2.000"] in [line[1:4] for line in lines]
    assert "7.0e-01 DIFFERS" in text
    assert targets_table([result]).endswith("0 of 1 targets met.")


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
def test_a_row_from_end_to_end(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(scale):
        def attend(inputs):
            logits = scale * jnp.einsum("bqhd,bkhd->bhqk", inputs["query"], inputs["key"])
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), inputs["value"])

        return lambda workload: attend

    def missing(workload):
        raise ImportError("no such wheel")

    def refusing(workload):
        def attend(inputs):
            raise NotImplementedError("no such shape")

        return attend

    toys = {
        "first": attention(1.0),
        "same": attention(1.0),
        "wrong": attention(3.0),
        "missing": missing,
        "refusing": refusing,
    }
    for name, toy in toys.items():
        monkeypatch.setitem(CONTENDERS, name, toy)
    it = row(Target("missing", "speed", 1.0), direction=direction, **dict.fromkeys(toys, SMALL))
    results = measure(it, prepare([it], program), TIMING)
    assert results["missing"] == Absent("ImportError: no such wheel")
    assert results["refusing"] == Absent("NotImplementedError: no such shape")
    assert results["first"].difference is None
    assert results["same"].difference == 0
    assert results["wrong"].difference > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernels": "pallas"}, r"^--kernels pallas: expected triton or mosaic_gpu or xla or auto\.$"),
        (
            {"contenders": "ours,cuda"},
            r"^--contenders cuda: expected some of ours, our_triton, .*ejkernel\.$",
        ),
    ],
)
def test_what_there_is_not_is_refused(arguments: dict[str, str], message: str, tmp_path) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        gpu_speed.main(tmp_path, **arguments)


def test_inputs_of_every_feature() -> None:
    workload = Workload(2, 16, 4, 8, key_heads=2, value_dim=4, segment=4, sinks=3, bias=True, dropout=0.1)
    shapes = {name: it.shape for name, it in jax.eval_shape(lambda: draw(workload)).items()}
    assert shapes["key"] == (2, 16, 2, 8)
    assert shapes["value"] == (2, 16, 2, 4)
    assert shapes["d_out"] == (2, 16, 4, 4)
    assert shapes["bias"] == (1, 4, 16, 16)
    assert shapes["sinks"] == (4, 3)
    assert shapes["segments"] == (2, 16)
    assert shapes["seed"] == (2,)


@pytest.mark.parametrize("entry", targets.read(targets.MODELS)["models"], ids=lambda entry: entry["name"])
@pytest.mark.parametrize("module", [KERNELS["mosaic_gpu"], "attest.kernels.xla"])
def test_the_workload_of_a_model_is_one_of_ours(entry, module: str) -> None:
    """As shapes, without running: the Triton kernels, which have no shapes on a CPU, take what these do."""
    workload = Workload(**entry["workload"])
    inputs = jax.eval_shape(lambda: draw(workload))
    attend = ours(module, workload)
    out = jax.eval_shape(attend, inputs)
    result, made = jax.eval_shape(with_gradients(attend), inputs)
    assert result == out
    assert (out.shape, out.dtype) == (inputs["d_out"].shape, inputs["d_out"].dtype)
    assert [it.shape for it in made] == [inputs[name].shape for name in ("query", "key", "value")]


def test_the_case_of_a_workload_has_its_features() -> None:
    every = Workload(2, 16, 4, 8, None, 2, 4, True, 4, 3, soft_cap=1.0, sinks=3, bias=True, dropout=0.1)
    names = {"gqa", "value_dim", "causal", "segments", "window", "soft_cap", "sinks", "bias", "dropout"}
    assert every.case.features == names
    assert Workload(2, 16, 4, 8, key_length=5).case.features == frozenset()


def test_a_peer_is_called_as_its_subject_says() -> None:
    workload = Workload(2, 16, 4, 8, key_heads=2, causal=True, bias=True)
    # It promotes dtypes, which the tests forbid.
    inputs = {name: it.astype(jnp.float32) for name, it in draw(workload).items()}
    arrays = (inputs["query"], inputs["key"], inputs["value"])
    out, _ = jax_nn.XLA.call(*arrays, **options(workload, inputs))
    np.testing.assert_array_equal(peer(jax_nn.XLA, workload)(inputs), out)


@pytest.mark.parametrize(
    ("workload", "reason"),
    [
        (Workload(2, 16, 4, 8, sinks=1), "does not declare sinks"),
        (Workload(2, 3, 4, 8, key_length=5, causal=True), "aligns the first query with the first key"),
        (Workload(2, 3, 4, 8, key_length=5, window=2), "aligns the first query with the first key"),
    ],
)
def test_a_peer_is_absent_where_it_does_not_take_a_workload(workload: Workload, reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        peer(jax_nn.XLA, workload)


@pytest.mark.parametrize("module", [gpu_speed, gpu_compile, ring_speed])
def test_without_a_gpu_it_says_so(module, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(SystemExit, match=r"^benchmarks\.\w+ needs a GPU, and JAX runs on cpu here\.$"):
        module.main(tmp_path)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"^benchmarks\.\w+ needs [12] devices, and JAX has fewer here\.$"):
        module.main(tmp_path)
    assert not list(tmp_path.iterdir())
