"""`tokamax.dot_product_attention` and its operation `DotProductAttention`, on our kernels.

Names, order, defaults and layouts are those of tokamax 0.0.17, which need not be installed. The page
docs/how-to/adapters-peers.md lists what differs.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attest.kernels.adapters.shared import renamed
from attest.kernels.adapters.tokamax_masks import Band, Indices, Limit, all_axes, arguments, conditions_of
from attest.kernels.adapters.tokamax_residuals import constant_maximum, softmax_residuals
from attest.kernels.attention import flash_attention_with_lse
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import FLOAT_DTYPES, check_flag, check_integer, check_number, refuse, shown
from attest.kernels.operations.functions import flash_attention

# What runs each implementation of tokamax; "mosaic" is the one of the device.
_PLATFORMS = {
    "xla": "xla",
    "xla_chunked": "xla",
    "triton": "triton",
    "mosaic_gpu": "mosaic_gpu",
    "mosaic_tpu": "pallas_tpu",
}
_COUNTED = Indices()
# tokamax's name of an argument, by ours.
_NAMES = {"softmax_scale": "scale", "attention_mask": "mask", "kv_start": "mask", "kv_end": "mask"}
_NAMES_OF_OP = {**_NAMES, "softmax_scale": "logits_scale", "query": "q", "key": "k", "value": "v"}


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: jax.Array | None = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    precision: Any = None,
    implementation: str | Sequence[str] | None = None,
    q_sharding: NamedSharding | None = None,
) -> jax.Array:
    """Compute attention as `tokamax.dot_product_attention` does: out [*B, T, N, h], in the dtype of query.

    query: [*B, T, N, H]; key: [*B, S, K, H]; value: [*B, S, K, h], arrays of float32, bfloat16 or float16 in
    any mixture, or quantized arrays of qwix. bias: float, mask: bool, both [*#B, #N, #T, #S]; mask may also
    be a `Mask` or a `CausalMask` of tokamax. scale: 1 / sqrt(H) by default. is_causal: row i sees no key
    beyond i, whatever S is (S6, S23). local_window_size: (left, right), keys beside i that row i sees (S7).
    query_seq_lengths, key_value_seq_lengths: [*#B] integer; what is beyond them is hidden. logits_soft_cap:
    S3. precision: None is the default of our kernels. implementation: a name of tokamax, or several, of which
    the first that supports the call runs. q_sharding: how query and the result are sharded.

    A row that sees no key is 0 (S10).

    Raises: ValueError naming a malformed argument; NotImplementedError for what no kernel of ours does; an
    ExceptionGroup of those where several implementations are named.
    """
    lengths = [("q_end", "query_seq_lengths", query_seq_lengths)]
    lengths += [("k_end", "key_value_seq_lengths", key_value_seq_lengths)]
    limits = [Limit(kind, name, _of_batch(name, x)) for kind, name, x in lengths if x is not None]

    def call(platform: str | None) -> jax.Array:
        return _attend(
            query,
            key,
            value,
            mask=mask,
            bands=_window(local_window_size),
            limits=limits,
            is_causal=is_causal,
            bias=bias,
            logits_scale=scale,
            logits_soft_cap=logits_soft_cap,
            precision=precision,
            q_sharding=q_sharding,
            platform=platform,
        )[0]

    with renamed(_NAMES):
        return _by_first(_names(implementation), call)


def attention_op(
    q: Any,
    k: Any,
    v: Any,
    *,
    precision: Any = jax.lax.Precision.DEFAULT,
    logits_dtype: Any = None,
    logits_scale: Any = None,
    bias: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    mask: Any = None,
    is_causal: bool = False,
    dropout_mask: jax.Array | None = None,
    dropout_rate: float = 0.0,
    paging_info: Any = None,
    q_sharding: NamedSharding | None = None,
    k_sharding: NamedSharding | None = None,
    q_indices: jax.Array | None = None,
    k_indices: jax.Array | None = None,
    normalize_output: bool = True,
    return_residuals: bool = False,
) -> Any:
    """Compute attention as calling tokamax's `DotProductAttention()` does: out [*B, T, H, d], in q's dtype.

    q: [*B, T, H, D]; k: [*B, t, h, D]; v: [*B, t, h, d]; bias, mask, logits_soft_cap, is_causal and
    q_sharding: see `dot_product_attention`. precision: one, or a pair of equal ones, for the two products.
    logits_dtype, logits_scale: None or tokamax's AUTO are float32 and 1 / sqrt(D). dropout_mask: bool [*#B,
    #H, #T, #t], which multiplies the weights, as does 1 / (1 - dropout_rate). q_indices, k_indices: integer
    [*#B, #H, T], [*#B, #h, t], what causal masks and limits compare (S23). k_sharding: how k and v are
    sharded.

    normalize_output: False returns the numerator (S26), which has no derivative here. return_residuals: True
    returns (out, (m, l)): the row maximum of the logits and the sum of exp(logit - m), [*B, H, T] float32,
    constant under differentiation; m is the lowest float32 and l is 0 in a row that sees no key.

    Raises: as `dot_product_attention`; NotImplementedError for paging_info.
    """
    if paging_info is not None:
        raise NotImplementedError(
            "paging_info: got pages; expected None. Gather the pages of a sequence with jnp.take, and "
            "hide what is beyond it with Mask(k_end=...)."
        )
    with renamed(_NAMES_OF_OP):
        out, residuals = _attend(
            q,
            k,
            v,
            mask=mask,
            indices=Indices(q_indices, k_indices),
            is_causal=is_causal,
            bias=bias,
            logits_scale=_unless_auto(logits_scale),
            logits_soft_cap=logits_soft_cap,
            logits_dtype=_unless_auto(logits_dtype),
            precision=precision,
            q_sharding=q_sharding,
            k_sharding=k_sharding,
            dropout_mask=dropout_mask,
            dropout_rate=dropout_rate,
            normalize_output=check_flag("normalize_output", normalize_output),
            return_residuals=check_flag("return_residuals", return_residuals),
        )
    return (out, residuals) if return_residuals else out


def _attend(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any,
    is_causal: Any,
    logits_scale: Any,
    bands: Sequence[Band] = (),
    limits: Sequence[Limit] = (),
    indices: Indices = _COUNTED,
    precision: Any,
    q_sharding: Any,
    k_sharding: Any = None,
    dropout_mask: Any = None,
    dropout_rate: Any = 0.0,
    normalize_output: bool = True,
    return_residuals: bool = False,
    **options: Any,
) -> tuple[jax.Array, Any]:
    """Return out, and the residuals or None."""
    arrays = {"query": _array("query", query), "key": _array("key", key), "value": _array("value", value)}
    dtype = arrays["query"].dtype
    arrays = _one_dtype(arrays)
    if q_sharding is not None or k_sharding is not None:
        arrays = _sharded(arrays, q_sharding, k_sharding)
    query, key = arrays["query"], arrays["key"]
    seen, own_bands, own_limits = conditions_of(mask)
    causal = [Band()] if check_flag("is_causal", is_causal) else []
    bands, limits = [*own_bands, *causal, *bands], [*own_limits, *limits]
    hiding = arguments(query, key, seen, bands, limits, indices)
    options |= {"softmax_scale": logits_scale, "precision": _precision(precision)}
    call = {**arrays, **options, **hiding}
    rate = _rate(dropout_rate, dropout_mask)
    if dropout_mask is not None:
        out = _dropped(call, dropout_mask, rate, normalize_output)
    else:
        out = flash_attention(**call, normalize_output=normalize_output)
    if not normalize_output:
        out = constant_maximum(out)
    residuals = softmax_residuals(call) if return_residuals else None
    out = out.astype(dtype)
    return (out if q_sharding is None else _placed(out, q_sharding)), residuals


def _dropped(call: dict[str, Any], dropout_mask: Any, rate: float, normalize_output: bool) -> jax.Array:
    """Return attention whose weights are multiplied by a mask and 1 / (1 - rate), from two calls.

    One call over all keys gives the lse of the whole. The other sees only the kept keys; its out is rescaled
    by exp(lse of the kept - lse of all). Without normalization, the largest logit of the row replaces the lse
    of all.
    """
    everything = flash_attention_with_lse(**call)[1]
    kept = all_axes("dropout_mask", dropout_mask, call["query"], call["key"])
    if call.get("attention_mask") is not None:
        kept = jnp.logical_and(kept, call["attention_mask"])
    of_kept: dict[str, Any] = {**call, "attention_mask": kept, "normalize_output": True}
    out, lse = flash_attention_with_lse(**of_kept)
    if not normalize_output:
        everything = softmax_residuals(call)[0]
    seen = jnp.isfinite(everything)
    share = jnp.exp(jnp.where(seen, lse - jnp.where(seen, everything, 0.0), -jnp.inf)) / (1.0 - rate)
    return (out.astype(jnp.float32) * jnp.swapaxes(share, -1, -2)[..., None]).astype(out.dtype)


def _rate(rate: Any, mask: Any) -> float:
    number = check_number("dropout_rate", rate)
    if not 0.0 <= number < 1.0:
        refuse(
            "dropout_rate", number, "0 <= dropout_rate < 1", "Give the share of dropout_mask that is False."
        )
    if number and mask is None:
        advice = "Draw it with jax.random.bernoulli, or use dropout_prob of attest.flash_attention."
        refuse("dropout_mask", None, "a mask where dropout_rate > 0", advice)
    return number


def _array(name: str, x: Any) -> Any:
    """Return an array; a quantized one of qwix is dequantized."""
    if hasattr(x, "as_qarray"):
        x = x.as_qarray()
    if hasattr(x, "qvalue") and hasattr(x, "scale"):
        return import_module("qwix").dequantize(x)
    check_is_array(name, x)
    if x.ndim < 3:
        expected = "[..., length, heads, head_dim]"
        refuse(name, f"shape {x.shape}", expected, "Add or merge axes to this layout.")
    return x


def _one_dtype(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays in one dtype that holds all their numbers: float32 for two different 16-bit ones."""
    dtypes = {x.dtype.name for x in arrays.values()}
    if len(dtypes) == 1 or not dtypes <= set(FLOAT_DTYPES):
        return arrays
    return {name: jnp.asarray(x).astype(jnp.float32) for name, x in arrays.items()}


def _sharded(arrays: dict[str, Any], q_sharding: Any, k_sharding: Any) -> dict[str, Any]:
    """Return the arrays, sharded; key and value as query in batch and heads unless they have a sharding."""
    query = arrays["query"]
    for name, x in (("q_sharding", q_sharding), ("k_sharding", k_sharding)):
        if x is not None and not isinstance(x, NamedSharding):
            refuse(
                name, f"a {type(x).__name__}", "a NamedSharding", "Build it of a mesh and a PartitionSpec."
            )
    if q_sharding is None:
        refuse("k_sharding", "a sharding without q_sharding", "both", "Give q_sharding, too.")
    axes = _axes("q_sharding", q_sharding, query.ndim)
    if k_sharding is None:
        k_sharding = NamedSharding(q_sharding.mesh, PartitionSpec(*axes[:-3], None, *axes[-2:]))
    k_axes = _axes("k_sharding", k_sharding, query.ndim)
    if k_sharding.mesh != q_sharding.mesh:
        refuse("k_sharding", "another mesh", "the mesh of q_sharding", "Build both of one mesh.")
    mesh = q_sharding.mesh
    for name, what, axis in (
        ("q_sharding", "head_dim", axes[-1]),
        ("k_sharding", "head_dim", k_axes[-1]),
        ("k_sharding", "the keys", k_axes[-3]),
    ):
        if _devices(mesh, axis) != 1:
            raise NotImplementedError(
                f"{name}: got {what} over {axis}; expected it whole. Leave this axis None."
            )
    heads = _devices(mesh, k_axes[-2])
    if arrays["key"].shape[-2] % heads:
        k_sharding = NamedSharding(mesh, PartitionSpec(*k_axes[:-2], None, None))
    shardings = {"query": q_sharding, "key": k_sharding, "value": k_sharding}
    return {name: _placed(x, shardings[name]) for name, x in arrays.items()}


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return an array on a mesh, whose axes are all automatic or some explicit."""
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _axes(name: str, sharding: NamedSharding, ndim: int) -> tuple[Any, ...]:
    spec = tuple(sharding.spec)
    if len(spec) > ndim:
        refuse(name, f"{len(spec)} axes", f"at most {ndim}, those of the array", "Leave out the last ones.")
    return spec + (None,) * (ndim - len(spec))


def _devices(mesh: Any, axis: Any) -> int:
    names = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def _window(size: Any) -> list[Band]:
    """Return the keys beside the place of a row as one causal mask."""
    if size is None:
        return []
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2:
        refuse(
            "local_window_size", shown(size), "an int or a pair (left, right)", "Leave it out for no window."
        )
    left, right = (check_integer("local_window_size", side) for side in sides)
    return [Band(right, left + right + 1)]


def _of_batch(name: str, x: Any) -> Any:
    """Return lengths [*#B] as a bound [*#B, 1, 1]."""
    check_is_array(name, x)
    return x[..., None, None]


def _names(implementation: Any) -> list[Any]:
    """Return the implementations to try; None is the fastest."""
    if implementation is None:
        return [None]
    names = [implementation] if not isinstance(implementation, tuple | list) else list(implementation)
    if not names:
        refuse("implementation", "an empty sequence", "at least one name", "Leave it out for the fastest.")
    return names


def _platform(name: Any) -> str | None:
    """Return the platform that an implementation means."""
    if name is None:
        return None
    if not isinstance(name, str):
        refuse("implementation", shown(name), "the name of one", "Leave it out for the fastest.")
    if name == "mosaic":
        name = "mosaic_gpu" if jax.default_backend() == "gpu" else "mosaic_tpu"
    if name == "cudnn":
        raise NotImplementedError(
            "implementation: got 'cudnn', which is not ours. Leave it out for the fastest of our kernels, or "
            "call jax.nn.dot_product_attention(..., implementation='cudnn')."
        )
    if name not in _PLATFORMS:
        expected = f"one of {', '.join(_PLATFORMS)} or mosaic"
        refuse("implementation", shown(name), expected, "Leave it out for the fastest.")
    return _PLATFORMS[name]


def _by_first(names: list[Any], call: Callable[[str | None], jax.Array]) -> jax.Array:
    """Return the result of the first implementation that supports the call."""
    if len(names) == 1:
        return call(_platform(names[0]))
    errors: list[Exception] = []
    for name in names:
        try:
            return call(_platform(name))
        except NotImplementedError as error:
            errors.append(error)
    raise ExceptionGroup("all implementations failed", errors)


def _precision(precision: Any) -> Any:
    """Return the precision of both products."""
    if not isinstance(precision, tuple | list):
        return precision
    if len(precision) != 2:
        refuse("precision", shown(precision), "one precision or a pair", "Give that of both products.")
    first, second = (_precision(each) if isinstance(each, tuple | list) else each for each in precision)
    if first != second:
        raise NotImplementedError(
            f"precision: got {first} and {second}; expected the same for both products. Give the higher one."
        )
    return first


def _unless_auto(x: Any) -> Any:
    """Return None for tokamax's marker of a default, a class of this name."""
    return None if isinstance(x, type) and x.__name__ == "AUTO" else x
