"""The command line of the steps: prepare, run, and comment FOLDER."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from attest.conformance.ci.cache import prepare
from attest.conformance.ci.inputs import read_inputs
from attest.conformance.ci.workflow import StepError, annotate, set_outputs

_USAGE = "python -P -m attest.conformance.ci prepare | run | comment FOLDER"


def main(arguments: Sequence[str]) -> int:
    """Do one step; return its exit status."""
    try:
        match list(arguments):
            case ["prepare"]:
                set_outputs(prepare(os.environ.get("ATTEST_SHARD", "")))
                return 0
            case ["run"]:
                from attest.conformance.ci.run import run

                return run(read_inputs())
            case ["comment", folder]:
                from attest.conformance.ci.comment import post

                print(post(Path(folder), os.environ.get("ATTEST_TITLE") or "attest"))
                return 0
            case _:
                raise StepError(f"got {' '.join(arguments) or 'no step'}, expected {_USAGE}")
    except StepError as error:
        annotate("error", str(error), "attest")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
