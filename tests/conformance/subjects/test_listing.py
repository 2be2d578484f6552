"""Subjects are listed anywhere: to ask whether one can run imports no kernel."""

import subprocess
import sys

import pytest

PALLAS = ("jax.experimental.pallas", "attest.kernels.pallas")
IMPORTED = {
    "triton.cuda": ("triton", "attest.kernels.triton"),
    "pallas.mosaic_gpu": PALLAS,
    "pallas.tpu_interpret": PALLAS,
}


@pytest.mark.parametrize("name", IMPORTED)
def test_listing_a_subject_imports_no_kernel(name: str) -> None:
    code = (
        f"import sys; from attest.conformance.subject import find; find({name!r}).ready(); "
        f"sys.exit(any(x in sys.modules for x in {IMPORTED[name]}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
