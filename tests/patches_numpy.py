"""Imported anywhere but by a test, this breaks NumPy for the rest of the process."""

import numpy as np

from tests import toys

np.exp = None
subject = toys.right
