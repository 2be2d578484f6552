"""The chain that finds the configuration of a call: given, overlaid, cached, tuned, or from tables."""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.core import Tracer

from attest.kernels.operations.agreement import Agreement, agreement_here
from attest.kernels.operations.caches import ConfigCache, overlaid
from attest.kernels.operations.invocation import Invocation
from attest.kernels.operations.kernel import Kernel
from attest.kernels.operations.persistent import PersistentCache
from attest.kernels.operations.policy import AutotunePolicy
from attest.kernels.operations.timing import traced
from attest.kernels.operations.tuner import Tuner, TuningRecord

_LOG = logging.getLogger("attest.operations")


@dataclass(frozen=True)
class Step:
    """One step of the chain: whether it has a configuration, and why or why not."""

    name: str
    found: bool
    why: str

    def __str__(self) -> str:
        """Return one line."""
        return f"{self.name}: {'found' if self.found else 'no'}, {self.why}"


@dataclass(frozen=True)
class Explanation:
    """The way a call would be run.

    config: what the chain finds. steps: the steps that were taken, the last one found it. complete: the
    configuration with every size that the implementation chooses. unused: fields without effect, each with
    the reason. implementation: the name of what computes it, with what computes it without gradients
    where that is another one.
    """

    config: Any
    steps: tuple[Step, ...]
    complete: Any
    unused: tuple[str, ...] = ()
    implementation: str = ""

    def __str__(self) -> str:
        """Return a line for each step, and what runs."""
        by = f" by {self.implementation}" if self.implementation else ""
        lines = [*map(str, self.steps), f"runs{by}: {self.complete}"]
        return "\n".join([*lines, *(f"unused: {x}" for x in self.unused)])


