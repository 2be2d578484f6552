"""Subjects: a kernel under test and everything it declares about itself.

A Subject is a promise. For every Case whose features it lists, in every dtype it lists, it should be the
case that

- `call(query, key, value, **options)` equals the oracle's answer under `semantics`, within the error that
  `numerics` predicts, and so do its gradients by `jax.vjp`;
- whatever it does not list is refused by name, when it is called.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal, get_args

from attest.conformance.cases.case import Case
from attest.conformance.cases.features import ALL_FEATURES, DTYPES
from attest.conformance.text import nearest
from attest.reference.numerics import Numerics, format_of
from attest.reference.oracle import OUTPUTS
from attest.reference.semantics import STANDARD, Semantics

ENTRY_POINT_GROUP = "attest.subjects"
BACKENDS = ("any", "cpu", "gpu", "tpu")

# The sums of CUDA's matrix unit, as fields of Numerics: of 16 products of 16 bits at once, truncated.
CUDA_MATRIX_UNIT = {"accumulator": 2.0**-23, "truncated": 16}

WindowSides = Literal["both", "left"]
Sinks = Literal["any", "shared", "per_head"]
GradientDtype = Literal["input", "float32"]
Mesh = Literal["explicit", "automatic"]

# Features that place a call's weights among the counters of a known generator (S12).
_COUNTED = frozenset({"origin", "shared_dropout"})

# The name of a field, what was got, whether it is right, and what was expected.
type _Declared = tuple[str, object, bool, str]


@dataclass(frozen=True)
class Tiling:
    """One choice of block sizes: the keyword arguments that make it, and its blocks in tokens.

    A block is None where the kernel works in one piece. Lengths are drawn around the edges of the blocks.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    query_block: int | None = None
    key_block: int | None = None


@dataclass(frozen=True)
class Way:
    """One way in which a call gets its configuration, and what should run then.

    name: in a few words, such as "an overlay". call: as `Subject.call`. meant: calls the kernel itself with
    the configuration that should run. others: by a name of the configuration, calls of the kernel with those
    that should not.
    """

    name: str
    call: Callable[..., Any]
    meant: Callable[..., Any]
    others: Mapping[str, Callable[..., Any]]


def _require(owner: str, *declared: _Declared) -> None:
    """Raise ValueError for the first declaration that is wrong."""
    for name, got, right, expected in declared:
        if not right:
            raise ValueError(f"{owner}, {name}: got {got!r}, expected {expected}")


def _one_of(name: str, got: str, kind: Any) -> _Declared:
    known = get_args(kind)
    return name, got, got in known, f"one of {known}"


def _some_of(name: str, got: frozenset[str], known: Iterable[str]) -> _Declared:
    return name, sorted(got), got <= set(known), f"some of {list(known)}"


