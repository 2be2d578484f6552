"""How many examples a property has."""

import os

from hypothesis import settings

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def examples(number: int) -> settings:
    """So many examples in CI, forty times as many at night."""
    return settings(max_examples=40 * number if NIGHTLY else number)
