"""Laws of algebra: out is linear in the values, and the gradients are linear in the cotangents."""

from collections.abc import Callable, Sequence

import numpy as np

from attest.conformance.checks.laws.law import (
    GRADIENTS,
    NAMES,
    Array,
    Called,
    Equation,
    Outputs,
    Rewrite,
    changed,
    output_of,
    same,
    total,
    with_cotangents,
)
from attest.conformance.judging.trial import Trial

Size = Callable[[Array], Array]


def _parts(array: Array) -> tuple[Array, Array]:
    """Return two arrays of which an array is the sum, exactly: each has zeros where the other has numbers."""
    odd = np.indices(array.shape).sum(axis=0) % 2 == 1
    zero = np.zeros_like(array)
    return np.where(odd, array, zero), np.where(odd, zero, array)


def values(trial: Trial) -> Rewrite:
    """Split the values; the cotangent of lse goes to the first part."""
    built = trial.built
    first, second = _parts(built.problem.value)
    lse = np.asarray(built.cotangents.lse)
    calls = (
        Called(built),
        Called(changed(built, value=first)),
        Called(with_cotangents(changed(built, value=second), built.cotangents.out, np.zeros_like(lse))),
    )
    sums = total("out", "dquery", "dkey", "dbias", "dsoftmax_aux")
    return Rewrite(calls, (*sums, *same("lse", "dvalue", calls=(1, 2))))


def cotangents(trial: Trial) -> Rewrite:
    """Split the cotangents of out and lse."""
    built = trial.built
    outs, lses = _parts(built.cotangents.out), _parts(np.asarray(built.cotangents.lse))
    parts = (Called(with_cotangents(built, out, lse)) for out, lse in zip(outs, lses, strict=True))
    return Rewrite((Called(built), *parts), total(*GRADIENTS))


def negated(trial: Trial) -> Rewrite:
    """Change the signs of the values and of the cotangent of out."""
    built = trial.built
    other = with_cotangents(
        changed(built, value=-built.problem.value), -built.cotangents.out, np.asarray(built.cotangents.lse)
    )
    odd = {"out", "dvalue"}

    def side(name: str) -> Equation:
        sign = np.array(-1.0 if name in odd else 1.0)
        return Equation(name, output_of(name), lambda calls, size: size(sign) * calls[1][name])

    return Rewrite((Called(built), Called(other)), tuple(side(name) for name in NAMES))


def value_adjoint(trial: Trial) -> Rewrite:
    """Compare values times their gradient with out times its cotangent, summed for each key head."""
    return _adjoint(trial, "dvalue", trial.built.problem.value, "out", trial.built.cotangents.out)


def query_key_adjoint(trial: Trial) -> Rewrite:
    """Compare the products of queries with their gradient and of keys with theirs, for each key head."""
    problem = trial.built.problem
    return _adjoint(trial, "dkey", problem.key, "dquery", problem.query)


def _adjoint(trial: Trial, by_key: str, keys: Array, by_row: str, rows: Array) -> Rewrite:
    """Compare the products of an output by key with keys, and of one by row with rows, for each key head."""
    keys, rows, group = keys.astype(np.float64), rows.astype(np.float64), trial.built.problem.group

    def left(calls: Sequence[Outputs], size: Size) -> Array:
        return (calls[0][by_key] * size(keys)).sum(axis=(1, 3), keepdims=True)

    def right(calls: Sequence[Outputs], size: Size) -> Array:
        return _by_key_head(calls[0][by_row] * size(rows), group)

    return Rewrite((Called(trial.built),), (Equation(by_key, left, right),))


def _by_key_head(products: Array, group: int) -> Array:
    """Return the sums [B, 1, Hkv, 1] of products [B, Sq, Hq, D] over rows, channels and heads of a group."""
    sums = products.sum(axis=(1, 3))
    return sums.reshape(len(sums), 1, -1, group).sum(axis=3)[..., None]


def constant_value(trial: Trial) -> Rewrite | str:
    """Give all keys of a batch entry and head one value: out is this value in every row that sees a key."""
    built = trial.built
    problem = built.problem
    first = problem.value[:, :1]
    other = changed(built, value=np.broadcast_to(first, problem.value.shape).copy())
    expected = np.repeat(first.astype(np.float64), problem.group, axis=2)

    def right(calls: Sequence[Outputs], size: Size) -> Array:
        out = calls[0]["out"]
        if size is np.abs:
            return np.zeros_like(out)
        # A row that sees no key is 0 (S10), in all channels.
        seen = (out != 0).any(axis=-1, keepdims=True)
        return np.where(seen, expected, 0.0)

    if not (expected != 0).any():
        return "the value is zero"
    return Rewrite((Called(other),), (Equation("out", output_of("out"), right),))