@dataclass(frozen=True)
class Limits:
    """The limits of a kernel within the features that it declares; by default it has none.

    longest: the most query or key tokens that it computes in reasonable time. Problems of production
        size are given to subjects that declare enough.
    excludes: sets of features that one call may not combine, such as {"mask", "bias"}.
    window_sides: "both", or "left" for a window that never reaches past the diagonal: (left, 0), or
        (left, None) together with `causal`, with an integer on the left.
    sinks: "shared" for sinks that all heads have in common, "per_head" for each head's own, "any" for both.
    length_multiple: Sq and Sk are multiples of this; the sequences that `cum_seqlens_q` and
        `cum_seqlens_k` lay out in them may have any length.
    head_dim_multiple: the head dims of query, key and value are multiples of this.
    seed_bits: dropout seeds are below 2**seed_bits.
    origin_multiple: the key of an `origin` is a multiple of this.
    batch_dims: whether arrays may have any number of batch dimensions (S27); if not, they have one.
    traces: whether it traces its arrays, as a function does that calls its kernel in `jax.jit`: a kernel
        cannot see what values traced arrays have, so no check expects it to refuse them.
    validates: whether it checks its arguments. If False, no check `refusal.*` applies to it: it is called
        only as it declares, and nothing is concluded about other calls.

    Raises ValueError if a limit is invalid.
    """

    longest: int = 2048
    excludes: tuple[frozenset[str], ...] = ()
    window_sides: WindowSides = "both"
    sinks: Sinks = "any"
    length_multiple: int = 1
    head_dim_multiple: int = 1
    seed_bits: int = 64
    origin_multiple: int = 1
    batch_dims: bool = False
    traces: bool = False
    validates: bool = True

    def __post_init__(self) -> None:
        _require(
            "limits",
            ("longest", self.longest, self.longest >= 1, "at least 1"),
            (
                "excludes",
                [sorted(together) for together in self.excludes],
                all(len(together) > 1 and together <= set(ALL_FEATURES) for together in self.excludes),
                f"frozensets of two or more of {list(ALL_FEATURES)}",
            ),
            _one_of("window_sides", self.window_sides, WindowSides),
            _one_of("sinks", self.sinks, Sinks),
            ("length_multiple", self.length_multiple, self.length_multiple >= 1, "at least 1"),
            ("head_dim_multiple", self.head_dim_multiple, self.head_dim_multiple >= 1, "at least 1"),
            ("seed_bits", self.seed_bits, 1 <= self.seed_bits <= 64, "1 to 64"),
            ("origin_multiple", self.origin_multiple, self.origin_multiple >= 1, "at least 1"),
        )

    def why_not(self, case: Case) -> str | None:
        """Return why a kernel with these limits does not take a case, in a few words; None if it should."""
        if max(case.q_len, case.kv_len) > self.longest:
            return f"takes at most {self.longest} tokens"
        for together in self.excludes:
            if together <= case.features:
                return f"does not combine {' and '.join(sorted(together))}"
        if case.q_len % self.length_multiple or case.kv_len % self.length_multiple:
            return f"takes lengths that are multiples of {self.length_multiple}"
        if case.head_dim % self.head_dim_multiple or case.value_width % self.head_dim_multiple:
            return f"takes head dims that are multiples of {self.head_dim_multiple}"
        if self.window_sides == "left" and case.window is not None:
            left, right = case.window
            if left is None or not (right == 0 or (right is None and case.causal)):
                return "takes windows to the left of the diagonal"
        if case.origin is not None and case.origin[3] % self.origin_multiple:
            return f"takes origins whose key is a multiple of {self.origin_multiple}"
        if case.sinks and self.sinks == ("shared" if case.sinks_per_head else "per_head"):
            return f"takes {self.sinks} sinks"
        return None


@dataclass(frozen=True)
class Sharding:
    """The meshes over which its calls may be split (S21); by default there are none.

    meshes: on which kinds of meshes, "explicit" and "automatic", batch and heads may be sharded.
    features: those of the kernel that such a sharded call may have.
    bits: the outputs of a sharded call, such as "out" and "dquery", with the bits of one device.
    sequence: whether each call splits the sequence over devices. The tilings give the number of devices and
        the strategy. There are fewer cases, because each is compiled for all devices.

    Raises ValueError for a mesh of another kind.
    """

    meshes: tuple[Mesh, ...] = ()
    features: frozenset[str] = frozenset()
    bits: frozenset[str] = frozenset()
    sequence: bool = False

    def __post_init__(self) -> None:
        kinds = get_args(Mesh)
        _require("sharding", ("meshes", self.meshes, set(self.meshes) <= set(kinds), f"some of {kinds}"))


def default_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return the usual contract: float32 accumulators and softmax, weights cast to the inputs' dtype."""
    cast = format_of(dtype)
    return Numerics(
        output_dtype=dtype,
        weights=cast.unit,
        half_subnormal=cast.half_subnormal,
        key_block=tiling.key_block,
    )


