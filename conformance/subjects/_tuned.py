"""Operations with the configuration that a tuning run found: judged, timed, and read from a cache on disk."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Lock
from typing import Any
from weakref import finalize

import jax

from attest.conformance.judging.candidates.judge import judge_candidate
from attest.conformance.subject import Way
from attest.conformance.subjects._run_by_operations import JudgedKernel, OnAnyDevice, exact
from attest.conformance.subjects.auto import declared_by
from attest.kernels import flash_attention
from attest.kernels.config import from_json
from attest.kernels.operations import (
    Executor,
    FlashAttention,
    FlashAttentionConfig,
    Tuner,
    create_default_executor,
)
from attest.kernels.operations.invocation import Invocation

# The call that is tuned for all of its bucket: long enough for several blocks.
_TOKENS, _HEADS, _HEAD_DIM = 80, 2, 16


class TunedKernel:
    """A kernel, run with what tuning runs found: `run` is the call of a Subject.

    The calls of a dtype are a bucket, which its first call in this process tunes. One executor tunes; another
    one runs and has the configuration from the file that the first one wrote. The files are removed when the
    process ends.
    """

    def __init__(self, kernel: JudgedKernel) -> None:
        """Tune nothing yet."""
        self._kernel = kernel
        self._operation = _FewCandidates(kernel, kernel.operation().run)
        # What a trace shows: the kernels themselves, where they are otherwise interpreted.
        self._traced = _FewCandidates(kernel, FlashAttention().run)
        self._tuned: set[str] = set()
        self._tuning = Lock()

    def run(self, query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
        """Run the operation with the configuration of the bucket."""
        return self._run(self._operation, query, key, value, **options)

    def way(self) -> Way:
        """Return how the check `configuration` sees that the file of the tuning run counts."""
        return Way(
            "the file of a tuning run",
            partial(self._run, self._traced),
            self._as_written,
            {"the tables' choice": flash_attention},
        )

    def _run(self, operation: FlashAttention, query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
        self._fill(str(query.dtype))
        return self.executor(operation, query=query, key=key, value=value, **options)

    def _as_written(self, query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
        """Run the kernel with the configuration of the one file that belongs to the bucket."""
        self._fill(str(query.dtype))
        (path,) = self.folder.rglob(f"*-{_bucket_of(query.dtype)}-*.json")
        config = from_json(json.dumps(json.loads(path.read_text())["config"]["config"]))
        return flash_attention(query, key, value, config=config, **options)

    def _fill(self, dtype: str) -> None:
        """Tune a bucket if it has not been tuned yet."""
        with self._tuning:
            if dtype not in self._tuned:
                # In a thread of its own, where JAX does not trace the call that waits.
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._tune, dtype).result()
                self._tuned.add(dtype)

    def _tune(self, dtype: str) -> None:
        shape = jax.ShapeDtypeStruct((1, _TOKENS, _HEADS, _HEAD_DIM), dtype)
        executor = create_default_executor(str(self.folder))
        judge = partial(judge_candidate, declared_by=declared_by)
        executor.chooser.tuner = Tuner(warmup=1, iters=1, judge=judge)
        executor.tune(self._operation, query=shape, key=shape, value=shape)

    @cached_property
    def folder(self) -> Path:
        """The folder of the cache on disk."""
        made = mkdtemp(prefix="attest-tuned-")
        finalize(self, rmtree, made, ignore_errors=True)
        return Path(made)

    @cached_property
    def executor(self) -> Executor[FlashAttentionConfig, jax.Array]:
        """The executor of the calls; it is not the one that tuned."""
        return create_default_executor(str(self.folder))


class _FewCandidates(OnAnyDevice):
    """The operation with the candidates of a kernel, which exclude the tables' choice, and a key a bucket."""

    def __init__(self, kernel: JudgedKernel, run: Callable[..., jax.Array]) -> None:
        super().__init__()
        self._judged, self._run = kernel, run
        self.key_builder = _bucket

    def run(self, *args: Any, cfg: FlashAttentionConfig, **kwargs: Any) -> jax.Array:
        return self._run(*args, cfg=cfg, **kwargs)

    def candidate_cfgs(
        self, inv: Invocation[FlashAttentionConfig, jax.Array]
    ) -> tuple[FlashAttentionConfig, ...]:
        sizes = self._judged.candidates
        return tuple(exact(self._judged.platform, each, dict(inv.kwargs)) for each in sizes)


def _bucket(inv: Invocation[Any, Any]) -> str:
    return _bucket_of(inv.kwargs["query"].dtype)


def _bucket_of(dtype: Any) -> str:
    return f"bucket.{dtype}"
