"""A standalone script that calls a kernel as a failing case does, and compares it with attention in float64.

It needs JAX, NumPy and the kernel, and prints the largest difference of each output. It exits 1 if an element
differs by more than the limit that the error model gives it.
"""

import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from attest.conformance.judging.execute import call_of, differentiated
from attest.conformance.judging.failure import describe_case
from attest.conformance.judging.script.expected import expected_lines
from attest.conformance.judging.script.kernel import Kernel, kernel_of
from attest.conformance.judging.script.literals import ScriptError, array, limit, literal
from attest.conformance.judging.trial import Trial
from attest.conformance.record import ACCURACY
from attest.conformance.sizes import sizes
from attest.reference import judgements
from attest.reference.numerics import format_of

_IMPORTS = ("import jax", "import jax.numpy as jnp", "import numpy as np")
_WIDTH = 100
# Of a limit, how far the script's own values may be from the exact ones.
_SAME = 1e-3


def reproducer(trial: Trial, checks: Sequence[str], origin: str) -> str:
    """Return the text of the script for a case.

    checks: of ACCURACY; they decide which outputs it compares. origin: how attest runs the case again.
    Raises ScriptError with one sentence.
    """
    _refuse(trial, checks)
    subject, built = trial.subject, trial.built
    call = call_of(built)
    cotangents = {"d_out": built.cotangents.out}
    if subject.returns_lse:
        assert built.cotangents.lse is not None
        cotangents["d_lse"] = built.cotangents.lse
    backward = "gradients" in checks
    arrays = {**call.arrays, **(cotangents if backward else {})}
    _refuse_large(sum(values.size for values in arrays.values()))
    wanted = differentiated(subject, call)
    compared = _compared(trial, checks, wanted)
    every = ["out", *(["lse"] if subject.returns_lse else []), *(f"d{name}" for name in wanted if backward)]
    body = expected_lines(built.problem, subject.semantics, every, trial.has_empty_rows)
    limits = {name: _limits(trial, name) for name in compared}
    _prove(arrays, body, trial, limits)
    kernel = kernel_of(subject.call)
    options = dict(call.options) | dict(subject.tilings[trial.case.tiling].options)
    # The keywords of a call come before those of a partial.
    passed = kernel.keywords | {name: literal(value) for name, value in options.items()}
    keywords = [f"{name}={name}" for name in call.arrays if name not in ("query", "key", "value")]
    keywords += [f"{name}={value}" for name, value in passed.items()]
    _refuse_names(kernel, arrays)
    lines = [
        '"""Compare a kernel with attention in float64.',
        "",
        *textwrap.wrap(f"{describe_case(trial.case)}.", _WIDTH),
        f"With attest: {origin}",
        '"""',
        "",
        "import sys",
        "",
        *_IMPORTS,
        *sorted(kernel.imports - {*_IMPORTS}),
        "",
        *(line for text in kernel.definitions for line in ("", *text.splitlines(), "")),
        *([""] if kernel.definitions else []),
        *(line for name, values in arrays.items() for line in _wrapped(f"{name} = {array(values, 'jnp')}")),
        "",
        "",
        "@jax.jit",
        f"def run({', '.join(arrays)}):",
        f"    def forward({', '.join(wanted)}):",
        *_wrapped(f"return {kernel.expression}({', '.join(['query', 'key', 'value', *keywords])})", " " * 8),
        "",
        *_differentiated(subject.returns_lse, wanted, backward),
        "",
        "",
        f"got = run({', '.join(arrays)})",
        *_wrapped("\n".join(body)),
        *_wrapped(f"expected = {{{', '.join(f'{name!r}: {name}' for name in compared)}}}"),
        *_wrapped(f"limits = {{{', '.join(f'{name!r}: {limit(limits[name])}' for name in compared)}}}"),
        *_COMPARISON,
    ]
    return "\n".join(lines) + "\n"


_COMPARISON = """\
failed = False
for name, want in expected.items():
    values = np.asarray(got[name], np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where(values == want, 0.0, np.abs(values - want))
    wrong = ~(difference <= limits[name])
    failed |= bool(wrong.any())
    print(f"{name}: largest difference {difference.max():.4g}, {wrong.sum()} of {wrong.size} beyond a limit")
sys.exit(int(failed))""".splitlines()


