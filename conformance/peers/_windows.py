"""Sliding windows in the forms that other projects take."""

from typing import Any

Window = int | tuple[int | None, int | None] | None


def sides_of(window: Window) -> tuple[int | None, int | None]:
    """Return the left and the right side of a window; None is a side without an end, as without a window."""
    if window is None:
        return None, None
    return (window, window) if isinstance(window, int) else window


def with_ended_sides(window: Window, query: Any, key: Any) -> int | tuple[int, ...] | None:
    """Return a window whose open sides reach past both ends, for libraries that have no open ones."""
    if not isinstance(window, tuple):
        return window
    past_the_ends = query.shape[1] + key.shape[1]
    return tuple(past_the_ends if side is None else side for side in window)
