"""The agreement of a program's processes on one configuration, so that all of them compile the same.

Messages go through the key-value service that `jax.distributed.initialize` starts. Every wait has a time
limit: a process that is lost ends the others with an error, not with a hang.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

_SECONDS = 300.0


class Messages(Protocol):
    """A key-value service that several processes share; a key is written once."""

    def put(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str, seconds: float) -> str:
        """Wait for a value. Raises TimeoutError after so many seconds."""
        ...


@dataclass
class Agreement:
    """The processes that must agree, and how they talk.

    process: the number of this one among `processes`. messages: None where there is one alone. seconds: how
    long a message of another process is waited for.
    """

    process: int = 0
    processes: int = 1
    messages: Messages | None = None
    seconds: float = _SECONDS
    _rounds: dict[str, int] = field(default_factory=dict[str, int])

    def first(
        self, topic: str, config: Any, *, write: Callable[[Any], str], read: Callable[[str], Any]
    ) -> Any:
        """Return the configuration that process 0 has, or None if it has none.

        write, read: to JSON, and back.

        Raises: ValueError where process 0 does not answer in time.
        """
        if self.messages is None:
            return config
        key = self._key(topic)
        if self.process == 0:
            text = json.dumps(None if config is None else json.loads(write(config)))
            self.messages.put(key, text)
            return config
        text = self._wait(key, 0, topic)
        return None if json.loads(text) is None else read(text)

    def slowest(self, topic: str, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the time of each candidate on the process where it is slowest.

        A candidate that failed or is missing on one of them has infinite time.

        Raises: ValueError where a process does not answer in time.
        """
        if self.messages is None:
            return dict(seconds)
        key = self._key(topic)
        finite = {name: time for name, time in seconds.items() if math.isfinite(time)}
        self.messages.put(f"{key}/{self.process}", json.dumps(finite))
        texts = [self._wait(f"{key}/{process}", process, topic) for process in range(self.processes)]
        found: list[dict[str, float]] = [json.loads(text) for text in texts]
        return {name: max(times.get(name, math.inf) for times in found) for name in found[0]}

    def _key(self, topic: str) -> str:
        """Return a new key for each time that a topic comes up: the processes count alike."""
        self._rounds[topic] = number = self._rounds.get(topic, 0) + 1
        return f"attest/{topic}/{number}"

    def _wait(self, key: str, process: int, topic: str) -> str:
        assert self.messages is not None
        try:
            return self.messages.get(key, self.seconds)
        except TimeoutError:
            raise ValueError(
                f"process {process}: got no answer on {topic} in {self.seconds:g} s; expected every process "
                "of the program to make the same call. See whether it still runs; give cfg, or tune ahead of "
                "time in one process."
            ) from None


@dataclass(frozen=True)
class _JaxService:
    """The service of `jax.distributed`."""

    client: Any

    def put(self, key: str, value: str) -> None:
        self.client.key_value_set(key, value)

    def get(self, key: str, seconds: float) -> str:
        try:
            return self.client.blocking_key_value_get(key, int(seconds * 1000))
        except Exception as error:  # XlaRuntimeError, of which JAX exports no class
            raise TimeoutError(str(error)) from error


_here: list[Agreement] = []


def agreement_here() -> Agreement:
    """Return the agreement of all processes of JAX; one alone where JAX is not distributed."""
    if not _here:
        client = _client()
        several = client is not None and jax.process_count() > 1
        _here.append(
            Agreement(jax.process_index(), jax.process_count(), _JaxService(client))
            if several
            else Agreement()
        )
    return _here[0]


def _client() -> Any:
    """Return the client of JAX's service, which JAX has no public name for; None where there is none."""
    from jax._src import distributed

    return distributed.global_state.client