def _refuse(trial: Trial, checks: Sequence[str]) -> None:
    others = [check for check in checks if check not in ACCURACY]
    if others:
        raise ScriptError(
            f"a script compares one call with attention in float64, as {', '.join(ACCURACY)} do; got "
            f"{others[0]}: replay the case without --script"
        )
    case = trial.case
    tokens = case.q_len * case.q_heads * case.head_dim, case.kv_len * case.kv_heads * case.head_dim
    _refuse_large(case.batch * sum(tokens))
    reason = trial.subject.why_not(trial.case)
    if reason is None and trial.out_of_range is None and trial.overflows:
        reason = "the logit of a visible pair may overflow float32"
    reason = reason or trial.out_of_range or ("the case has poison" if trial.case.poison else None)
    if reason is not None:
        raise ScriptError(f"there is no script of this case: {reason}")


def _refuse_large(count: int) -> None:
    most = sizes().script_numbers
    if count > most:
        raise ScriptError(
            f"the arrays of the case have {count} numbers, and a script shows at most {most}: use the "
            "simplest failing case, or replay this one with attest"
        )


def _compared(trial: Trial, checks: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return the outputs that the script compares."""
    names = ["out"] if "forward" in checks else []
    names += ["lse"] if "lse" in checks and trial.subject.returns_lse else []
    names += [f"d{name}" for name in wanted] if "gradients" in checks else []
    names = [name for name in names if trial.answer.items()[name].size]
    if not names:
        raise ScriptError(f"{trial.subject.name} returns nothing to compare in this case")
    return names


def _limits(trial: Trial, name: str) -> NDArray[np.float64]:
    """Return how far each element of an output may be off: by the bound, and by the limit of z."""
    case, want, prediction = trial.case, trial.answer.items()[name], trial.repeated_predictions[name]
    counted = np.isfinite(want) & (prediction.std > 0) & np.isfinite(prediction.std)
    most = judgements.limits(name, int(counted.sum()), case.kv_len, case.dtype, case.family).largest_z
    form = format_of(trial.built.problem.query.dtype)
    if (np.isfinite(want) & (np.abs(want) + prediction.bound >= form.overflow)).any():
        raise ScriptError(f"{name} may overflow {case.dtype} in this case, which a script does not judge")
    by_z = np.full(want.shape, np.inf)
    if np.isfinite(most):
        by_z[counted] = most * prediction.worst_std[counted]
    return np.where(np.isfinite(want), np.minimum(prediction.bound, by_z), 0.0)


def _prove(
    arrays: Mapping[str, NDArray[Any]],
    body: Sequence[str],
    trial: Trial,
    limits: Mapping[str, NDArray[np.float64]],
) -> None:
    """Run the lines that compute the expected values. Raises ScriptError where they are not the oracle's."""
    space: dict[str, Any] = {"np": np, **arrays}
    with np.errstate(all="ignore"):
        exec("\n".join(body), space)
        for name, most in limits.items():
            want, found = trial.answer.items()[name], space[name]
            near = (found == want) | (np.abs(found - want) <= _SAME * most)
            if found.shape != want.shape or not near.all():
                raise ScriptError(
                    f"the few lines of a script do not compute {name} of this case as {trial.subject.name} "
                    "declares it: replay it with attest"
                )


def _differentiated(returns_lse: bool, wanted: Sequence[str], backward: bool) -> list[str]:
    """Return the lines of `run` that call the kernel as attest does, under `jax.vjp`."""
    result = "(out, lse)" if returns_lse else "out"
    names = ["out", *(["lse"] if returns_lse else [])]
    if not wanted:
        lines = [f"    {result} = forward()"]
    else:
        lines = [f"    {result}, {'pull' if backward else '_'} = jax.vjp(forward, {', '.join(wanted)})"]
        if backward:
            gradients = [f"d{name}" for name in wanted]
            names += gradients
            seed = "(d_out, d_lse.astype(lse.dtype))" if returns_lse else "d_out"
            lines.append(f"    {', '.join(gradients)}{',' * (len(wanted) == 1)} = pull({seed})")
    return [*lines, *_wrapped(f"return {{{', '.join(f'{name!r}: {name}' for name in names)}}}", "    ")]


def _refuse_names(kernel: Kernel, arrays: Collection[str]) -> None:
    """Raise ScriptError where the kernel's source has a name that the script uses otherwise."""
    modules = {"sys": sys, "jax": jax, "jnp": jnp, "np": np}
    for name, thing in kernel.names.items():
        if name in (*arrays, "run", "got") or modules.get(name, thing) is not thing:
            raise ScriptError(f"call: it uses the name {name!r}, which the script needs itself: rename it")


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Return lines of source, long ones broken between the elements of their brackets."""
    lines: list[str] = []
    for line in text.split("\n"):
        own = len(line) - len(line.lstrip())
        start = indent + line[:own]
        lines += textwrap.wrap(
            line.strip(),
            _WIDTH,
            initial_indent=start,
            subsequent_indent=start + "    ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
