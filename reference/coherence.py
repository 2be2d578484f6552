"""The error of a cast where many of the values that are cast are nearly equal.

Two values that differ by much less than the spacing of the format are rounded in the same direction by
nearly the same amount, so their errors add up like one error. Values further apart are rounded
independently. Values are therefore sorted into cells of nearly equal magnitude: errors add up within a cell,
squares across cells.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attest.reference.numerics import WORST_EXCESS, Floats

Cells = NDArray[np.int64]

# The rounding error, as a function of the logarithm of a value, repeats itself every one to two units.
_CELL_WIDTH = 1.0

# Equal values may lie on both sides of an edge. A second grid, moved by half a cell, holds them together.
_GRIDS = (0.0, 0.5)

# In a format finer than this the values of a case do not share roundings.
_FINEST_UNIT = 2.0**-16

_PRODUCTS_AT_A_TIME = 1 << 21

# Beyond so many products roundings are taken as independent: problems of that size hold ordinary values.
_MOST_PRODUCTS = 1 << 27
_MOST_VALUES = 1 << 24


@dataclass(frozen=True)
class Cast:
    """The cast of an array of values, of which each row [N] is summed by itself.

    sizes [R, N]: magnitudes of the values. deviations [R, N]: standard deviations of their rounding errors,
    times factors of either sign. unit: the unit roundoff of the format. floor: magnitudes below it are
    flushed together.
    """

    sizes: Floats
    deviations: Floats
    unit: float
    floor: float = 0.0

    @property
    def repeats(self) -> bool:
        """Whether the format is so coarse that the values of a case can share roundings."""
        return self.unit >= _FINEST_UNIT

    def grids(self) -> list[Cells]:
        """Return the cell [R, N] of each value in each of the grids."""
        smallest = max(self.floor, float(np.finfo(np.float64).tiny))
        place = np.log(np.maximum(self.sizes, smallest)) / (_CELL_WIDTH * self.unit)
        return [np.floor(place + shift).astype(np.int64) for shift in _GRIDS]


@dataclass(frozen=True)
class Shares:
    """The shares of an output's variance among cells: cells [C] and their parts [C] of the sum."""

    cells: Cells
    parts: Floats


@dataclass(frozen=True)
class CastError:
    """The error of sums of values that were cast, [R, D].

    variance: with errors of the usual size. extra: what is added to it where the values of a few cells meet
    the largest error that rounding can make. shares: of the variance, over all rows.
    """

    variance: Floats
    extra: Floats
    shares: Shares


@dataclass(frozen=True)
class Parts:
    """The division of an output's summed variance into parts that err independently.

    squares: the sum of their squares. largest: the largest of them.
    """

    squares: float = 0.0
    largest: float = 0.0

    def plus(self, *variances: Floats) -> "Parts":
        """Return these parts and further ones."""
        squares = self.squares + sum(float(np.square(variance).sum()) for variance in variances)
        largest = max([self.largest, *(float(variance.max(initial=0.0)) for variance in variances)])
        return Parts(squares, largest)

    def joined(self, other: "Parts") -> "Parts":
        """Return the parts of two rows or more together."""
        return Parts(self.squares + other.squares, max(self.largest, other.largest))


NO_PARTS = Parts()


def cast_error_of_sums(cast: Cast, values: Floats, factor: Floats | float = 1.0) -> CastError:
    """Return the error of factor * (cast values @ values): factor a number or [R, 1], values [N, D]."""
    variance = factor**2 * (cast.deviations**2 @ values**2)
    none = Shares(np.empty(0, np.int64), np.empty(0))
    if not cast.repeats or cast.deviations.size * values.shape[1] > _MOST_PRODUCTS:
        return CastError(variance, np.zeros_like(variance), none)
    by_grid = [_by_cells(cast.deviations, cells, values, factor) for cells in cast.grids()]
    variance = np.maximum(by_grid[0].variance, by_grid[1].variance)
    extra = np.maximum(by_grid[0].extra, by_grid[1].extra)
    return CastError(variance, extra, by_grid[0].shares)


def largest_share(shares: Iterable[Shares]) -> float:
    """Return the root of the summed squares of all cells' parts: the whole sum if one cell holds it."""
    given = list(shares)
    if not given:
        return 0.0
    _, place = np.unique(np.concatenate([share.cells for share in given]), return_inverse=True)
    parts = np.bincount(place, np.concatenate([share.parts for share in given]))
    return float(np.sqrt((parts**2).sum()))


def common_variance(casts: Sequence[Cast], weights: Sequence[Floats]) -> float:
    """Return the variance of the sum of all errors times weights [R, N], equal values rounded alike."""
    if not casts or not casts[0].repeats or sum(cast.sizes.size for cast in casts) > _MOST_VALUES:
        return 0.0
    terms = np.concatenate(
        [(cast.deviations * weight).ravel() for cast, weight in zip(casts, weights, strict=True)]
    )
    variances = [0.0]
    for grids in zip(*(cast.grids() for cast in casts), strict=True):
        cells = np.concatenate([grid.ravel() for grid in grids])
        _, place = np.unique(cells, return_inverse=True)
        squares = np.bincount(place, terms) ** 2
        variances.append(float(squares.sum() + WORST_EXCESS * np.sqrt((squares**2).sum())))
    return max(variances)


def _by_cells(deviations: Floats, cells: Cells, values: Floats, factor: Floats | float) -> CastError:
    """Return the same in one grid: sums within each cell of a row, squared, then summed over its cells."""
    rows, columns = deviations.shape
    variance, fourth = np.zeros((rows, values.shape[1])), np.zeros((rows, values.shape[1]))
    found: list[Cells] = [np.empty(0, np.int64)]
    parts: list[Floats] = [np.empty(0)]
    step = max(1, _PRODUCTS_AT_A_TIME // max(columns * values.shape[1], 1))
    scaled = deviations * factor
    for start in range(0, rows if columns else 0, step):
        part = slice(start, start + step)
        order = np.argsort(cells[part], axis=1, kind="stable")
        ordered = np.take_along_axis(cells[part], order, axis=1)
        products = np.take_along_axis(scaled[part], order, axis=1)[..., None] * values[order]
        products = products.reshape(-1, values.shape[1])
        new = np.ones(ordered.shape, bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        starts = np.flatnonzero(new)
        # Beside the middle between two numbers, nearly equal values are rounded apart.
        squares = np.add.reduceat(products, starts, axis=0) ** 2
        squares = np.maximum(squares, np.add.reduceat(products**2, starts, axis=0))
        first = np.flatnonzero(starts % columns == 0)
        variance[part] = np.add.reduceat(squares, first, axis=0)
        fourth[part] = np.add.reduceat(squares**2, first, axis=0)
        found.append(ordered.ravel()[starts])
        parts.append(squares.sum(axis=1))
    extra = WORST_EXCESS * np.sqrt(fourth)
    return CastError(variance, extra, Shares(np.concatenate(found), np.concatenate(parts)))
