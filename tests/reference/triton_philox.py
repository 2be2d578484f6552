"""Runs Triton's own `tl.philox` in its interpreter: python triton_philox.py <folder>.

Reads counters.npy (uint32 [4, n], n a power of two) and seed.npy (int64 [1]), writes words.npy, shaped as
the counters.
A process of its own, since the interpreter must be chosen before a kernel is defined.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.language as tl


class Buffer:
    """What the interpreter asks of a tensor, over a NumPy array; it serves as its own storage, uncopied."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = str(array.dtype)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "Buffer":
        return self

    def cpu(self) -> "Buffer":
        return self

    def copy_(self, other: "Buffer") -> None:
        assert other is self

    def new_empty(self, size: int, device: str) -> "Buffer":
        del size, device
        return Buffer(self.array)

    def set_(self, storage: "Buffer", offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        del offset, size, stride
        self.untyped_storage = lambda: storage

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


@triton.jit
def words_of(counters, seed, words, n: tl.constexpr):
    at = tl.arange(0, n)
    w0, w1, w2, w3 = tl.philox(
        tl.load(seed),
        tl.load(counters + at),
        tl.load(counters + n + at),
        tl.load(counters + 2 * n + at),
        tl.load(counters + 3 * n + at),
    )
    tl.store(words + at, w0)
    tl.store(words + n + at, w1)
    tl.store(words + 2 * n + at, w2)
    tl.store(words + 3 * n + at, w3)


def main(folder: Path) -> None:
    counters, seed = np.load(folder / "counters.npy"), np.load(folder / "seed.npy")
    words = np.zeros_like(counters)
    words_of[(1,)](Buffer(counters), Buffer(seed), Buffer(words), n=counters.shape[1])
    np.save(folder / "words.npy", words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
