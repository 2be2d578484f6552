"""The one format of tables of block sizes, and its one selector."""

from pathlib import Path

import pytest

from attest.kernels.configs.tables import read_table, select

ROWS = """
sizes = [
  { kernel = "forward", head_dim = 64, bytes = 2, devices = ["sm_90"], any = ["cap", "bias"], q = 1 },
  { kernel = "forward", head_dim = 64, bytes = 2, all = ["cap", "bias"], q = 2 },
  { kernel = "forward", head_dim = 128, bytes = 2, q = 3 },
  { kernel = "forward", head_dim = 128, q = 4 },
]
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "blocks.toml"
    path.write_text(ROWS)
    return path


@pytest.mark.parametrize(
    ("head_dim", "work", "itemsize", "device", "q"),
    [
        (64, ["cap"], 2, "sm_90", 1),
        (1, ["bias", "other"], 2, "sm_90", 1),
        (64, [], 2, "sm_90", 3),
        (64, ["cap"], 2, "sm_80", 3),
        (64, ["bias", "cap", "other"], 2, "sm_80", 2),
        (65, ["bias", "cap"], 2, "sm_90", 3),
        (64, ["cap"], 4, "sm_90", 4),
        (128, [], None, None, 4),
    ],
)
def test_the_first_row_that_fits_is_taken(table, head_dim, work, itemsize, device, q):
    assert select(table, "forward", head_dim, work, itemsize, device) == {"q": q}


@pytest.mark.parametrize(("kernel", "head_dim"), [("backward", 8), ("forward", 129)])
def test_what_no_row_fits_is_named(table, kernel, head_dim):
    with pytest.raises(LookupError, match=rf"no row for {kernel}, head_dim {head_dim}, 2 bytes, cap"):
        select(table, kernel, head_dim, ["cap"], 2)


def test_all_tables_have_the_format():
    """A row of a table selects by the common columns, and the fallbacks of each kernel come last."""
    kernels = Path(__file__).parents[3] / "kernels"
    tables = sorted(kernels.rglob("blocks.toml"))
    assert len(tables) == 4
    for path in tables:
        for row in read_table(path)["sizes"]:
            assert {"kernel", "head_dim"} < set(row)
            assert not {"any", "all"} <= set(row)
            assert "work" not in row
