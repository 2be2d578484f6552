"""Trials: the arrays, the exact answer, its bounds and the outputs, shared by all checks of a case.

Each is computed when a check first uses it, and only once.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.build import Built, build
from attest.conformance.cases.case import Case
from attest.conformance.judging.contrast import (
    Gradients,
    Neighbourhood,
    blind_spots,
    has_empty_rows,
    neighbourhood,
)
from attest.conformance.judging.execute import Plain, call_plainly, execute
from attest.conformance.judging.kept_weights import kept_forward
from attest.conformance.subject import Subject
from attest.reference.defined import cap_in_range, logits_fit, scale_in_range
from attest.reference.error_model import Prediction, predict
from attest.reference.numerics import Numerics, coarse
from attest.reference.oracle import OUTPUTS, Answer, attention
from attest.reference.problem import Problem
from attest.reference.semantics import Semantics

# A case is chosen, judged and used once more, with few others in between.
_KEPT = 4


@dataclass(frozen=True)
class Trial:
    """A subject on a case."""

    subject: Subject
    case: Case

    @cached_property
    def built(self) -> Built:
        """The case's arrays; the cotangent of an lse that is not returned is 0.

        The dropout seed is cut to the bits that the subject supports.
        """
        built = _built(self.case, self.subject.semantics, self.subject.limits.seed_bits)
        if self.subject.returns_lse:
            return built
        silent = np.zeros((self.case.batch, self.case.q_heads, self.case.q_len), np.float32)
        return replace(built, cotangents=replace(built.cotangents, lse=silent))

    @cached_property
    def numerics(self) -> Numerics:
        """The arithmetic that the subject declares for this case."""
        return self.subject.numerics(self.case.dtype, self.subject.tilings[self.case.tiling])

    @property
    def own_dropout(self) -> bool:
        """Whether the case has dropout whose weights attest cannot predict (S12)."""
        return self.case.dropout > 0 and self.subject.semantics.dropout == "own_generator"

    @cached_property
    def problem(self) -> Problem:
        """The problem that the oracle answers: with the weights that the subject keeps by its own generator.

        Raises SubjectError.
        """
        if not self.own_dropout:
            return self.built.problem
        return replace(
            self.built.problem, dropout_keep=kept_forward(self.subject, self.built, self.case.tiling)
        )

    @cached_property
    def answer(self) -> Answer:
        """The exact outputs and gradients."""
        return attention(self.problem, self.subject.semantics, self.built.cotangents)

    @cached_property
    def predictions(self) -> dict[str, Prediction]:
        """The tolerance of a correct kernel, if all its roundings are independent."""
        return self._predict(self.numerics, repeats=False)

    @cached_property
    def repeated_predictions(self) -> dict[str, Prediction]:
        """The same if nearly equal values share their rounding: no deviation is smaller."""
        return self._predict(self.numerics, repeats=True)

    @cached_property
    def coarse_predictions(self) -> dict[str, Prediction]:
        """The tolerance of a kernel that loses precision in every step."""
        return self._predict(coarse(self.numerics), repeats=False)

    def _predict(self, numerics: Numerics, repeats: bool) -> dict[str, Prediction]:
        return predict(self.problem, self.subject.semantics, numerics, self.built.cotangents, repeats=repeats)

    @cached_property
    def blind_spots(self) -> tuple[str, ...]:
        """The features that the case cannot show; empty where it can show any defect."""
        semantics = self.subject.semantics
        names = OUTPUTS if self.subject.returns_lse else OUTPUTS[:1]
        if self.own_dropout:
            near = neighbourhood(self.problem, semantics)
        else:
            # The exact answer does not depend on the tiling.
            near = _neighbourhood(replace(self.case, tiling=0), semantics, self.subject.limits.seed_bits)
        # Predictions of only out and lse take little time, if nothing has been judged yet.
        known = vars(self).get("predictions")
        return blind_spots(
            near,
            known or predict(near.problem, semantics, self.numerics, repeats=False),
            lambda: Gradients(self.built.cotangents, self.answer, self.predictions),
            (*names, *(f"d{name}" for name in semantics.gradients)),
        )

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether some query row sees no key (S10)."""
        return has_empty_rows(self.built.problem, self.subject.semantics)

    @property
    def out_of_range(self) -> str | None:
        """The reason why kernels may refuse the scale or the cap (S1, S3), in one clause; None if none."""
        if self.case.scale is not None and not scale_in_range(self.case.scale):
            return f"a softmax_scale of {self.case.scale:g} is outside of the tested range"
        if self.case.soft_cap is not None and not cap_in_range(self.case.soft_cap):
            return f"a logits_soft_cap of {self.case.soft_cap:g} is outside of the tested range"
        return None

    @cached_property
    def overflows(self) -> bool:
        """Whether the products of a visible pair may overflow float32, so that the call is undefined."""
        return not logits_fit(self.built.problem, self.subject.semantics)

    @cached_property
    def unspecified(self) -> bool:
        """Whether the case has rows that see no key, whose results the subject leaves unspecified (S10)."""
        return self.subject.semantics.empty_rows == "unspecified" and self.has_empty_rows

    @cached_property
    def plain(self) -> Plain:
        """The results of an eager call without differentiation. Raises SubjectError."""
        return call_plainly(self.subject, self.built, self.case.tiling)

    @cached_property
    def outputs(self) -> dict[str, NDArray[Any]]:
        """The results of the kernel: out, lse and gradients. Raises SubjectError."""
        return execute(self.subject, self.built, self.case.tiling)


def _built(case: Case, semantics: Semantics, seed_bits: int) -> Built:
    """Make a case's arrays, with a dropout seed below 2**seed_bits."""
    built = build(case, semantics)
    if built.problem.dropout_seed is None:
        return built
    seed = built.problem.dropout_seed % 2**seed_bits
    return replace(built, problem=replace(built.problem, dropout_seed=seed))


@lru_cache(maxsize=_KEPT)
def _neighbourhood(case: Case, semantics: Semantics, seed_bits: int) -> Neighbourhood:
    """Return the exact answers around a case, from arrays that no kernel gets: some write to their inputs."""
    return neighbourhood(_built(case, semantics, seed_bits).problem, semantics)