@dataclass(frozen=True)
class Subject:
    """A kernel under test.

    name: its name in verdicts: library and kernel, separated by a dot.
    call: takes query, key, value as JAX arrays, and only those options that a case switches on, under the
        names of docs/reference/semantics.md; returns out, or (out, lse) if `returns_lse`.
    features: of `attest.conformance.cases.features.ALL_FEATURES`. dtypes: of DTYPES.
    numerics: from dtype name and Tiling to the arithmetic that the kernel declares.
    backend: where it runs, one of BACKENDS. head_dims: the smallest and the largest that it takes.
    tilings: the choices of block sizes to test, the production one last.
    limits: the forms of its features that it does not support. sharding: how its calls may be split over
        devices.
    ready: None, or why this process cannot run it, in one clause.
    implementation: from a case to the name of the implementation that should run, one of
        `attest.conformance.checks.implementation`, or to those of which one should run each pass; for a
        subject that hands its calls to kernels which are subjects themselves, and so gets fewer cases. None
        for a kernel.
    ways: in which a call may get its configuration; the check `configuration` compares the programs.
    violations: accesses outside its arrays (S19) that an instrument saw since the last call of this, each a
        sentence by `str`; they fail the check that was running.
    unjudged: features that it accepts without a promise about the results: no case has them, no refusal is
        expected.
    gradient_dtype: the dtype of the gradients that it returns: "input" for each input's own (S14), or
        "float32".
    distribution: the name on PyPI of what the kernel is a part of, such as "jax", whose version a record
        then has; "" for attest. version: finds that version where the kernel runs in another environment.
    interpreter: whose interpreter runs it in place of a device, such as "Triton"; "" if a device runs it.

    Raises ValueError if a declaration is invalid.
    """

    name: str
    call: Callable[..., Any]
    features: frozenset[str] = frozenset()
    dtypes: tuple[str, ...] = ("float32",)
    semantics: Semantics = STANDARD
    numerics: Callable[[str, Tiling], Numerics] = default_numerics
    backend: str = "any"
    head_dims: tuple[int, int] = (1, 256)
    tilings: tuple[Tiling, ...] = (Tiling(),)
    returns_lse: bool = False
    limits: Limits = Limits()
    sharding: Sharding = Sharding()
    ready: Callable[[], str | None] = lambda: None
    implementation: Callable[[Case], str | frozenset[str]] | None = None
    ways: tuple[Way, ...] = ()
    violations: Callable[[], Sequence[object]] = lambda: ()
    unjudged: frozenset[str] = frozenset()
    gradient_dtype: GradientDtype = "input"
    distribution: str = ""
    version: Callable[[], str] | None = None
    interpreter: str = ""

    def __post_init__(self) -> None:
        owner = f"subject {self.name!r}"
        for name, got, kind in (("limits", self.limits, Limits), ("sharding", self.sharding, Sharding)):
            _require(owner, (name, got, type(got) is kind, f"attest.{kind.__name__}(...)"))
        outputs = {*OUTPUTS, *(f"d{name}" for name in self.semantics.gradients)}
        multiple = self.limits.head_dim_multiple
        _require(
            owner,
            ("name", self.name, bool(self.name) and not any(c.isspace() for c in self.name), "a dotted name"),
            ("call", self.call, callable(self.call), "a callable"),
            _some_of("features", self.features, ALL_FEATURES),
            (
                "dtypes",
                self.dtypes,
                bool(self.dtypes) and set(self.dtypes) <= set(DTYPES),
                f"some of {DTYPES}",
            ),
            ("backend", self.backend, self.backend in BACKENDS, f"one of {BACKENDS}"),
            ("head_dims", self.head_dims, 1 <= self.head_dims[0] <= self.head_dims[1], "(smallest, largest)"),
            (
                "head_dims",
                self.head_dims,
                self.head_dims[1] // multiple * multiple >= self.head_dims[0],
                f"a range with a multiple of {multiple}, limits.head_dim_multiple",
            ),
            ("tilings", self.tilings, bool(self.tilings), "at least one Tiling"),
            _some_of("sharding.features", self.sharding.features, sorted(self.features)),
            _some_of("sharding.bits", self.sharding.bits, sorted(outputs)),
            (
                "unjudged",
                sorted(self.unjudged),
                self.unjudged <= set(ALL_FEATURES) - self.features,
                f"some of {list(ALL_FEATURES)} that are not among its features",
            ),
            _one_of("gradient_dtype", self.gradient_dtype, GradientDtype),
            (
                "distribution",
                self.distribution,
                not any(c.isspace() for c in self.distribution),
                "a name on PyPI, such as 'jax'",
            ),
            (
                "features",
                sorted(self.features & _COUNTED),
                self.semantics.dropout != "own_generator" or not self.features & _COUNTED,
                "none of them with Semantics(dropout='own_generator'), whose counters are not known",
            ),
        )

    def why_not_here(self, backend: str) -> str | None:
        """Return why the subject cannot run in this process, on a backend, in one clause; None if it can."""
        if self.backend not in ("any", backend):
            advice = "; JAX_PLATFORMS=cpu makes JAX use it" if self.backend == "cpu" else ""
            return f"runs on {self.backend}, this machine has {backend}{advice}"
        return self.ready()

    def why_not(self, case: Case) -> str | None:
        """Return why the subject does not take a case, in a few words; None if it should."""
        missing = sorted(case.features - self.features)
        if missing:
            return f"does not declare {', '.join(missing)}"
        if case.dtype not in self.dtypes:
            return f"does not declare {case.dtype}"
        if (
            not self.head_dims[0]
            <= min(case.head_dim, case.value_width)
            <= max(case.head_dim, case.value_width)
            <= self.head_dims[1]
        ):
            return f"takes head dims {self.head_dims[0]} to {self.head_dims[1]}"
        if case.tiling >= len(self.tilings):
            return f"has {len(self.tilings)} tilings"
        if case.poison and self.semantics.hidden_nonfinite == "leaks":
            return "multiplies what is hidden by 0, so that NaN stored there leaks"
        return self.limits.why_not(case)


