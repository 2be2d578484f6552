"""Semantics: the choices of a kernel where the kernels of the field differ.

`STANDARD` is what this project calls attention. A kernel that answers otherwise declares a dialect, a
`Semantics` with other choices, and is then held to exactly what it declared.
"""

from dataclasses import dataclass
from typing import Literal

GRADIENTS = ("query", "key", "value", "bias", "softmax_aux")
OPTIONS = (
    "attention_mask",
    "bias",
    "softmax_scale",
    "dropout_prob",
    "dropout_seed",
    "dropout_shared",
    "causal",
    "cum_seqlens_q",
    "cum_seqlens_k",
    "sliding_window",
    "logits_soft_cap",
    "softmax_aux",
    "q_segment_ids",
    "kv_segment_ids",
    "normalize_output",
    "q_offset",
    "q_positions",
    "kv_positions",
    "origin",
    "chunk_size",
    "kv_start",
    "kv_end",
    "alibi_slopes",
)
# Who ignores the first must ignore the second, or its answer has no meaning.
_TOGETHER = (
    ("cum_seqlens_q", "cum_seqlens_k"),
    ("cum_seqlens_k", "cum_seqlens_q"),
    ("q_segment_ids", "kv_segment_ids"),
    ("kv_segment_ids", "q_segment_ids"),
    ("dropout_seed", "dropout_prob"),
)


@dataclass(frozen=True)
class Semantics:
    """The choices of one kernel, one field a question; the clause of docs/reference/semantics.md behind each.

    default_scale (S1): the scale where `softmax_scale` is None.
    bias (S2, S25): added to the scaled logits before the cap, to q.k before the scale, or after the cap.
        The term of ALiBi is added with it.
    hidden (S4): a hidden key is absent, or its logit is replaced by the finite `sentinel`, so that rows
        with nothing better to see still weigh it, and what is stored under it may leak.
    hidden_nonfinite (S4): NaN and inf that are stored where nothing is seen are ignored, or leak, because
        the kernel multiplies them by weights of 0. What leaks where is not judged.
    precedence (S5): all conditions hold together; a bias makes the mask ignored; causal makes it ignored.
    causal, window (S6, S7): the diagonal ends in the bottom-right or starts in the top-left corner, where
        no offset and no positions of the queries are given (S23).
    window_zero (S7): a side of 0 stops at the diagonal, or means that the side is unbounded.
    window_edges (S7): the outermost key of the window is in it, or just outside.
    segments (S8): equal ids see each other if both are non-negative, or whatever they are.
    empty_rows (S10): the output of a row in which neither a key nor a sink has a weight. "unspecified" is
        not judged.
    sinks (S11): sink logits enter the normaliser as given, or capped like the others.
    dropout (S12): how the Philox counter is formed, see `attest.reference.dropout`; `dropout_chunk` is the
        number of keys that share a generator key where it is split per chunk. "own_generator": no counter
        is known, and a problem gives the kept weights.
    lse_base (S13): the logarithm of lse.
    gradients, lse_gradient (S14): the inputs that the kernel differentiates, and whether the cotangent of
        lse counts.
    deterministic (S17): whether equal inputs give bit-identical results.
    row_max_gradient (S26): whether the row maximum, by which an output that is not normalised is scaled, is
        held constant or differentiated. Those that attain the maximum share its gradient equally.
    ignored_arguments (S20): arguments that the kernel accepts and silently drops.
    """

    default_scale: Literal["inverse_sqrt_head_dim", "one"] = "inverse_sqrt_head_dim"
    bias: Literal["before_cap", "before_scale", "after_cap"] = "before_cap"
    hidden: Literal["absent", "sentinel"] = "absent"
    sentinel: float = float("-inf")
    hidden_nonfinite: Literal["ignored", "leaks"] = "ignored"
    precedence: Literal["conjunction", "bias_over_mask", "causal_over_mask"] = "conjunction"
    causal: Literal["bottom_right", "top_left"] = "bottom_right"
    window: Literal["bottom_right", "top_left"] = "bottom_right"
    window_zero: Literal["diagonal", "unbounded"] = "diagonal"
    window_edges: Literal["inclusive", "exclusive"] = "inclusive"
    segments: Literal["non_negative", "equality"] = "non_negative"
    empty_rows: Literal["zero", "mean_of_values", "nan", "unspecified"] = "zero"
    sinks: Literal["as_given", "capped"] = "as_given"
    dropout: Literal["philox_tile", "linear_offset", "shared_heads", "chunk_keys", "own_generator"] = (
        "philox_tile"
    )
    dropout_chunk: int = 128
    lse_base: Literal["natural", "two"] = "natural"
    gradients: frozenset[str] = frozenset(GRADIENTS)
    lse_gradient: bool = True
    deterministic: bool = True
    row_max_gradient: Literal["constant", "differentiated"] = "constant"
    ignored_arguments: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.hidden == "sentinel" and not (-float("inf") < self.sentinel < 0):
            raise ValueError(
                f"sentinel: got {self.sentinel!r}, expected a finite negative number when hidden='sentinel'"
            )
        for name, got, known in (
            ("gradients", self.gradients, GRADIENTS),
            ("ignored_arguments", self.ignored_arguments, OPTIONS),
        ):
            unknown = sorted(got - set(known))
            if unknown:
                raise ValueError(f"{name}: got {unknown}, expected a subset of {list(known)}")
        for first, second in _TOGETHER:
            if first in self.ignored_arguments and second not in self.ignored_arguments:
                raise ValueError(f"ignored_arguments: got {first!r} alone, expected {second!r} with it")
        if self.dropout_chunk <= 0:
            raise ValueError(f"dropout_chunk: got {self.dropout_chunk}, expected a positive number of keys")


STANDARD = Semantics()
