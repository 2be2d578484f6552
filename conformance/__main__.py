"""Makes `python -m conformance` the command `attest`, where it is not installed."""

import sys

from conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
