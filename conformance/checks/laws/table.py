"""The table of laws: one entry for each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attest.conformance.cases.case import Case
from attest.conformance.checks.laws import (
    calls,
    differences,
    independence,
    linear,
    options,
    sequences,
    vmapped,
)
from attest.conformance.checks.laws.law import Law


def _features(names: str) -> frozenset[str]:
    return frozenset(names.split())


# What depends on the index of a key or of a row, or on that of a sequence.
_POSITIONS = _features("causal window chunks alibi q_offset positions ranges padded packed")
_INDEXED = _POSITIONS | _features("dropout origin shared_dropout")
_EVERY_PAIR = _features("mask bias segments broadcast integer_mask")


def _with(**fields: Any) -> Callable[[Case], Case]:
    """Return the function that sets fields of a case."""
    return lambda case: replace(case, **fields)


def _grouped(case: Case) -> Case:
    return case if case.q_heads > case.kv_heads else replace(case, q_heads=2 * case.kv_heads)


def _two_entries(case: Case) -> Case:
    return case if case.batch > 1 else replace(case, batch=2)


def _two_key_heads(case: Case) -> Case:
    group = case.q_heads // case.kv_heads
    return case if case.kv_heads > 1 else replace(case, kv_heads=2, q_heads=2 * group)


def _with_sinks(case: Case) -> Case:
    return case if case.sinks else replace(case, sinks=1)


def _causal(case: Case) -> Case:
    return replace(case, causal=True)


def _two_rows(case: Case) -> Case:
    return replace(case, q_len=max(case.q_len, 2))


def _several_keys(case: Case) -> Case:
    return replace(case, kv_len=max(case.kv_len, 4))


def _chunked(case: Case) -> Case:
    return case if case.chunk_size else replace(case, chunk_size=max(case.kv_len // 3, 1))


LAWS = (
    Law(
        "gqa",
        ("S15",),
        "a call with key heads in groups equals that in which each key head is repeated",
        options.repeated_heads,
        features=_features("gqa"),
        case=_grouped,
        any_dialect=True,
    ),
    Law(
        "window_past_ends",
        ("S7",),
        "a window past the ends of the keys equals no window",
        options.window_past_ends,
        features=_features("window causal"),
        off=_features("window q_offset positions"),
        case=_causal,
    ),
    Law(
        "far_cap",
        ("S3",),
        "a cap far above every logit equals no cap",
        options.far_cap,
        features=_features("soft_cap"),
        off=_features("soft_cap alibi"),
    ),
    Law(
        "sink_as_key",
        ("S11",),
        "a sink equals one more key of zero value that every row sees",
        options.sink_as_key,
        features=_features("sinks bias"),
        off=_POSITIONS | _features("segments soft_cap unnormalized"),
        case=_with_sinks,
    ),
    Law(
        "permuted_keys",
        ("S5", "S23"),
        "the order in which keys are stored changes nothing",
        options.permuted_keys,
        off=_INDEXED,
        case=_several_keys,
    ),
    Law(
        "permuted_keys_at_positions",
        ("S23",),
        "the order in which keys are stored changes nothing, if each keeps its position",
        options.permuted_keys,
        features=_features("positions causal"),
        off=_features("ranges padded packed dropout origin shared_dropout"),
        case=lambda case: _causal(_several_keys(case)),
    ),
    Law(
        "shifted_positions",
        ("S23",),
        "queries and keys moved by the same number of positions see each other as before",
        options.shifted_positions,
        features=_features("positions causal"),
        off=_features("padded packed"),
        case=_causal,
    ),
    Law(
        "chunk_as_segments",
        ("S24", "S8"),
        "a chunk equals a segment with the number of the chunk as its id",
        options.chunk_as_segments,
        features=_features("chunks segments"),
        off=_features("segments padded packed"),
        case=_chunked,
    ),
    Law(
        "alibi_as_bias",
        ("S25", "S2"),
        "ALiBi equals the bias of slope times distance",
        options.alibi_as_bias,
        features=_features("alibi bias"),
        off=_features("bias q_offset positions padded packed"),
        case=_with(alibi="heads"),
    ),
    Law(
        "padded_head_dim",
        ("S1",),
        "channels of zeros appended to queries, keys and values change nothing else",
        options.padded_head_dim,
        features=_features("scale"),
    ),
    Law(
        "doubled_query",
        ("S1",),
        "doubled queries with half of the scale give the same outputs, and half of their gradient",
        options.doubled_query,
        features=_features("scale"),
    ),
    Law(
        "constant_rows",
        ("S13", "S2"),
        "a number added to all logits of a row is added to its lse, and changes nothing else",
        options.constant_rows,
        features=_features("bias"),
        off=_features("bias sinks soft_cap"),
    ),
    Law(
        "values_add",
        ("S1",),
        "out and the gradients of queries and keys are linear in the values",
        linear.values,
        any_dialect=True,
    ),
    Law(
        "cotangents_add",
        ("S14",),
        "the gradients are linear in the cotangents",
        linear.cotangents,
        any_dialect=True,
    ),
    Law(
        "negated_values",
        ("S14",),
        "negated values with a negated cotangent negate out and the gradient of the values, and nothing else",
        linear.negated,
        any_dialect=True,
    ),
    Law(
        "value_adjoint",
        ("S14", "S15"),
        "the values times their gradient equal out times its cotangent",
        linear.value_adjoint,
        any_dialect=True,
        applies=calls.needs_gradients("value"),
    ),
    Law(
        "query_key_adjoint",
        ("S14", "S15"),
        "the queries times their gradient equal the keys times theirs",
        linear.query_key_adjoint,
        any_dialect=True,
        applies=calls.needs_gradients("query", "key"),
    ),
    Law(
        "directional_differences",
        ("S14",),
        "the gradient along a direction equals the difference of out and lse along it",
        differences.differences,
        off=_features("soft_cap unnormalized"),
        case=_with(dtype="float32", family="normal"),
        applies=differences.why_not,
    ),
    Law(
        "constant_value",
        ("S1",),
        "out is the value that all keys share, in every row that sees a key",
        linear.constant_value,
        off=_features("sinks dropout shared_dropout origin unnormalized"),
    ),
    Law(
        "packed_as_loop",
        ("S9",),
        "a packed call equals a loop over its sequences",
        sequences.packed_as_loop,
        features=_features("packed"),
        off=_features("padded packed q_offset positions ranges dropout shared_dropout origin broadcast"),
        case=sequences.two_packed,
    ),
    Law(
        "packed_as_padded",
        ("S9",),
        "a packed call equals a padded one of the same sequences",
        sequences.packed_as_padded,
        features=_features("packed padded"),
        off=_EVERY_PAIR | _features("padded packed q_offset positions ranges dropout shared_dropout origin"),
        case=sequences.two_packed,
    ),
    Law(
        "packed_as_segments",
        ("S9", "S8"),
        "a packed call equals one whose segments are the sequences",
        sequences.packed_as_segments,
        features=_features("packed segments"),
        off=_features("segments padded packed q_offset positions chunks"),
        case=sequences.equal_packed,
    ),
    Law(
        "last_row",
        ("S6", "S23"),
        "the last query row alone, as in decoding, equals the last row of the whole call",
        sequences.last_row,
        off=_features("q_offset positions padded packed dropout shared_dropout origin broadcast"),
        case=_two_rows,
    ),
    Law(
        "merged_halves",
        ("S13",),
        "two halves of the keys, merged by lse, equal the whole",
        sequences.merged_halves,
        off=_INDEXED | _features("sinks unnormalized broadcast"),
        case=_several_keys,
        applies=calls.needs_lse,
    ),
    Law(
        "batch_entries",
        ("S4",),
        "NaN in one batch entry reaches no other one",
        independence.batch,
        off=_features("padded packed"),
        case=_two_entries,
        any_dialect=True,
    ),
    Law(
        "heads",
        ("S4", "S15"),
        "NaN in one key head, and in the query heads that read it, reaches no other head",
        independence.heads,
        case=_two_key_heads,
        any_dialect=True,
    ),
    Law(
        "rows",
        ("S4",),
        "NaN in one query row reaches no other row",
        independence.rows,
        case=_two_rows,
        any_dialect=True,
    ),
    Law(
        "tilings",
        ("S18",),
        "other block sizes change nothing beyond rounding",
        calls.tilings,
        any_dialect=True,
        applies=calls.needs_tilings,
    ),
    Law(
        "vmap",
        ("S22",),
        "a map over one argument equals a loop over it",
        vmapped.vmapped,
        any_dialect=True,
    ),
    Law(
        "repeats",
        ("S17",),
        "repeated calls give the same bits",
        calls.repeats,
        any_dialect=True,
        exact=True,
    ),
    Law(
        "other_call",
        ("S19",),
        "a call with other values in between changes nothing",
        calls.other_call,
        any_dialect=True,
    ),
    Law(
        "nan_in_memory",
        ("S19",),
        "NaN that is left in freed memory reaches no result",
        calls.nan_in_memory,
        any_dialect=True,
        exact=True,
    ),
)
