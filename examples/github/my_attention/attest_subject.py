"""The kernel as attest sees it: how it is called, and what it supports."""

from typing import Any

from attest import Subject, validate_call
from my_attention import attention


def call(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Call the kernel with the options of attest; refuse what it does not support."""
    validate_call(query, key, value, supports=subject, **options)
    return attention(
        query, key, value, causal=options.get("causal", False), scale=options.get("softmax_scale")
    )


subject = Subject(
    name="my_attention",
    call=call,
    features=frozenset({"causal", "scale", "gqa"}),
    dtypes=("float32", "bfloat16"),
)
