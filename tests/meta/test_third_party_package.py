"""The package that the README describes: built, installed, found by its entry point, and judged."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"

PYPROJECT = """
[project]
name = "my-attention"
version = "1.0"

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["my_attention"]
"""

KERNEL = '''
"""Somebody's attention: correct, plain, and without a word about attest."""

import math

import jax
import jax.numpy as jnp


def attention(query, key, value, *, causal, scale):
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4 or array.dtype not in (jnp.float32, jnp.bfloat16):
            raise ValueError(f"{name}: got {array.dtype}{array.shape}, expected 4 axes, a float dtype")
    if key.shape != value.shape:
        raise ValueError(f"value: got shape {value.shape}, expected {key.shape}, as key")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3] or query.shape[2] % key.shape[2]:
        raise ValueError(f"key: got shape {key.shape}, expected one that fits query {query.shape}")
    if scale is not None and math.isnan(scale):
        raise ValueError("scale: got nan, expected a number")
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    logits = jnp.einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), key) * jnp.float32(scale)
    rows, columns = logits.shape[2:]
    offset = columns - rows
    seen = jnp.arange(columns)[None, :] <= jnp.arange(rows)[:, None] + offset if causal else True
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, jnp.float32(0)))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, jnp.float32(1), total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).astype(query.dtype)
'''


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A folder where the package is installed, its test beside it."""
    source = tmp_path_factory.mktemp("source")
    declaration, test = code_blocks("python")
    (entry_point,) = code_blocks("toml")
    package = source / "my_attention"
    package.mkdir()
    (package / "__init__.py").write_text(KERNEL)
    (package / "attest_subject.py").write_text(declaration)
    (source / "pyproject.toml").write_text(PYPROJECT + entry_point)
    installed = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(installed), str(source)], check=True, cwd=source)
    (installed / "test_attention.py").write_text(test)
    return installed


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(README.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), root]), "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=site,
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )


def test_the_declaration_is_short() -> None:
    declaration, test = code_blocks("python")
    assert len(declaration.splitlines()) + len(test.splitlines()) < 30


def test_it_is_listed_by_its_entry_point(site: Path) -> None:
    listed = run(site, "conformance", "list")
    assert listed.returncode == 0, listed.stderr
    assert "my_attention" in listed.stdout


def test_its_test_passes(site: Path) -> None:
    tested = run(site, "pytest", "-q", "-p", "no:cacheprovider", "test_attention.py")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "1 passed" in tested.stdout


def test_a_defect_in_it_is_found_and_replays(site: Path) -> None:
    package = site / "my_attention" / "__init__.py"
    correct = package.read_text()
    package.write_text(correct.replace("<= jnp.arange(rows)", "< jnp.arange(rows)"))
    try:
        record = site / "run.json"
        options = ("--feature", "causal", "--check", "forward", "--examples", "4", "-n", "0")
        checked = run(site, "conformance", "check", "my_attention", *options, "--json", str(record))
        assert checked.returncode == 1, checked.stdout + checked.stderr
        minimal = [r for r in json.loads(record.read_text())["results"] if r["minimal"]]
        case = minimal[0]["case"]
        assert case.get("q_len", 1) + case.get("kv_len", 1) <= 3
        question = {"subject": "my_attention", "check": "forward", "case": case}
        replayed = run(site, "conformance", "replay", json.dumps(question))
        assert replayed.returncode == 1
    finally:
        package.write_text(correct)
    replayed = run(site, "conformance", "replay", json.dumps(question))
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
