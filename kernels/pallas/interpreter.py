"""Pallas's interpreter of TPU kernels, with races and accesses outside arrays as violations.

The interpreter simulates the memories of a TPU with two cores, between which it divides the parallel axes of
a grid, in an order that a seed shuffles; what is uninitialised is NaN, or the largest integer. It tells of a
race by printing, of an access outside an array by an exception that leaves its state unusable, and it says of
every kernel that it has effects, as no kernel on a TPU does: such kernels cannot be mapped or recomputed.

Here a launch is one callback without effects, within which the interpreter runs; one runs at a time, because
its state is global. Races and accesses outside arrays are kept for `drain_violations`, and a launch that came
to such an access fills its outputs with what stands for uninitialised.

A launch waits in a thread of XLA's pool, which by default has one for each core of the machine, while what it
waits for needs threads too. So the process must have been started with PJRT_NPROC=8, or more. The first use
changes the interpreter for the rest of the process, by the names that jax 0.11 gives its parts.
"""

import os
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callbacks
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as _interpreter
from jax._src.pallas.mosaic.interpret import params as _params
from jax._src.pallas.mosaic.interpret import race_detection_state as _races
from jax._src.pallas.mosaic.interpret import thread_map as _threads
from jax._src.pallas.mosaic.interpret import utils as _utils
from jax.experimental.pallas import tpu as pltpu

# None of these is public: a checker knows no types of theirs.
stock: Any = _interpreter
params: Any = _params
races: Any = _races
threads: Any = _threads
utils: Any = _utils
callbacks: Any = _callbacks

CORES = 2
# Launches that do not depend on each other wait at the same time: the three of a backward pass, and more.
THREADS = 8
# How the interpreter begins to say that something was read or written where it must not be.
_ACCESSES = ("Out-of-bounds", "Revisited block")
# Compiling takes longer than running, here.
_QUICKLY = {"xla_backend_optimization_level": 0}


@dataclass(frozen=True)
class Violation:
    """A violation by a kernel (clause S19).

    kernel: its name. kind: "race", two cores at one place of which one writes, with nothing that orders them;
    "access", outside an array, or to a block of an output that was left before. what: the first of its like,
    as the interpreter describes it.
    """

    kernel: str
    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.what}"


_running = Lock()
_reporting = Lock()
_found: dict[tuple[str, ...], Violation] = {}


@contextmanager
def interpreted(seed: int) -> Generator[None]:
    """Interpret every Pallas kernel traced within the block, in an order that the seed decides.

    Wrap the trace of the backward pass too: `jax.vjp` may come to it later.

    Raises: RuntimeError in a process that has too few threads for it.
    """
    _prepare()
    chosen = pltpu.InterpretParams(
        detect_races=True,
        num_cores_or_threads=CORES,
        random_seed=seed,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
    )
    with pltpu.force_tpu_interpret_mode(chosen):
        yield


def drain_violations() -> tuple[Violation, ...]:
    """Return what was found since the last call, one of each like; from any thread."""
    with _reporting:
        found = tuple(_found.values())
        _found.clear()
    return found


def _report(kernel: str, kind: str, what: str, like: str) -> None:
    with _reporting:
        _found.setdefault((kernel, kind, like), Violation(kernel, kind, what))


@cache
def _prepare() -> None:
    """Change the interpreter, once for the process."""
    threads_asked = os.environ.get("PJRT_NPROC", "")
    if not (threads_asked.isdigit() and int(threads_asked) >= THREADS):
        raise RuntimeError(
            f"attest.kernels.pallas.interpreter: got PJRT_NPROC={threads_asked!r}, expected at least "
            f"{THREADS}: with fewer threads XLA may wait for itself. Set it before the process starts."
        )
    params.get_interpret_effects = set[Any]
    stock.interpret_pallas_call = partial(_launch, stock.interpret_pallas_call)
    stock._get_parallel_dim_semantics = partial(_with_mapped_axes, stock._get_parallel_dim_semantics)
    threads._run_jaxpr = _run_core
    callbacks.io_callback_impl = partial(_call_back, callbacks.io_callback_impl)


def _launch(plain: Callable[..., Any], *arrays: Any, out_avals: Any, name: str | None, **details: Any) -> Any:
    """Return what stands for a launch in a program: a callback that interprets it whole."""
    run = jax.jit(partial(plain, out_avals=out_avals, name=name, **details), compiler_options=_QUICKLY)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in out_avals]
    return jax.pure_callback(partial(_interpret, run, name or "kernel", outputs), outputs, *arrays)


def _interpret(run: Callable[..., Any], name: str, outputs: Any, *arrays: Any) -> list[Any]:
    with _running:
        races.print = partial(_note_race, name)
        try:
            # In a thread of Python's: JAX traces and compiles there, which takes more stack than XLA's have.
            with ThreadPoolExecutor(1) as executor:
                return [np.array(x) for x in executor.submit(run, *map(np.array, arrays)).result()]
        except Exception as error:
            # XLA hands on the text of what a callback raised, its last line being the exception itself.
            lines = (line.partition("Error: ")[2] for line in str(error).splitlines())
            what = next((line for line in lines if line.startswith(_ACCESSES)), None)
            if what is None:
                raise
            _report(name, "access", what, what.partition(" in iteration ")[0])
            return [_uninitialized(x) for x in outputs]
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def _uninitialized(x: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.full(x.shape, utils.get_uninitialized_value(x.dtype, "nan"), x.dtype)


def _note_race(kernel: str, text: str) -> None:
    """Report a race, which is printed as two accesses, each a line "write of ... from core, place"."""
    accesses = [
        line.strip() for line in text.splitlines() if line.lstrip().startswith(("read of", "write of"))
    ]
    places = [access.partition(" of ")[0] + access.rpartition(", ")[2] for access in accesses]
    _report(kernel, "race", f"a race between a {' and a '.join(accesses)}", " ".join(sorted(places)))


def _with_mapped_axes(plain: Callable[..., Any], details: Any, axes: int) -> tuple[bool, ...]:
    """Return which axes of a grid are parallel: those that `jax.vmap` puts first are, as on a TPU."""
    own = plain(details, axes)
    return (True,) * (axes - len(own)) + own


_compiling = Lock()
_compiled: dict[int, tuple[Any, Any]] = {}


def _run_core(jaxpr: Any, consts: Any, *arguments: Any) -> None:
    """Run a core's part of a grid, compiled once and not for every core of every launch."""
    with _compiling:
        if id(jaxpr) not in _compiled:
            traced = jax.jit(threads._run, static_argnums=(0,)).trace(jaxpr, consts, *arguments)
            _compiled[id(jaxpr)] = traced.lower().compile(_QUICKLY), jaxpr  # kept: its id stays its own
    _compiled[id(jaxpr)][0](consts, *arguments)


def _call_back(plain: Callable[..., Any], *arguments: Any, callback: Any, **details: Any) -> Any:
    """Call back without the costly part: arrays on a device of all that is then used as numbers."""
    function = callback.callback_func
    while isinstance(function, partial):
        function = function.func
    if getattr(function, "__module__", None) != stock.__name__:
        return plain(*arguments, callback=callback, **details)
    return jax.tree.map(np.asarray, callback(*(np.array(x) for x in arguments)))