def discover() -> dict[str, Callable[[], Subject]]:
    """Return a loader of every subject on this machine, by name.

    Ours are the modules of `attest.conformance.subjects` and `attest.conformance.peers`, each with a tuple
    SUBJECTS; others' are the entry points of the group `attest.subjects`. An entry point is loaded only when
    its loader is called, so that a broken one spoils nothing else.
    """
    found: dict[str, Callable[[], Subject]] = {}
    for package_name in ("attest.conformance.subjects", "attest.conformance.peers"):
        for module in modules_of(importlib.import_module(package_name)):
            for subject in module.SUBJECTS:
                found[subject.name] = lambda subject=subject: subject
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        found[entry.name] = lambda entry=entry: _as_subject(entry.load(), entry.value)
    return found


def find(name: str) -> Subject:
    """Return the subject of a name, or of a `module:attribute`.

    Raises LookupError with one sentence: which names there are, or why loading failed.
    """
    try:
        if ":" in name:
            return _load_attribute(name)
        known = discover()
        if name in known:
            return known[name]()
        advice = nearest(name, sorted(known), "`attest list` has the names")
        raise LookupError(f"unknown subject {name!r}, expected a name or module:attribute: {advice}")
    except LookupError:
        raise
    except Exception as error:
        raise LookupError(f"subject {name!r} cannot be loaded: {type(error).__name__}: {error}") from error


def modules_of(package: ModuleType) -> Iterator[ModuleType]:
    """Yield the modules of a package without those that others share, whose names begin with _."""
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            yield importlib.import_module(f"{package.__name__}.{info.name}")


def listed_in(package: ModuleType, *tuples: str) -> dict[str, Subject]:
    """Return the subjects in tuples, such as APART, of the modules of a package, by their `module:NAME`."""
    found: dict[str, Subject] = {}
    for module in modules_of(package):
        names = {id(value): name for name, value in vars(module).items()}
        subjects: list[Subject] = [each for name in tuples for each in getattr(module, name, ())]
        found |= {f"{module.__name__}:{names[id(subject)]}": subject for subject in subjects}
    return found


def _load_attribute(path: str) -> Subject:
    module_name, _, attribute = path.partition(":")
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        advice = nearest(attribute, [each for each in vars(module) if not each.startswith("_")], "")
        raise LookupError(f"module {module_name!r} has no attribute {attribute!r}: {advice}".rstrip(": "))
    return _as_subject(getattr(module, attribute), path)


def _as_subject(thing: object, origin: str) -> Subject:
    if not isinstance(thing, Subject):
        raise LookupError(f"{origin} is a {type(thing).__name__}, expected an attest.Subject")
    return thing
