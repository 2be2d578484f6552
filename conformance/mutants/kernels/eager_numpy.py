"""NumPy under the name of jax.numpy, so that the kernel's own source runs without being compiled."""

from typing import Any

import ml_dtypes
import numpy as np

bfloat16 = ml_dtypes.bfloat16


def __getattr__(name: str) -> Any:
    return getattr(np, name)
