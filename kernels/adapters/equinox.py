"""`equinox.nn.MultiheadAttention` on our kernels: the same module with another inner attention."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attest.kernels.adapters.shared import as_mask, as_seed, missing, renamed
from attest.kernels.call.arrays import check_is_array
from attest.kernels.call.options import check_flag, refuse, shown
from attest.kernels.operations.functions import flash_attention

try:
    import equinox as eqx
except ModuleNotFoundError as error:
    raise missing(__name__, "equinox", error) from None

# The argument `key` is a random key there.
_NAMES = {"attention_mask": "mask", "dropout_prob": "dropout_p", "dropout_seed": "key", "key": "key_"}
_PARTS = ("query_proj", "key_proj", "value_proj", "output_proj", "dropout")
_SIZES = (
    "num_heads", "query_size", "key_size", "value_size", "output_size", "qk_size", "vo_size",
    "use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias",
)  # fmt: skip


class MultiheadAttention(eqx.nn.MultiheadAttention):
    """Multi-head attention with the constructor, the fields and the call of Equinox's module of this name.

    Parameters have the same names and shapes, so that saved ones load. `from_equinox` takes over a model.
    """

    def __call__(
        self,
        query: jax.Array,
        key_: jax.Array,
        value: jax.Array,
        mask: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
    ) -> jax.Array:
        """Compute attention [Sq, output_size] of query [Sq, query_size], as Equinox's module does.

        Args:
            query: [Sq, query_size]. A batch goes through `jax.vmap`, as in Equinox.
            key_: [Sk, key_size].
            value: [Sk, value_size].
            mask: [Sq, Sk] or [num_heads, Sq, Sk], bool, integer, or float of 0 and 1. 0 hides.
            key: a JAX random key, needed where weights are dropped. The same key drops the same weights, but
                others than in Equinox.
            inference: True drops none; by default `self.dropout.inference`.
            deterministic: Equinox's old name of inference.
            process_heads: takes query, key and value [length, num_heads, size] and returns others of the same
                shapes, such as with rotary embeddings.

        A query that sees no key has out 0 (S10), where Equinox has the mean of all values.

        Raises: ValueError naming the argument.
        """
        flags = {"inference": inference, "deterministic": deterministic}
        for name, flag in flags.items():
            if flag is not None:
                check_flag(name, flag)
        if process_heads is not None and not callable(process_heads):
            refuse(
                "process_heads", shown(process_heads), "a function of query, key and value", "Leave it out."
            )
        if deterministic is not None:
            warnings.warn("deterministic: Equinox calls it inference now. Pass inference.", stacklevel=2)
            inference = deterministic
        heads = (
            self._heads(self.query_proj, "query", query, self.query_size),
            self._heads(self.key_proj, "key_", key_, self.key_size),
            self._heads(self.value_proj, "value", value, self.value_size),
        )
        if process_heads is not None:
            heads = _processed(process_heads, heads)
        dtype = jnp.result_type(*heads)
        of_query, of_key, of_value = (x.astype(dtype) for x in heads)
        visible = _mask(mask, self.num_heads, of_query.shape[0], of_key.shape[0])
        dropout = self._dropout(key, inference)
        with renamed(_NAMES):
            out = flash_attention(of_query, of_key, of_value, attention_mask=visible, **dropout)
        return jax.vmap(self.output_proj)(out.reshape(out.shape[0], self.num_heads * self.vo_size))

    def _heads(self, projection: Any, name: str, x: jax.Array, size: int) -> jax.Array:
        """Project [length, size] to [length, heads, size of a head]."""
        check_is_array(name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            refuse(name, f"dtype {x.dtype}", "a float dtype", "Convert it with astype('float32').")
        if x.ndim != 2 or x.shape[1] != size:
            refuse(name, f"shape {x.shape}", f"[length, {size}]", "Map a batch with jax.vmap.")
        return jax.vmap(projection)(x).reshape(x.shape[0], self.num_heads, -1)

    def _dropout(self, key: Any, inference: bool | None) -> dict[str, Any]:
        p: Any = self.dropout.p  # an array in a model whose numbers all became arrays
        off = self.dropout.inference if inference is None else inference
        if off or (isinstance(p, int | float) and p == 0):
            return {}
        if key is None:
            refuse("key", None, "a JAX random key where weights are dropped", "Pass inference=True for none.")
        return {"dropout_prob": p, "dropout_seed": as_seed("key", key)}


def from_equinox[Model](model: Model) -> Model:
    """Return a model whose `equinox.nn.MultiheadAttention` modules are ours, with their parameters.

    model: a tree of modules, or one such module. Subclasses of it stay as they are.
    """

    def is_attention(x: Any) -> bool:
        return type(x) is eqx.nn.MultiheadAttention

    return jax.tree.map(lambda x: _taken_over(x) if is_attention(x) else x, model, is_leaf=is_attention)


def _taken_over(layer: eqx.nn.MultiheadAttention) -> MultiheadAttention:
    sizes = {name: getattr(layer, name) for name in _SIZES}
    empty = eqx.filter_eval_shape(MultiheadAttention, **sizes, key=jax.random.key(0))

    def parts(x: Any) -> tuple[Any, ...]:
        return tuple(getattr(x, name) for name in _PARTS)

    return eqx.tree_at(parts, empty, parts(layer))


def _processed(process: Callable[..., Any], heads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    shapes = [x.shape for x in heads]
    found = tuple(process(*heads))
    if [x.shape for x in found] != shapes:
        got = f"heads of shapes {[x.shape for x in found]}"
        refuse("process_heads", got, f"{shapes}, those that it takes", "Return heads of the same shapes.")
    return found


def _mask(mask: Any, num_heads: int, q_length: int, k_length: int) -> jax.Array | None:
    if mask is None:
        return None
    whole = (num_heads, q_length, k_length)
    check_is_array("mask", mask)
    if mask.shape not in (whole, whole[1:]):
        refuse("mask", f"shape {mask.shape}", f"{whole[1:]} or {whole}", "Broadcast it to one of them.")
    return as_mask("mask", mask, 3)
