"""The record of a call's arguments: what is given reaches the checks, and what does not fit is refused."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from attest.kernels import arguments as module
from attest.kernels import attention
from attest.kernels.arguments import AttentionArguments, by_name, check_arguments, with_arguments
from attest.kernels.operations import functions
from attest.kernels.ring import ring_attention, ring_attention_with_lse

# What is no matter of the checked call: settings, the choice, and what comes before both.
ELSEWHERE = {
    "fwd_params", "bwd_params", "config", "normalize_output", "precision", "logits_dtype", "platform",
    "mask_info", "mask", "dropout_rng",
}  # fmt: skip
PUBLIC = (
    attention.flash_attention,
    attention.flash_attention_with_lse,
    ring_attention,
    ring_attention_with_lse,
    functions.flash_attention,
    functions.attention,
)


def sentinels(record: Any = AttentionArguments) -> dict[str, Any]:
    return {x.name: object() for x in fields(record)}


def test_every_argument_reaches_the_check_of_its_own_name(monkeypatch: pytest.MonkeyPatch):
    given = sentinels()
    seen: dict[str, Any] = {}

    def check_call(query: Any, key: Any, value: Any, **others: Any) -> None:
        seen.update(query=query, key=key, value=value, **others)

    monkeypatch.setattr(module, "check_call", check_call)
    check_arguments(AttentionArguments(**given))
    assert seen == {name: x for name, x in given.items() if name not in ELSEWHERE}


def test_a_change_keeps_every_other_argument_and_the_type():
    given = sentinels()
    found = replace(AttentionArguments(**given), causal=True)
    assert type(found) is AttentionArguments
    assert by_name(found) == given | {"causal": True}


@pytest.mark.parametrize("name", [x.name for x in fields(AttentionArguments)])
def test_a_parameter_is_the_field_of_its_name(name: str):
    @with_arguments(AttentionArguments)
    def function(arguments: AttentionArguments) -> Any:
        return arguments

    given = sentinels()
    assert getattr(function(**given), name) is given[name]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda x: f"{x.__module__}.{x.__name__}")
def test_a_public_function_shows_every_parameter(function: Callable[..., Any]):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:3] == ["query", "key", "value"]
    assert {"q_segment_ids", "kv_positions", "alibi_slopes", "dropout_shared"} <= set(parameters)
    assert all(x.annotation is not inspect.Parameter.empty for x in parameters.values())
    assert inspect.signature(function).return_annotation is not inspect.Signature.empty


@pytest.mark.parametrize("function", PUBLIC, ids=lambda x: f"{x.__module__}.{x.__name__}")
@pytest.mark.parametrize(
    ("given", "named", "message"),
    [
        ((1, 2), {}, "missing a required argument: 'value'"),
        ((1, 2, 3), {"casual": True}, "got an unexpected keyword argument 'casual'"),
        ((1, 2, 3), {"key": 4}, "multiple values for argument 'key'"),
        ((1,) * 40, {}, "too many positional arguments"),
    ],
)
def test_arguments_that_fit_no_parameter_are_refused_by_name(
    function: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any], message: str
):
    with pytest.raises(TypeError, match=f"^{function.__name__}\\(\\) {message}"):
        function(*given, **named)
