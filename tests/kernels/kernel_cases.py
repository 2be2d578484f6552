"""Attention written again, pair by pair, from the clauses: what kernels are compared with.

Visibility is a NumPy loop over pairs and the rest a few whole-array lines, sharing nothing with the kernels
but the keep mask, which has tests of its own.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attest.kernels.numerics.philox import keep_mask

FLOAT_ARGUMENTS = ("bias", "softmax_aux")


def qkv(
    batch=2,
    q_length=40,
    k_length=50,
    q_heads=4,
    k_heads=2,
    head_dim=24,
    value_dim=16,
    dtype="float32",
    seed=0,
):
    """Random query, key and value."""
    rng = np.random.default_rng(seed)
    shapes = (
        (batch, q_length, q_heads, head_dim),
        (batch, k_length, k_heads, head_dim),
        (batch, k_length, k_heads, value_dim),
    )
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def normal(*shape, seed=1, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def visible_pairs(query, key, options):
    """(visible [B, Hq, Sq, Sk], padding [B, Sq]) by the words of S5 to S9, S23, S24 and S28."""
    return _pairs(query, key, options)[:2]


def _pairs(query, key, options):
    """`visible_pairs`, and how far the pairs of a sequence are apart (S25): [B, 1, Sq, Sk], 0 elsewhere."""
    batch, q_length, q_heads, _ = query.shape
    k_length = key.shape[1]
    visible = np.zeros((batch, q_heads, q_length, k_length), bool)
    padding = np.zeros((batch, q_length), bool)
    distance = np.zeros((batch, 1, q_length, k_length), np.int64)
    window = options.get("sliding_window")
    left, right = (window, window) if isinstance(window, int) else (window or (None, None))
    q_ids, k_ids = options.get("q_segment_ids"), options.get("kv_segment_ids")
    mask, bias = (
        None if x is None else np.broadcast_to(np.asarray(x), visible.shape)
        for x in (options.get("attention_mask"), options.get("bias"))
    )
    starts, ends = (
        options.get(name, np.array([[default]])) for name, default in (("kv_start", 0), ("kv_end", k_length))
    )
    chunk = options.get("chunk_size")
    for b in range(batch):
        sequences = _sequences(b, batch, q_length, k_length, options)
        for i in range(q_length):
            home = [s for s in sequences if s[0] <= i < s[1]]
            padding[b, i] = not home or (q_ids is not None and q_ids[b, i] < 0)
            if padding[b, i]:
                continue
            q_start, q_stop, k_start, k_stop = home[0]
            aligned = i - q_start + (k_stop - k_start) - (q_stop - q_start)
            if "q_offset" in options:
                offsets = np.ravel(options["q_offset"])
                aligned = (
                    i
                    - q_start
                    + int(
                        offsets[sequences.index(home[0]) if batch == 1 else b]
                        if offsets.size > 1
                        else offsets[0]
                    )
                )
            if "q_positions" in options:
                aligned = int(options["q_positions"][b % len(options["q_positions"]), i])
            for j in range(k_start, k_stop):
                position = j - k_start
                if "kv_positions" in options:
                    position = int(options["kv_positions"][b % len(options["kv_positions"]), j])
                distance[b, 0, i, j] = max(position - aligned, aligned - position)
                visible[b, :, i, j] = (
                    (not options.get("causal") or position <= aligned)
                    and (left is None or position >= aligned - left)
                    and (right is None or position <= aligned + right)
                    and (q_ids is None or q_ids[b, i] == k_ids[b, j])
                    and (chunk is None or position // chunk == aligned // chunk)
                    and starts[b % len(starts), i % starts.shape[1]] <= j
                    and j < ends[b % len(ends), i % ends.shape[1]]
                )
    if mask is not None:
        visible &= mask != 0
    if bias is not None:
        visible &= bias.astype(np.float32) != -np.inf
    return visible, padding, distance


def plain_attention(query, key, value, options, floats):
    """(out, lse, row maximum over visible logits and sinks), float32 and differentiable.

    `options` are concrete keyword arguments of the kernels, `floats` the differentiable ones among them.
    """
    visible, padding, distance = _pairs(query, key, options)
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (query, key, value))
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
    logits = logits * options.get("softmax_scale", query.shape[3] ** -0.5)
    if "bias" in floats:
        bias = floats["bias"].astype(jnp.float32)
        logits = logits + jnp.where(bias == -jnp.inf, 0.0, bias)
    if "alibi_slopes" in options:
        slopes = np.asarray(options["alibi_slopes"]).reshape(-1, query.shape[2], 1, 1)
        logits = logits - slopes * distance.astype(np.float32)
    if "logits_soft_cap" in options:
        logits = options["logits_soft_cap"] * jnp.tanh(logits / options["logits_soft_cap"])
    terms = jnp.where(visible, logits, -jnp.inf)
    if "softmax_aux" in floats:
        sinks = floats["softmax_aux"].astype(jnp.float32)
        sinks = sinks.reshape(1, -1 if sinks.ndim == 2 else 1, 1, sinks.shape[-1])
        sinks = jnp.where(padding[:, None, :, None], -jnp.inf, sinks)
        sinks = jnp.broadcast_to(sinks, (*terms.shape[:3], sinks.shape[-1]))
        terms = jnp.concatenate([terms, sinks], axis=-1)
    m = jax.lax.stop_gradient(terms.max(axis=-1, initial=-jnp.inf))
    nothing = m == -jnp.inf
    shift = jnp.where(nothing, 0.0, m)[..., None]
    weights = jnp.where(terms == -jnp.inf, 0.0, jnp.exp(jnp.where(terms == -jnp.inf, 0.0, terms - shift)))
    total = jnp.where(nothing, 1.0, weights.sum(axis=-1))
    lse = jnp.where(nothing, -jnp.inf, shift[..., 0] + jnp.log(total))
    weights = (weights / total[..., None])[..., : key.shape[1]]
    if "dropout_seed" in options:
        weights = jnp.where(keep(query, key, options), weights, 0.0) / (1 - options["dropout_prob"])
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest"), lse, m


def keep(query, key, options):
    """The keep mask of a whole call, one batch entry at a time."""
    seed, shared = options["dropout_seed"], options.get("dropout_shared") or ""
    origin = list(options.get("origin", (0, 0, 0, 0)))
    entries, heads, rows = (jnp.arange(query.shape[axis]) for axis in (0, 2, 1))
    if "b" in shared:
        entries, origin[0] = jnp.zeros_like(entries), 0
    if "h" in shared:
        heads, origin[1] = jnp.zeros_like(heads), 0
    words = jnp.asarray([seed & 0xFFFFFFFF, seed >> 32, *origin], jnp.uint32)
    of_entry = lambda b: keep_mask(words, options["dropout_prob"], b, heads, rows, 0, key.shape[1], "")  # noqa: E731
    return jax.vmap(of_entry)(entries)


def split_options(options):
    """The differentiable arrays among the options, and the rest."""
    floats = {name: options[name] for name in FLOAT_ARGUMENTS if name in options}
    return floats, {name: value for name, value in options.items() if name not in floats}


def _sequences(b, batch, q_length, k_length, options):
    """(q start, q stop, k start, k stop) of the sequences that batch entry b holds."""
    if "cum_seqlens_q" not in options:
        return [(0, q_length, 0, k_length)]
    cum_q, cum_k = (np.asarray(options[name]) for name in ("cum_seqlens_q", "cum_seqlens_k"))
    if batch == 1:
        return list(zip(cum_q[:-1], cum_q[1:], cum_k[:-1], cum_k[1:], strict=True))
    return [(0, cum_q[b + 1] - cum_q[b], 0, cum_k[b + 1] - cum_k[b])]
