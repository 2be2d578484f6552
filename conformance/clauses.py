"""The clauses of the semantics, one sentence each, which a failure prints."""

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
