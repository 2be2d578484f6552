"""The features that a kernel can support: their names, clauses and arguments."""

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Feature:
    """One feature: its clause of docs/reference/semantics.md and the arguments that switch it on."""

    clause: str
    arguments: tuple[str, ...]


FEATURES = {
    "scale": Feature("S1", ("softmax_scale",)),
    "bias": Feature("S2", ("bias",)),
    "soft_cap": Feature("S3", ("logits_soft_cap",)),
    "mask": Feature("S5", ("attention_mask",)),
    "integer_mask": Feature("S5", ("attention_mask",)),
    "causal": Feature("S6", ("causal",)),
    "window": Feature("S7", ("sliding_window",)),
    "segments": Feature("S8", ("q_segment_ids", "kv_segment_ids")),
    "padded": Feature("S9", ("cum_seqlens_q", "cum_seqlens_k")),
    "packed": Feature("S9", ("cum_seqlens_q", "cum_seqlens_k")),
    "sinks": Feature("S11", ("softmax_aux",)),
    "dropout": Feature("S12", ("dropout_prob", "dropout_seed")),
    "unnormalized": Feature("S26", ("normalize_output",)),
    "gqa": Feature("S15", ()),
    "value_dim": Feature("S16", ()),
}

# Features of positions.
COORDINATES = {
    "q_offset": Feature("S23", ("q_offset",)),
    "positions": Feature("S23", ("q_positions", "kv_positions")),
    "origin": Feature("S23", ("origin",)),
}
# Features beside FEATURES, all of which a kernel may have without any of these.
OPTIONAL = COORDINATES | {
    "broadcast": Feature("S5", ("attention_mask", "bias")),
    "chunks": Feature("S24", ("chunk_size",)),
    "ranges": Feature("S28", ("kv_start", "kv_end")),
    "alibi": Feature("S25", ("alibi_slopes",)),
    "shared_dropout": Feature("S29", ("dropout_shared",)),
}
ALL_FEATURES = FEATURES | OPTIONAL

# Features that change nothing without one of these others.
_OF_POSITIONS = ("causal", "window", "chunks", "alibi")
NEEDS = {
    "integer_mask": ("mask",),
    "q_offset": _OF_POSITIONS,
    "positions": _OF_POSITIONS,
    "origin": ("dropout",),
    "shared_dropout": ("dropout",),
    "broadcast": ("mask",),
}
# Features that no call has together.
APART = (frozenset({"padded", "packed"}), frozenset({"q_offset", "positions"}))
