"""The emulator of tests/emulator as a subject: its roundings, with the visibility of the oracle."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from attest.conformance.cases.features import DTYPES, FEATURES
from attest.conformance.mutants.kernels.arguments import Options
from attest.conformance.mutants.kernels.callback import Arrays, Passes, call_back
from attest.conformance.subject import Subject, Tiling
from attest.reference.numerics import Numerics
from attest.reference.oracle import Cotangents
from attest.reference.problem import Problem, make_problem
from attest.reference.semantics import STANDARD
from tests.emulator.flash import Emulator, correct

KEY_BLOCK = 64


def subject(materialised: bool) -> Subject:
    """The emulated flash kernel, or the one that keeps its weights; with its own honest declaration."""
    return Subject(
        name=f"emulator.{'materialised' if materialised else 'flash'}",
        call=partial(call_back, Passes(partial(_forward, materialised), partial(_gradients, materialised))),
        features=frozenset(FEATURES) - ({"unnormalized"} if materialised else set()),
        dtypes=DTYPES,
        numerics=partial(_numerics, materialised),
        tilings=(Tiling({}, KEY_BLOCK, KEY_BLOCK),),
        returns_lse=True,
    )


def _numerics(materialised: bool, dtype: str, _tiling: Tiling) -> Numerics:
    return correct(dtype, materialised=materialised, key_block=KEY_BLOCK)[1]


def _emulator(materialised: bool, options: Options, arrays: Arrays) -> Emulator:
    problem = _problem(options, arrays)
    arithmetic, _ = correct(arrays["query"].dtype.name, materialised=materialised, key_block=KEY_BLOCK)
    return Emulator(problem, STANDARD, arithmetic)


def _problem(options: Options, arrays: Arrays) -> Problem:
    given: dict[str, Any] = {name: array for name, array in arrays.items() if name != "dropout_seed"}
    if "attention_mask" in given:
        given["attention_mask"] = given["attention_mask"] != 0
    if "dropout_seed" in arrays:
        low, high = (int(word) for word in arrays["dropout_seed"])
        given["dropout_seed"] = low + (high << 32)
    # It loads whole arrays, and so 0 in place of what no kernel may read.
    query, key, value = _clean(given.pop("query")), given.pop("key"), given.pop("value")
    return make_problem(
        query,
        key,
        value,
        softmax_scale=options.scale,
        dropout_prob=options.rate,
        causal=options.causal,
        sliding_window=options.window,
        logits_soft_cap=options.cap,
        normalize_output=options.normalized,
        **given,
    )


def _clean(array: Any) -> Any:
    return np.where(np.isfinite(array), array, np.zeros((), array.dtype))


def _forward(materialised: bool, options: Options, arrays: Arrays) -> tuple[Any, Any]:
    answer = _emulator(materialised, options, arrays).run()
    return answer["out"], answer["lse"]


def _gradients(
    materialised: bool, options: Options, arrays: Arrays, d_out: Any, d_lse: Any
) -> Mapping[str, Any]:
    cotangents = Cotangents(_clean(d_out), _clean(d_lse))
    answer = _emulator(materialised, options, arrays).run(cotangents)
    return {name[1:]: array for name, array in answer.items() if name.startswith("d")}


SUBJECTS = (subject(materialised=False), subject(materialised=True))
