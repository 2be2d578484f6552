"""The Subjects of our operations: what model code calls, by the kernels that they choose here.

`operation.flash_attention` and `easydel.flash_attn2` choose the kernel and its configuration. Each kernel is
judged below the operation, too, in three ways: "explicit", with a configuration that the call gives; "tuned",
with one that a tuning run found; and "sharded", with one that the call gives, over the devices of a mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from attest.conformance.subject import Sharding, Subject, Tiling
from attest.conformance.subjects import auto, xla
from attest.conformance.subjects._explicit import explicit, sharded, sharded_way, why_not_sharded
from attest.conformance.subjects._run_by_operations import KERNELS, JudgedKernel
from attest.conformance.subjects._tuned import TunedKernel
from attest.conformance.subjects._ways import ways
from attest.kernels.operations import attention, flash_attention
from attest.kernels.operations.easydel import FlashAttn

_AUTO = auto.SUBJECTS[0]
_ATTENTION = next(subject for subject in xla.SUBJECTS if subject.name == "xla.attention")


def _weighted(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call `attention`, which switches dropout on by `deterministic=False` and returns its weights too."""
    return attention(query, key, value, deterministic=False, **options)[0]


def _easydel(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return FlashAttn()(query, key, value, **options).attention_outputs


def _tilings(kernel: JudgedKernel) -> tuple[Tiling, ...]:
    return tuple(Tiling({"blocks": sizes}, *sizes) for sizes in kernel.given)


def _explicit(kernel: JudgedKernel) -> Mapping[str, Any]:
    return {"call": explicit(kernel), "tilings": _tilings(kernel), "ways": ways(kernel)}


def _tuned(kernel: JudgedKernel) -> Mapping[str, Any]:
    tuned = TunedKernel(kernel)
    # Which candidate is the fastest is not known: fewer keys in a step round more often.
    fewest = Tiling({}, *(min(sizes) for sizes in zip(*kernel.candidates, strict=True)))
    return {"call": tuned.run, "tilings": (fewest,), "ways": (tuned.way(),)}


def _sharded(kernel: JudgedKernel) -> Mapping[str, Any]:
    def ready() -> str | None:
        return kernel.declared.ready() or why_not_sharded()

    return {
        "call": sharded(kernel),
        "tilings": _tilings(kernel),
        "ways": (sharded_way(kernel),),
        "ready": ready,
        # Specs are those of arrays with one batch dimension, on one device before the call.
        "limits": replace(kernel.declared.limits, batch_dims=False),
        "sharding": Sharding(),
    }


_WAYS: Mapping[str, Callable[[JudgedKernel], Mapping[str, Any]]] = {
    "explicit": _explicit,
    "tuned": _tuned,
    "sharded": _sharded,
}


def _configured(kernel: JudgedKernel, way: str) -> Subject:
    """Return the operation on one kernel, which declares what the kernel does."""
    # It is judged by few cases, since it hands its calls to a kernel that is a Subject itself.
    few = {"implementation": lambda _: kernel.platform, "returns_lse": False}
    name = f"operation.{kernel.declared.name}.{way}"
    return replace(kernel.declared, **{"name": name, **few, **_WAYS[way](kernel)})


SUBJECTS: tuple[Subject, ...] = (
    replace(_AUTO, name="operation.flash_attention", call=flash_attention, returns_lse=False),
    replace(_ATTENTION, name="operation.attention", call=_weighted, implementation=lambda _: "xla"),
    replace(_AUTO, name="easydel.flash_attn2", call=_easydel, returns_lse=False),
    *(_configured(kernel, way) for kernel in KERNELS for way in _WAYS),
)
