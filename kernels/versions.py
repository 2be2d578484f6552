"""Ranges of versions of JAX: on which an implementation was judged."""

from dataclasses import dataclass

type Version = tuple[int, ...]


@dataclass(frozen=True)
class Versions:
    """A range of versions, such as `Versions((0, 6), (0, 13))` for 0.6 up to all of 0.12.

    first: the first version of the range. below: the first version after it. without: versions between them
    that do not belong to it. Versions are tuples of integers, as `jax.__version_info__` is.
    """

    first: Version
    below: Version
    without: tuple[Version, ...] = ()

    def __contains__(self, version: Version) -> bool:
        return self.first <= version < self.below and version not in self.without

    def __str__(self) -> str:
        """Return the range as a requirement of a package states it, such as ">=0.6,!=0.11.0,<0.13"."""
        parts = (
            f">={_dotted(self.first)}",
            *(f"!={_dotted(version)}" for version in self.without),
            f"<{_dotted(self.below)}",
        )
        return ",".join(parts)


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
