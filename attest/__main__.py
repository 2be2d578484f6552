"""Makes `python -m attest` the command `attest`, where it is not installed, and names a missing extra."""

import os
import sys
from importlib.util import find_spec

# What the command needs of the extra `suite`, by the names that are imported.
_SUITE = ("hypothesis", "jinja2", "matplotlib", "msgspec", "rich", "typer")


def main() -> int | None:
    """Run the command; the exit status, 2 where the extra `suite` or the current folder is missing."""
    try:
        os.getcwd()
    except OSError as error:  # libraries ask for it when they are imported
        print(
            f"attest: the current folder cannot be read: {error.strerror}: change to another", file=sys.stderr
        )
        return 2
    missing = [name for name in _SUITE if find_spec(name) is None]
    if missing:
        advice = 'install the extra suite, pip install "attest-attention[suite]"'
        print(f"attest: needs {', '.join(missing)}: {advice}", file=sys.stderr)
        return 2
    from attest.conformance.cli.commands import main as command

    return command()


if __name__ == "__main__":
    # Before anything else is imported; a worker imports this file, too, and keeps the path that it was given.
    from attest.conformance.process.settings import hide_folder

    hide_folder()
    sys.exit(main())
