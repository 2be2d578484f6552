"""The table of block sizes: whole, legal, and read from the top; and what block sizes may be."""

import jax.numpy as jnp
import pytest

from attest.kernels.call.call import check_call
from attest.kernels.configs.tables import read_table
from attest.kernels.triton.blocks import _TABLE, WORK, BlockSizes, choose, separate
from attest.kernels.triton.passes import FEW_KEYS, FEW_QUERIES, work_of

KERNELS = ("forward", "backward_query", "backward_key", "backward_bias")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_unknown_device_has_sizes_for_every_head_dim(kernel, itemsize):
    for head_dim in range(1, 257):
        for work in WORK:
            assert isinstance(choose(kernel, "new", head_dim, itemsize, work), BlockSizes)


@pytest.mark.parametrize(
    "question", [("sideways", 8, 2, "plain"), ("forward", 257, 2, "plain"), ("forward", 8, 1, "plain")]
)
def test_a_question_without_a_row_is_named(question):
    kernel, head_dim, itemsize, work = question
    with pytest.raises(LookupError, match=f"no row for {kernel}, head_dim {head_dim}, {itemsize} bytes"):
        choose(kernel, "sm_90", head_dim, itemsize, work)


def test_every_row_is_legal_and_answers_some_question():
    fields = {"kernel", "bytes", "head_dim", "q", "k", "warps", "stages"}
    for row in read_table(_TABLE)["sizes"]:
        assert fields <= set(row) <= fields | {"devices", "any", "programs", "over", "measured"}
        assert row["kernel"] in KERNELS
        assert row["bytes"] in (2, 4)
        assert set(row.get("any", WORK)) <= set(WORK)
        sizes = BlockSizes(*(row[name] for name in ("q", "k", "warps", "stages")), row.get("programs", 1))
        assert sizes in [
            choose(row["kernel"], device, row["head_dim"], row["bytes"], work)
            for device in row.get("devices", ["new"])
            for work in row.get("any", WORK)
        ], row


def test_rows_of_a_device_come_before_the_fallback():
    general = ["devices" not in row for row in read_table(_TABLE)["sizes"]]
    assert general == sorted(general)
    assert any(
        choose("forward", "sm_90", d, 2, "plain") != choose("forward", "new", d, 2, "plain")
        for d in (64, 128)
    )


def test_few_queries_and_few_keys_are_work_of_their_own():
    def work(queries, keys):
        rows, keys = jnp.zeros((1, queries, 2, 8)), jnp.zeros((1, keys, 2, 8))
        return work_of(check_call(rows, keys, keys))

    assert [work(queries, 300) for queries in (1, FEW_QUERIES, FEW_QUERIES + 1)] == ["few", "few", "uneven"]
    assert [work(300, keys) for keys in (1, FEW_KEYS - 1, FEW_KEYS + 1)] == ["few_keys", "few_keys", "uneven"]
    few, others = (choose("forward", "sm_90", 128, 2, kind).q for kind in ("few", "uneven"))
    assert few <= FEW_QUERIES < others
    few, others = (choose("backward_key", "sm_90", 64, 2, kind).q for kind in ("few_keys", "uneven"))
    assert few > others


def test_beyond_the_head_dims_of_the_table_sums_are_separate():
    for row in read_table(_TABLE)["separate"]:
        assert {"over"} <= set(row) <= {"over", "any"}
        for work in row.get("any", WORK):
            assert separate(row["over"] + 1, work)
    assert all(separate(129, work) for work in WORK)
    assert not separate(128, "plain")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("q", {"q": 8}),
        ("q", {"q": 0}),
        ("k", {"k": 48}),
        ("k", {"k": 32.0}),
        ("num_warps", {"num_warps": 3}),
        ("num_stages", {"num_stages": -1}),
    ],
)
def test_illegal_sizes_are_refused_by_name(name, sizes):
    with pytest.raises(ValueError, match=rf"^BlockSizes\.{name}: got "):
        BlockSizes(**sizes)
