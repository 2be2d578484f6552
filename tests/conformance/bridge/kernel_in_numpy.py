"""A function for the tests of the bridge, in NumPy: it returns value, or does what the option `do` names."""

import os
import signal
import sys
import time
from typing import Any

import numpy as np


def kernel(query: Any, key: Any, value: Any, *, do: str = "echo", **options: Any) -> Any:
    if do == "echo":
        return value
    if do == "twice":
        return value, value
    if do == "short":
        return value[:, 1:]
    if do == "double":
        return value.astype(np.float64)
    if do == "lse":
        return value, np.zeros((query.shape[0], query.shape[2], query.shape[1]), np.float32)
    if do == "ids":
        return np.full(value.shape, [os.getpid() % 2**16, os.getpgrp() % 2**16], np.float32)
    if do == "path":
        raise ValueError(repr((sys.path, os.environ.get("PYTHONPATH"), os.environ.get("OF_THE_TEST"))))
    if do == "options":
        raise ValueError(repr(options))
    if do == "refuse" and "bias" in options:
        raise NotImplementedError("bias: not here")
    if do == "print":
        print("printed there", flush=True)
        return value
    if do == "exit":
        os._exit(7)
    if do == "quit":
        sys.exit("no more")
    if do == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "hang":
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    raise OwnError("of this type")


class OwnError(NotImplementedError):
    pass
