"""Runs a command, and counts the CPU seconds of all its processes, those that outlive it among them.

    python3 -m benchmarks.all_processes PATH COMMAND [ARGUMENT ...]

PATH gets the seconds. A worker of a server of processes is no descendant that the command waits for, so that
`os.times` of the caller lacks its time. This process adopts and awaits every orphan, as Linux alone allows.
"""

import ctypes
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def main(path: Path, command: list[str]) -> int:
    """Run the command, write the CPU seconds to the path, and return the exit status."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot adopt orphans (prctl PR_SET_CHILD_SUBREAPER)")
    status = subprocess.run(command, check=False).returncode
    with suppress(ChildProcessError):
        while True:
            os.wait()
    times = os.times()
    path.write_text(f"{times.children_user + times.children_system}\n")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
