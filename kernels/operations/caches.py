"""The memory cache of tuned configurations, which lasts as long as the process, and overlays on top of it."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from attest.kernels.operations.invocation import Invocation

type Key = tuple[str, str, str]

_overlays: ContextVar[tuple[Mapping[Any, Any], ...]] = ContextVar("attest_config_overlays", default=())


class ConfigCache[Config]:
    """Configurations of this process by environment, operation and call, as `Invocation.key` has them."""

    def __init__(self) -> None:
        """Start empty."""
        self._configs: dict[Key, Config] = {}
        # How often it was changed, by which readers know that what they remember is old.
        self.changes = 0

    def get(self, environment: str, op_id: str, call_key: str) -> Config | None:
        """Return a configuration, or None."""
        return self._configs.get((environment, op_id, call_key))

    def put(self, environment: str, op_id: str, call_key: str, config: Config) -> None:
        """Keep a configuration in place of the one before."""
        self._configs[environment, op_id, call_key] = config
        self.changes += 1

    def clear(self) -> None:
        """Forget all."""
        self._configs.clear()
        self.changes += 1

    def size(self) -> int:
        """Return how many there are."""
        return len(self._configs)

    def keys(self) -> list[Key]:
        """Return the keys, the oldest first."""
        return list(self._configs)


@contextmanager
def overlay_cache(configs: Mapping[Any, Any]) -> Generator[None]:
    """Let calls in the block take these configurations before those of any cache.

    configs: by `Invocation.key`, or by the name of an operation for all of its calls. The innermost block
    counts.
    """
    token = _overlays.set((*_overlays.get(), dict(configs)))
    try:
        yield
    finally:
        _overlays.reset(token)


def overlaid(invocation: Invocation[Any, Any]) -> Any:
    """Return the configuration that the innermost overlay has for a call, or None."""
    for configs in reversed(_overlays.get()):
        for key in (invocation.key, invocation.op_id):
            if key in configs:
                return configs[key]
    return None


def any_overlay() -> bool:
    """Return whether the call is within a block of `overlay_cache`."""
    return bool(_overlays.get())