class ConfigSelectorChain[Config, Out]:
    """A finder of the configuration of a call, by the first of these steps that has one.

    1. the call's own `cfg`; 2. `overlay_cache`; 3. the memory cache; 4. the persistent cache; 5. and 6.
    tuning and the operation's tables, in the order of the policy. Nothing is tuned while JAX traces,
    without a judge, or where the operation has no candidates; then the next step is tried.

    Each step is logged to "attest.operations" at the level debug, and on_event is called with its name,
    whether it found a configuration, and why.
    persist_autotune: whether winners are written to the persistent cache. agreement: how several processes
    find one configuration, by default JAX's own distributed service.
    """

    def __init__(
        self,
        cache: ConfigCache[Config] | None = None,
        policy: AutotunePolicy | None = None,
        tuner: Tuner | None = None,
        persistent: PersistentCache[Config] | None = None,
        persist_autotune: bool = True,
        on_event: Callable[[str, bool, str], None] | None = None,
        agreement: Agreement | None = None,
    ) -> None:
        """Join the parts; those that are left out are new, and there is no persistent cache."""
        self.cache = cache or ConfigCache[Config]()
        self.policy = policy or AutotunePolicy()
        self.tuner = tuner or Tuner()
        self.persistent = persistent
        self.persist_autotune = persist_autotune
        self.on_event = on_event
        self.agreement = agreement
        self._untunable: set[tuple[str, str, str]] = set()

    def choose(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        arguments: Mapping[str, Any] | None = None,
    ) -> Config:
        """Return the configuration of a call.

        arguments: the call's own, by name, to tune with; without them nothing is tuned.

        Raises: ValueError where no step may have one.
        """
        steps: list[Step] = []
        found = self._find(inv, kernel, arguments, steps)
        for step in steps:
            _LOG.debug("%s: %s", inv.op_id, step)
            if self.on_event is not None:
                self.on_event(step.name, step.found, step.why)
        return found

    def explain(self, inv: Invocation[Config, Out], kernel: Kernel[Config, Out]) -> Explanation:
        """Return how a call would be run, without tuning."""
        steps: list[Step] = []
        config = self._find(inv, kernel, None, steps)
        return Explanation(
            config,
            tuple(steps),
            kernel.complete(config, inv),
            kernel.unused(config, inv),
            kernel.implementation_of(config, inv),
        )

    def tune(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        arguments: Mapping[str, Any],
    ) -> TuningRecord[Config]:
        """Time the candidates of a call, keep the fastest right one in the caches, and return the record.

        Raises: ValueError without a judge, or where no candidate is right. Nothing is cached then.
        """
        record = self.tuner.tune(
            kernel, inv, arguments, backward=self.policy.validate_backward, agreement=self._agreement()
        )
        winner = record.winner()
        self.cache.put(*self._key(inv, kernel), winner)
        if self.persistent is not None and self.persist_autotune:
            try:
                key = self._key(inv, kernel)
                self.persistent.put(*key, winner, record.as_dict(), cfg_type=kernel.config_type)
            except ValueError as error:
                warnings.warn(f"{error} The configuration is kept in memory alone.", stacklevel=3)
        return record

    def _find(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        arguments: Mapping[str, Any] | None,
        steps: list[Step],
    ) -> Config:
        def note(name: str, found: bool, why: str) -> None:
            steps.append(Step(name, found, why))

        if inv.override_cfg is not None:
            note("explicit", True, "the call gives it")
            return kernel.check_cfg(inv.override_cfg, inv)
        config = overlaid(inv)
        if config is not None:
            note("overlay", True, "a block of overlay_cache has it")
            return kernel.check_cfg(config, inv)
        note("overlay", False, "no block of overlay_cache has it")
        config = self._from_caches(inv, kernel, note)
        part = None if config is not None or inv.mesh is None else kernel.part_of(inv)
        if part is not None:
            config = self._from_caches(part, kernel, note, ", as the part of one device")
        if config is not None:
            return config
        order = ["heuristics", "autotune"]
        if self.policy.cache_miss_fallback == "autotune":
            order.reverse()
        for step in order:
            by = self._by_tuning if step == "autotune" else self._by_tables
            config = by(inv, kernel, arguments, note)
            if config is not None:
                return config
        raise ValueError(
            f"policy: got {self.policy}; expected one that finds a configuration for {inv.op_id}: "
            f"{'; '.join(map(str, steps))}. Allow heuristics, or give cfg."
        )

    def _from_caches(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        note: Callable[[str, bool, str], None],
        what: str = "",
    ) -> Config | None:
        key = self._key(inv, kernel)
        config = self.cache.get(*key)
        if config is not None:
            note("memory", True, f"it was found or tuned in this process{what}")
            return config
        note("memory", False, f"the call is new in this process{what}")
        config = self._from_disk(key, inv, kernel, note)
        if config is not None:
            self.cache.put(*key, config)
        return config

    def _from_disk(
        self,
        key: tuple[str, str, str],
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        note: Callable[[str, bool, str], None],
    ) -> Config | None:
        if self.persistent is None:
            note("persistent", False, "there is no persistent cache")
            return None
        agreement = self._agreement()
        check = partial(kernel.check_cached, inv=inv)
        config = self.persistent.get(*key, cfg_type=kernel.config_type, check=check)
        if agreement.processes > 1:
            form = {"op_id": key[1], "cfg_type": kernel.config_type}
            config = agreement.first(
                f"config/{'/'.join(key)}",
                config,
                write=partial(self.persistent.to_json, **form),
                read=partial(self.persistent.from_json, **form),
            )
        path = self.persistent.path(*key)
        note("persistent", config is not None, f"{'in' if config is not None else 'there is no'} {path}")
        return config

    def _by_tuning(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        arguments: Mapping[str, Any] | None,
        note: Callable[[str, bool, str], None],
    ) -> Config | None:
        why_not = self._why_not_tuned(inv, kernel, arguments)
        if why_not is not None or arguments is None:
            note("autotune", False, why_not or "the call gives no arrays")
            return None
        try:
            record = self.tune(inv, kernel, arguments)
        except ValueError as error:
            self._untunable.add(self._key(inv, kernel))
            warnings.warn(f"{inv.op_id} was not tuned: {error}", stacklevel=6)
            note("autotune", False, str(error))
            return None
        note("autotune", True, record.summary())
        return record.winner()

    def _why_not_tuned(
        self, inv: Invocation[Config, Out], kernel: Kernel[Config, Out], arguments: Mapping[str, Any] | None
    ) -> str | None:
        if not self.policy.allow_autotune:
            return "the policy does not allow it"
        if self.tuner.judge is None:
            return "no judge is installed: install attest-attention[suite]"
        if self._key(inv, kernel) in self._untunable:
            return "it failed before in this process"
        if arguments is None or traced() or _has_tracers(arguments):
            return "JAX traces the call, or it has no arrays; use executor.tune ahead of time"
        if inv.mesh is not None:
            return "the call has a mesh; use executor.tune ahead of time"
        if len(list(kernel.candidate_cfgs(inv))) < 2:
            return "the operation has one configuration"
        return None

    def _by_tables(
        self,
        inv: Invocation[Config, Out],
        kernel: Kernel[Config, Out],
        arguments: Mapping[str, Any] | None,
        note: Callable[[str, bool, str], None],
    ) -> Config | None:
        if not self.policy.allow_heuristics:
            note("heuristics", False, "the policy does not allow it")
            return None
        note("heuristics", True, "the operation's tables have it")
        return kernel.heuristic_cfg(inv)

    def _key(self, inv: Invocation[Config, Out], kernel: Kernel[Config, Out]) -> tuple[str, str, str]:
        environment, op_id, _ = inv.key
        return environment, op_id, inv.make_key(kernel.key_builder)

    def _agreement(self) -> Agreement:
        return agreement_here() if self.agreement is None else self.agreement


def _has_tracers(arguments: Mapping[str, Any]) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(dict(arguments)))
