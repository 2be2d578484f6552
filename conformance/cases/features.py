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

# Features that change nothing without another one.
NEEDS = {
    "integer_mask": "mask",
    "q_offset": "causal",
    "positions": "causal",
    "origin": "dropout",
    "shared_dropout": "dropout",
    "broadcast": "mask",
}
# Features that no call has together.
APART = (frozenset({"padded", "packed"}), frozenset({"q_offset", "positions"}))

# A sentence for each clause, which a failure prints.
CLAUSES = {
    "S1": "logits are softmax_scale * (q . k); the default scale is 1 / sqrt(head dim)",
    "S2": "the bias is added to the logits after the scale and before the cap",
    "S3": "soft cap: cap * tanh(logits / cap), after the bias and before masking",
    "S4": "a hidden key has weight exactly 0 and contributes nothing, whatever is stored there",
    "S5": "a key is visible only if every given condition permits it: mask, causal, window, chunks, "
    "segments, lengths, ranges",
    "S6": "causal: row i sees keys j <= i + (Sk - Sq), the diagonal ends in the bottom-right corner",
    "S7": "window (left, right): i' - left <= j <= i' + right with i' = i + (Sk - Sq), both ends inclusive",
    "S8": "segments: a key is visible iff the ids are equal and non-negative",
    "S9": "lengths: tokens past a length are padding: out 0, lse -inf, gradients 0",
    "S10": "a row that sees no key has out 0, lse -inf (or that of its sinks) and no gradients, never NaN",
    "S11": "each sink logit joins the normaliser once: not scaled, not capped, without a value",
    "S12": "Philox4x32-10 selects the weights that dropout keeps, scaled by 1 / (1 - rate); dropout does not "
    "change lse",
    "S13": "lse is the natural logsumexp of the visible capped logits and the sinks",
    "S14": "gradients are those of out and lse, summed over broadcast axes, in the dtype of their input",
    "S15": "query head h reads KV head h // (Hq / Hkv); dkey and dvalue sum over the group",
    "S16": "float16, bfloat16 and float32 inputs are computed within the declared numerics",
    "S17": "the same inputs give bit-identical results",
    "S18": "block sizes never change results beyond rounding",
    "S19": "inputs are never modified, and nothing outside inputs and outputs is touched",
    "S20": "an unsupported or malformed argument raises an error with its name",
    "S21": "a call over several devices gives the results of one device, and drops the same weights",
    "S22": "eager, jit, vmap, grad and remat give the same results",
    "S23": "causal order and windows compare the given positions; dropout uses indices from the origin in "
    "the whole arrays",
    "S24": "chunks: a row sees only keys of its chunk of chunk_size positions",
    "S25": "ALiBi: slope * |row position - key position| is subtracted from each logit, where the bias is "
    "added",
    "S26": "normalize_output=False: weights are exp(logit - the row's largest), not divided by their sum",
    "S27": "further leading batch dimensions change no bit of the results, only their shapes",
    "S28": "ranges: a row sees keys kv_start <= j < kv_end, in addition to every other condition",
    "S29": "shared dropout: batch entries, heads or both share one mask; the index on a shared axis is 0",
}
