"""Each check of each row of cases is an item: `pytest -k "gradients and causal"` runs some."""

import pytest

from my_attention.attest_subject import subject


@pytest.mark.attest(subject)
def test_attention(): ...
