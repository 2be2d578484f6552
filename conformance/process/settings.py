"""Settings of processes that run kernels: quiet, one thread of linear algebra, the same in every run.

Imports neither NumPy nor JAX: the settings must be made before either is loaded.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

# One thread each: workers share the cores between them, and sums are taken in the same order everywhere.
_STEADY = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # XLA and absl write much to stderr; a reader needs only the errors.
    "TF_CPP_MIN_LOG_LEVEL": "3",
    # Several workers share one accelerator, so none may take most of its memory at once.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
_ONE_THREAD_OF_XLA = "--xla_cpu_multi_thread_eigen=false"


class WorkerError(Exception):
    """The processes that run kernels cannot run; the message is one sentence."""


class LostError(WorkerError):
    """The machines that ran kernels are lost."""


def settle() -> None:
    """Set the environment of this process and those that it starts; settings of the user are kept."""
    for name, value in _STEADY.items():
        os.environ.setdefault(name, value)
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_cpu_multi_thread_eigen" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_ONE_THREAD_OF_XLA}".strip()


def hush() -> None:
    """Silence warnings and logs of kernels in this process; send their prints to stderr."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.dup2(2, 1)


def hold_streams() -> None:
    """Give /dev/null the number of each standard stream that is closed, so that no other file gets it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def see_folder() -> None:
    """Let `module:attribute` name modules of the user's current folder."""
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)


def hide_folder() -> None:
    """Remove the user's folder, which `python -m` adds, from the path, unless attest itself is there."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been removed, and the command refuses to run there
        return
    home = Path(__file__).absolute().parents[3]
    if not sys.flags.safe_path and sys.path[:1] == [folder] and not os.path.samefile(folder, home):
        del sys.path[0]
