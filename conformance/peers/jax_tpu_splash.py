"""The Subjects of `jax.experimental.pallas.ops.tpu.splash_attention`: on a TPU, and interpreted on a CPU.

Its documentation is in its source, where `attention_reference` states what the kernel should compute:
https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention. In our words:

- The logits are not scaled.
- A `CausalMask` and a `LocalMask` compare positions from the top-left corner if their offset is 0. The window
  includes both ends, and None leaves a side open. Masks of values are fixed when the kernel is made.
- Tokens attend to each other if their segment ids are equal. No id marks padding.
- A sink is one logit for each query head. The adapter joins several by their logsumexp.
- `attn_logits_soft_cap` caps the logits before anything is hidden.
- "It is important that [the mask] does not have any all-zero rows": rows that see no key are undefined.
- Lengths are multiples of the blocks, which are 128 by default. Values may have a width of their own.
- key heads may be fewer: grouped queries. out is differentiated by query, key, value and sinks.
- The reference multiplies all values by the weights, so a NaN in a hidden one leaks.
- The calls are checked in part; nothing is said about arguments that are malformed.
"""

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from attest.conformance.peers._windows import Window, sides_of
from attest.conformance.subject import Limits, Subject, Tiling
from attest.reference.semantics import Semantics

_BLOCK = 128
_FOLDER = "jax.experimental.pallas.ops.tpu.splash_attention"


def _call(
    query: Any,
    key: Any,
    value: Any,
    *,
    softmax_aux: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    causal: bool = False,
    sliding_window: Window = None,
    logits_soft_cap: float | None = None,
    interpret: bool = False,
) -> Any:
    library = import_module(_FOLDER)
    heads = query.shape[2]
    mask = _mask(library, (query.shape[1], key.shape[1]), causal, sliding_window)
    attend = library.make_splash_mha_single_device(
        library.MultiHeadMask([mask] * heads), attn_logits_soft_cap=logits_soft_cap, interpret=interpret
    )
    segments = None if q_segment_ids is None else library.SegmentIds(q_segment_ids, kv_segment_ids)
    sinks = None
    if softmax_aux is not None:
        joined = jax.nn.logsumexp(jnp.atleast_2d(softmax_aux).astype(jnp.float32), axis=-1)
        sinks = _with_float32_gradient(jnp.broadcast_to(joined, (heads,)))
    by_heads = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    out = jax.vmap(attend, in_axes=(0, 0, 0, 0, None))(*by_heads, segments, sinks)
    return out.transpose(0, 2, 1, 3)


@jax.custom_vjp
def _with_float32_gradient(sinks: Any) -> Any:
    """Return float32 sinks, whose gradient the kernel gives the dtype of its inputs."""
    return sinks


_with_float32_gradient.defvjp(lambda sinks: (sinks, None), lambda _, d_sinks: (d_sinks.astype(jnp.float32),))


def _mask(
    library: Any,
    shape: tuple[int, int],
    causal: bool,
    window: Window,
) -> Any:
    """Return the mask of causal order, of a window, of both or of neither."""
    masks = [library.CausalMask(shape)] if causal else []
    if window is not None:
        masks.append(library.LocalMask(shape, sides_of(window), offset=0))
    if not masks:
        return library.FullMask(shape)
    return masks[0] if len(masks) == 1 else masks[0] & masks[1]


def _subject(name: str, backend: str, longest: int, **options: Any) -> Subject:
    return Subject(
        name=name,
        distribution="jax",
        call=partial(_call, **options),
        features=frozenset({"causal", "window", "segments", "sinks", "soft_cap", "gqa", "value_dim"}),
        dtypes=("float32", "bfloat16"),
        semantics=Semantics(
            default_scale="one",
            hidden_nonfinite="leaks",
            causal="top_left",
            window="top_left",
            segments="equality",
            empty_rows="unspecified",
            gradients=frozenset({"query", "key", "value", "softmax_aux"}),
            lse_gradient=False,
        ),
        backend=backend,
        interpreter="Pallas" if backend == "cpu" else "",
        tilings=(Tiling({}, _BLOCK, _BLOCK),),
        limits=Limits(longest=longest, length_multiple=_BLOCK, validates=False),
    )


TPU = _subject("jax.pallas.tpu.splash_attention", "tpu", 1 << 20)
INTERPRETED = _subject("jax.pallas.tpu.splash_attention.interpreted", "cpu", 512, interpret=True)

SUBJECTS: tuple[Subject, ...] = ()
APART = (INTERPRETED,)
UNCONFIRMED = (TPU,)
