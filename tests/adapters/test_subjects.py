"""Adapters with dialects of their own, judged by the suite."""

from dataclasses import replace
from typing import Any

import pytest

from attest import run_conformance_test
from tests.adapters import subjects

# They change nothing in NumPy or JAX.
pytestmark = pytest.mark.filterwarnings("ignore::attest.conformance.testing.SharedProcessWarning")


@pytest.mark.parametrize("name", ["ONNX", "MHA", "SPLASH"])
def test_an_adapter_conforms(name: str) -> None:
    record = run_conformance_test(getattr(subjects, name))
    assert {"forward", "gradients"} <= {result.check for result in record.results}


@pytest.mark.parametrize("name", ["ONNX", "MHA", "SPLASH"])
def test_an_adapter_that_forgets_causal_order_does_not(name: str) -> None:
    subject = getattr(subjects, name)

    def forgetful(*arrays: Any, causal: bool = False, **options: Any) -> Any:
        return subject.call(*arrays, **options)

    with pytest.raises(AssertionError, match=f"{subject.name} does not conform"):
        run_conformance_test(replace(subject, call=forgetful))
