"""The kinds of checks: how the cases of a check are chosen, and whether simpler ones are searched for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """The way cases are chosen for a check.

    table: the table of conformance/running/profiles.toml that says how many; without it no case is drawn.
    by_row: from the rows of covering arrays; the cases of a row share programs and are judged together.
    apart: each check has cases and tasks of its own, because it makes calls that no other check shares.
    listed: from a list. None has rows that see no key, and a simpler case would test something else: none is
        searched for.
    """

    table: str
    by_row: bool = False
    apart: bool = False
    listed: bool = False


DRAWN = Kind("drawn", by_row=True)
POISONED = Kind("poisoned", by_row=True)
REPEATED = Kind("repeated", by_row=True)
TRANSFORMED = Kind("transformed")
LAWS = Kind("laws", apart=True)
REFUSED = Kind("refused", listed=True)
SHARDED = Kind("sharded", listed=True)
CONFIGURATION = Kind("configuration", listed=True)
PRODUCTION = Kind("production", listed=True)
