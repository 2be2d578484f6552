"""The Subjects of our operations: what model code calls, by the kernels that they choose here."""

from dataclasses import replace
from typing import Any

from attest.conformance.subject import Subject
from attest.conformance.subjects import auto, xla
from attest.kernels.operations import attention, flash_attention
from attest.kernels.operations.easydel import FlashAttn

_AUTO = auto.SUBJECTS[0]
_ATTENTION = next(subject for subject in xla.SUBJECTS if subject.name == "xla.attention")


def _weighted(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """`attention` switches dropout on by `deterministic=False` and returns its weights too."""
    return attention(query, key, value, deterministic=False, **options)[0]


def _easydel(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return FlashAttn()(query, key, value, **options).attention_outputs


SUBJECTS: tuple[Subject, ...] = (
    replace(_AUTO, name="operation.flash_attention", call=flash_attention, returns_lse=False),
    # It is judged by few cases, since it hands its calls to a kernel that is a Subject itself.
    replace(_ATTENTION, name="operation.attention", call=_weighted, implementation=lambda _: "xla"),
    replace(_AUTO, name="easydel.flash_attn2", call=_easydel, returns_lse=False),
)
