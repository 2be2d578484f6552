"""The user's own tables of block sizes: made of a configuration, written, loaded and checked."""

import os
from typing import Any

import jax
import pytest

from attest.kernels.configs.own_tables import checked_table
from attest.kernels.configs.rows import conditions, half, new_table, with_rows
from attest.kernels.configs.tables import read_table, select
from attest.kernels.implementations import IMPLEMENTATIONS
from attest.kernels.operations.abstract_call import abstract_call
from attest.kernels.pallas.mosaic_gpu import blocks as of_mosaic_gpu
from attest.kernels.triton import blocks as of_triton
from attest.kernels.triton import candidates as triton_candidates
from attest.kernels.xla import ChunkSizes, Config, flash_attention
from attest.kernels.xla import table as of_xla

BY_NAME = {x.name: x for x in IMPLEMENTATIONS}
TABLES = {x.__name__: x._TABLE for x in (of_mosaic_gpu, of_triton, of_xla)}
FORWARD = {"kernel": "forward", "head_dim": 64, "devices": ["cpu"], "q": 1}


@pytest.fixture(autouse=True)
def triton_on_a_gpu(monkeypatch):
    monkeypatch.setattr(triton_candidates, "target_device", lambda: "sm_90")


def call(length: int = 1024, dim: int = 128, heads: int = 8, key_heads: int = 8, **options: Any) -> Any:
    query, key = (jax.ShapeDtypeStruct((2, length, n, dim), "bfloat16") for n in (heads, key_heads))
    return abstract_call({"query": query, "key": key, "value": key, **options}).call


CALLS = {
    "plain": call(),
    "causal": call(causal=True),
    "window": call(causal=True, sliding_window=(100, 0)),
    "head dim 64": call(dim=64),
    "small": call(length=128),
    "decoding": call(length=4, heads=32),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_configuration_written_as_rows_is_chosen_for_the_call_and_for_no_other(
    name, kind, monkeypatch, tmp_path
):
    tunable = BY_NAME[name].tunable()
    own = CALLS[kind]
    before = {other: tunable.chosen(each) for other, each in CALLS.items()}
    for number, config in enumerate(tunable.candidates(own)[-2:]):
        path = tmp_path / f"{number}.toml"
        path.write_text(with_rows(new_table(name), tunable.rows(own, config)))
        monkeypatch.setenv("ATTEST_BLOCKS", str(path))
        assert tunable.chosen(own) == config
        alike = {conditions(row) for row in tunable.rows(own, config)}
        for other, each in CALLS.items():
            if alike.isdisjoint(map(conditions, tunable.rows(each, config))):
                assert tunable.chosen(each) == before[other], other


def test_a_pass_runs_with_the_users_row(monkeypatch, tmp_path):
    query = jax.ShapeDtypeStruct((1, 640, 1, 16), "float32")
    given = abstract_call({"query": query, "key": query, "value": query}).call
    config = Config(ChunkSizes(128, 64), None)
    path = tmp_path / "own.toml"
    path.write_text(with_rows(new_table("xla"), of_xla.rows(given, config)))
    monkeypatch.setenv("ATTEST_BLOCKS", str(path))
    program = str(jax.make_jaxpr(lambda x: flash_attention(x, x, x))(query))
    assert "f32[5,128,1,1,16]" in program
    assert "f32[1,10,64,1,16]" in program
