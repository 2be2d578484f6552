"""The ways in which an operation gets its configuration, and which one of several should run."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Literal

import jax

from attest.conformance.subject import Way
from attest.conformance.subjects._run_by_operations import JudgedKernel, OnAnyDevice, exact
from attest.kernels import flash_attention
from attest.kernels.operations import (
    Executor,
    FlashAttention,
    FlashAttentionConfig,
    create_default_executor,
    overlay_cache,
    policy_override,
)
from attest.kernels.operations.executor import invocation
from attest.kernels.operations.policy import Fallback

# One of two configurations, neither of which the tables choose.
type Which = Literal["first", "second"]

_NAMES = {
    "first": "the first configuration",
    "second": "the second configuration",
    "tables": "the tables' choice",
}
# In place of the part of a key that says in which environment a configuration was tuned.
_ELSEWHERE = "0" * 24


@dataclass(frozen=True)
class _Row:
    """The places of a configuration, in the order of the chain, and the one that should run.

    explicit: in the call. overlay: in a block of `overlay_cache`. memory: in the memory cache. before: there
    too, during a call before. persistent: in the cache on disk. elsewhere: on disk, tuned in another
    environment. fallback: the policy on a miss.
    """

    name: str
    meant: Which | Literal["tables"]
    explicit: Which | None = None
    overlay: Which | None = None
    memory: Which | None = None
    before: Which | None = None
    persistent: Which | None = None
    elsewhere: Which | None = None
    fallback: Fallback = "heuristics"


_ROWS = (
    _Row("no configuration", "tables"),
    _Row("an explicit one", "first", explicit="first"),
    _Row("an explicit one, where the policy is to tune", "second", explicit="second", fallback="autotune"),
    _Row("an explicit one in an overlay", "first", explicit="first", overlay="second"),
    _Row("an explicit one beside caches", "first", explicit="first", memory="second", persistent="second"),
    _Row("an overlay", "first", overlay="first", memory="second"),
    _Row("the memory cache", "first", memory="first", persistent="second"),
    _Row("the memory cache, changed after a call", "second", before="first", memory="second"),
    _Row("the persistent cache", "second", persistent="second"),
    _Row("the persistent cache of another environment", "tables", elsewhere="first"),
    _Row("the persistent cache of two environments", "second", persistent="second", elsewhere="first"),
)


def ways(
    kernel: JudgedKernel,
    operation: Callable[[], FlashAttention] = OnAnyDevice,
    executor: Callable[[str], Executor[Any, Any]] = create_default_executor,
) -> tuple[Way, ...]:
    """Return each way in which an operation may get a configuration of a kernel.

    operation, executor: make those that are judged; the executor has its persistent cache in a folder.
    """
    return tuple(_way(kernel, row, operation, executor) for row in _ROWS)


def _way(
    kernel: JudgedKernel,
    row: _Row,
    operation: Callable[[], FlashAttention],
    executor: Callable[[str], Executor[Any, Any]],
) -> Way:
    calls = {name: partial(_directly, kernel, which) for which, name in _NAMES.items()}
    meant = calls.pop(_NAMES[row.meant])
    return Way(row.name, partial(_call, kernel, row, operation, executor), meant, calls)


def _directly(kernel: JudgedKernel, which: str, query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the kernel without an operation."""
    arguments = {"query": query, "key": key, "value": value, **options}
    return flash_attention(**arguments, config=_config(kernel, which, arguments).config)


def _config(kernel: JudgedKernel, which: str, arguments: dict[str, Any]) -> FlashAttentionConfig:
    if which == "tables":
        return FlashAttentionConfig()
    return exact(kernel.platform, kernel.traced[0 if which == "first" else 1], arguments)


def _call(
    kernel: JudgedKernel,
    row: _Row,
    operation: Callable[[], FlashAttention],
    executor: Callable[[str], Executor[Any, Any]],
    query: Any,
    key: Any,
    value: Any,
    **options: Any,
) -> Any:
    """Return the call of a row, with an executor of its own."""
    arguments = {"query": query, "key": key, "value": value, **options}
    op = operation()
    found = {which: _config(kernel, which, arguments) for which in ("first", "second")}
    environment, op_id, call = invocation(op, *op.prepare(**arguments)).key
    with TemporaryDirectory(prefix="attest-ways-") as folder, ExitStack() as stack:
        run = executor(folder)
        chooser = run.chooser
        assert chooser.persistent is not None
        stack.enter_context(policy_override(chooser, cache_miss_fallback=row.fallback))
        for where, which in ((environment, row.persistent), (_ELSEWHERE, row.elsewhere)):
            if which is not None:
                chooser.persistent.put(where, op_id, call, found[which])
        if row.before is not None:
            chooser.cache.put(environment, op_id, call, found[row.before])
            # Traced apart, so that the program has one call.
            jax.eval_shape(lambda: run(op, **arguments))
        if row.memory is not None:
            chooser.cache.put(environment, op_id, call, found[row.memory])
        if row.overlay is not None:
            stack.enter_context(overlay_cache({op.op_id: found[row.overlay]}))
        return run(op, cfg=None if row.explicit is None else found[row.explicit], **arguments)
