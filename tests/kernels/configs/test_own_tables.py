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


def call(
    length: int = 1024, dim: int = 128, heads: int = 8, value_dim: int | None = None, **options: Any
) -> Any:
    query, key, value = (
        jax.ShapeDtypeStruct((2, length, *each), "bfloat16")
        for each in ((heads, dim), (8, dim), (8, value_dim or dim))
    )
    return abstract_call({"query": query, "key": key, "value": value, **options}).call


CALLS = {
    "plain": call(),
    "causal": call(causal=True),
    "window": call(causal=True, sliding_window=(100, 0)),
    "uneven": call(length=600),
    "head dim 64": call(dim=64),
    "head dim 192": call(dim=192),
    "head dim 192, value 128": call(dim=192, value_dim=128),
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
    found = tunable.candidates(own)
    for number, config in enumerate((*found[1:2], *found[-2:])):
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
    assert "f32[1,5,128,1,1,16]" in program
    assert "f32[1,10,64,1,16]" in program


def test_rows_of_several_files_come_first_in_their_order(monkeypatch, tmp_path):
    first, second, others = (tmp_path / name for name in ("first.toml", "second.toml", "others.toml"))
    first.write_text(with_rows(new_table("xla"), [FORWARD]))
    second.write_text(
        with_rows(new_table("xla"), [{**FORWARD, "q": 2}, {**FORWARD, "head_dim": 128, "q": 3}])
    )
    others.write_text(with_rows(new_table("triton"), [{**FORWARD, "head_dim": 256, "q": 4}]))
    monkeypatch.setenv("ATTEST_BLOCKS", os.pathsep.join(map(str, (others, first, "", second))))
    found = [select(of_xla._TABLE, "forward", dim, device="cpu") for dim in (64, 65)]
    assert found == [{"q": 1}, {"q": 3}]
    with pytest.raises(LookupError):
        select(of_xla._TABLE, "forward", 129, device="cpu")
    monkeypatch.delenv("ATTEST_BLOCKS")
    with pytest.raises(LookupError):
        select(of_xla._TABLE, "forward", 64, device="cpu")


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_shipped_tables_can_be_written_and_keep_their_rows(table):
    text = table.read_text()
    assert with_rows(text, []) == text
    row = {**FORWARD, "registers": (240, 24), "fused": True, "measured": {"call": 'a "b"', "gain": 1.5}}
    written = with_rows(with_rows(text, [{**row, "q": 7}]), [row])
    assert written.count("\n") == text.count("\n") + 1
    _, rows = checked_table("table", written)
    assert rows == ({**row, "registers": [240, 24]}, *read_table(table)["sizes"])


def test_head_dims_of_a_row_begin_where_its_tiles_would_be_smaller():
    assert [half(dim) for dim in (1, 16, 17, 64, 65, 80, 128, 256)] == [0, 0, 16, 32, 64, 64, 64, 128]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sizes = [", "got no TOML"),
        ("sizes = []", "implementation: got None; expected one of mosaic_gpu, pallas_tpu, triton, xla"),
        ('implementation = "cuda"', "implementation: got 'cuda'; expected one of"),
        ('implementation = "xla"', "sizes: got None; expected a list of rows"),
        ('implementation = "xla"\nsizes = [3]', r"sizes\[0\]: got 3; expected a row of columns"),
        (
            with_rows(new_table("xla"), [{**FORWARD, "kernel": "f"}]),
            "kernel: got 'f'; expected one of forward,",
        ),
        (with_rows(new_table("xla"), [{"kernel": "forward"}]), "head_dim: got None; expected a number"),
        (with_rows(new_table("xla"), [{**FORWARD, "over": "a"}]), "over: got 'a'; expected a number"),
        (with_rows(new_table("xla"), [{**FORWARD, "only": "a"}]), "only: got 'a'; expected a list of names"),
    ],
)
def test_a_malformed_table_of_the_user_is_named(text, words, monkeypatch, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(text)
    monkeypatch.setenv("ATTEST_BLOCKS", str(path))
    x = jax.ShapeDtypeStruct((1, 8, 1, 8), "float32")
    with pytest.raises(ValueError, match=rf"^ATTEST_BLOCKS, {path}(, sizes\[0\])?[:,].*{words}"):
        BY_NAME["xla"].tunable().chosen(abstract_call({"query": x, "key": x, "value": x}).call)


def test_a_file_that_cannot_be_read_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTEST_BLOCKS", str(tmp_path / "none.toml"))
    with pytest.raises(
        ValueError, match=r"^ATTEST_BLOCKS: got '.*none.toml'; expected a file that can be read"
    ):
        select(of_xla._TABLE, "forward", 64)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("sizes", [{"k": 100000000000}, {"k": 128, "colour": 1}])
def test_malformed_sizes_of_a_row_are_named(name, sizes, monkeypatch, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(with_rows(new_table(name), [{"kernel": "forward", "head_dim": 128, **sizes}]))
    monkeypatch.setenv("ATTEST_BLOCKS", str(path))
    with pytest.raises(ValueError, match=r"^block sizes of forward: .*(k|stages|colour)"):
        BY_NAME[name].tunable().chosen(call())
