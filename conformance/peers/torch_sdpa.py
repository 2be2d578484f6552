"""The Subjects of `torch.nn.functional.scaled_dot_product_attention` on a CPU: its math and its flash kernel.

Its documentation is at
https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html. In our
words:

- `attn_mask` is a mask, where True means to take part, or a float that is added to the scaled logits, of the
  dtype of the inputs. It broadcasts to the shape of the weights. A call has a mask, a bias or causal order.
- Causal order has "the form of the upper left causal bias".
- The scale is 1 / sqrt(E) unless one is given. Values may have a width of their own.
- The equivalent code multiplies all values by the weights, so a NaN in a hidden one leaks.
- "For math backend, all intermediates are kept in torch.float if inputs are in torch.half or torch.bfloat16."
- Grouped queries work in the math kernel. Dropout draws from a global generator, which a pure function cannot
  set, and is not declared.
- Neither a row that sees no key, nor any refusal of malformed arguments, is described.

torch computes on the host, from compiled programs too, and its autograd gives the gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from attest.conformance.cases.features import DTYPES
from attest.conformance.peers._packages import why_not_installed
from attest.conformance.subject import Limits, Subject, Tiling, default_numerics
from attest.reference.numerics import Numerics, format_of
from attest.reference.semantics import Semantics

type _Arrays = Mapping[str, Any]

# What each kernel differentiates: the flash kernel is not available for a bias that needs a gradient.
_DIFFERENTIATED = {"MATH": ("query", "key", "value", "bias"), "FLASH_ATTENTION": ("query", "key", "value")}


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    attention_mask: Any = None,
    bias: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    kernel: str,
) -> Any:
    """Call torch on the host, forward and backward."""
    if sum((attention_mask is not None, bias is not None, causal)) > 1:
        raise NotImplementedError("attention_mask, bias, causal: got several, expected one of them")
    arrays = {"query": query, "key": key, "value": value, "attention_mask": attention_mask, "bias": bias}
    given = {name: x for name, x in arrays.items() if x is not None}
    varied = {name: given.pop(name) for name in _DIFFERENTIATED[kernel] if name in given}
    return _on_the_host(kernel, softmax_scale, causal)(varied, given)


# One function for equal options: an eager call then compiles once.
@cache
def _on_the_host(kernel: str, scale: float | None, causal: bool) -> Callable[[_Arrays, _Arrays], Any]:
    """Return the function of arrays to differentiate and of others, by name, that torch computes."""
    run = partial(attend, kernel=kernel, scale=scale, causal=causal)

    @jax.custom_vjp
    def attention(varied: _Arrays, fixed: _Arrays) -> Any:
        query, value = varied["query"], varied["value"]
        out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
        return jax.pure_callback(run, out, {**varied, **fixed}, vmap_method="sequential")

    def forward(varied: _Arrays, fixed: _Arrays) -> Any:
        return attention(varied, fixed), (varied, fixed)

    def backward(saved: Any, d_out: Any) -> Any:
        varied, fixed = saved
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in varied.items()}
        given = {**varied, **fixed, "d_out": d_out}
        return jax.pure_callback(run, shapes, given, vmap_method="sequential"), None

    attention.defvjp(forward, backward)
    return attention


def attend(arrays: _Arrays, *, kernel: str, scale: float | None, causal: bool) -> Any:
    """Return out, or with "d_out" among the arrays the gradients of those that the kernel differentiates."""
    torch, attention = import_module("torch"), import_module("torch.nn.attention")
    tensors = {name: to_torch(torch, np.asarray(x)) for name, x in arrays.items()}
    d_out = tensors.pop("d_out", None)
    varied = [name for name in _DIFFERENTIATED[kernel] if name in tensors]
    for name in varied:
        tensors[name].requires_grad_(d_out is not None)
    query, key, value = (tensors[name].transpose(1, 2) for name in ("query", "key", "value"))
    added: Any = tensors.get("attention_mask", tensors.get("bias"))
    with attention.sdpa_kernel(getattr(attention.SDPBackend, kernel)):
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=added,
            is_causal=causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).transpose(1, 2)
        if d_out is None:
            return to_numpy(torch, out)
        gradients: Sequence[Any] = torch.autograd.grad(out, [tensors[name] for name in varied], d_out)
    return {name: to_numpy(torch, x) for name, x in zip(varied, gradients, strict=True)}


def to_torch(torch: Any, array: NDArray[Any]) -> Any:
    """Return a tensor of a copy of an array; NumPy's bfloat16 is handed over by its bits."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(torch: Any, tensor: Any) -> NDArray[Any]:
    """Return an array of a tensor."""
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return the arithmetic of the math kernel: float32 in all but its results, and a rounded scale.

    Queries and keys are multiplied by the square root of the scale.
    """
    return Numerics(output_dtype=dtype, input_rounding=2.0**-23, materialised=True)


def _flash_numerics(dtype: str, tiling: Tiling) -> Numerics:
    """Return the arithmetic of the flash kernel: in 16 bits, parts of sums are rounded before they are added.

    Its exponentials are those of its vector library.
    """
    cast = format_of(dtype)
    usual = default_numerics(dtype, tiling)
    return usual if dtype == "float32" else replace(usual, exponential=2.0**-20, partials=cast.unit)


def _subject(name: str, kernel: str, numerics: Callable[[str, Tiling], Numerics]) -> Subject:
    more = {"gqa", "value_dim"} if kernel == "MATH" else set[str]()
    return Subject(
        name=name,
        distribution="torch",
        call=partial(_call, kernel=kernel),
        features=frozenset({"scale", "bias", "mask", "broadcast", "causal", *more}),
        dtypes=DTYPES,
        semantics=Semantics(
            hidden_nonfinite="leaks",
            causal="top_left",
            empty_rows="unspecified",
            gradients=frozenset(_DIFFERENTIATED[kernel]),
            lse_gradient=False,
        ),
        numerics=numerics,
        backend="cpu",
        limits=Limits(
            excludes=tuple(map(frozenset, (("bias", "mask"), ("bias", "causal"), ("mask", "causal")))),
            validates=False,
        ),
        ready=lambda: why_not_installed("torch"),
    )


MATH = _subject("torch.sdpa.math", "MATH", _numerics)
FLASH = _subject("torch.sdpa.flash", "FLASH_ATTENTION", _flash_numerics)

SUBJECTS: tuple[Subject, ...] = ()
APART = (MATH, FLASH)
UNCONFIRMED: tuple[Subject, ...] = ()
