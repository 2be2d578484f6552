"""Configurations of operations: JSON both ways, and what is refused."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.kernels import triton, xla
from attest.kernels.operations import (
    AttentionConfig,
    Backend,
    BwdParams,
    FlashAttentionConfig,
    FwdParams,
    Platform,
)

sizes = st.none() | st.integers(1, 4096)
neutral = {"q_blocksize": sizes, "kv_blocksize": sizes, "num_warps": sizes, "num_stages": sizes}
platforms = st.sampled_from(["auto", "pallas", "triton", "xla", "mosaic_gpu", "pallas_tpu"])
backends = st.sampled_from(list(Backend))
flash = st.builds(
    FlashAttentionConfig,
    st.none() | st.builds(FwdParams, **neutral),
    st.none() | st.builds(BwdParams, **neutral),
    platforms,
    backends,
) | st.builds(
    FlashAttentionConfig,
    config=st.builds(xla.Config, st.builds(xla.ChunkSizes, st.integers(1, 512), st.integers(1, 512))),
    backend=backends,
)
attention = st.builds(AttentionConfig, sizes, sizes, sizes, sizes, st.sampled_from(["auto", "xla"]), backends)


@given(flash | attention)
def test_a_config_goes_to_json_and_back(config):
    text = config.to_json()
    again = type(config).from_json(text)
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_json() == text
    assert "\n" not in text


def test_platforms_and_backends_are_names_or_members():
    named = FlashAttentionConfig(platform=Platform.XLA, backend=Backend.CPU)
    assert named == FlashAttentionConfig(platform="xla", backend="cpu")
    assert FlashAttentionConfig(platform=None) == FlashAttentionConfig()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FlashAttentionConfig(platform="cuda"), "platform: got 'cuda'; expected a platform with"),
        (lambda: FlashAttentionConfig(platform="metal"), "platform: got 'metal'; expected one of 'auto'"),
        (lambda: FlashAttentionConfig(backend="npu"), "backend: got 'npu'; expected one of 'gpu'"),
        (lambda: FlashAttentionConfig({"q_blocksize": 3}), "fwd_params: got a dict; expected FwdParams"),
        (lambda: FlashAttentionConfig(BwdParams()), "fwd_params: got a BwdParams; expected FwdParams"),
        (
            lambda: FlashAttentionConfig(FwdParams(64), config=xla.Config()),
            "fwd_params: got sizes beside a config; expected one of them",
        ),
        (
            lambda: FlashAttentionConfig(platform="xla", config=triton.Config()),
            "platform: got 'xla'; expected 'auto' or 'triton'",
        ),
        (lambda: FlashAttentionConfig(config=object()), "config: got a object"),
        (lambda: FwdParams(q_blocksize=0), "FwdParams.q_blocksize: got 0"),
        (lambda: BwdParams(num_warps=True), "BwdParams.num_warps"),
        (lambda: AttentionConfig(platform="triton"), "platform: got 'triton'; expected 'auto' or 'xla'"),
        (lambda: AttentionConfig(block_q=-1), "got -1"),
        (lambda: FlashAttentionConfig.from_json("[]"), "config: got"),
        (lambda: FlashAttentionConfig.from_json("{"), "config: got"),
        (lambda: FlashAttentionConfig.from_json('{"speed": 3}'), "config: got the field 'speed'"),
        (lambda: FlashAttentionConfig.from_json('{"fwd_params": {"x": 3}}'), "fwd_params: got the field 'x'"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_by_name(build, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build()


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(
        ["fwd_params", "bwd_params", "platform", "backend", "config", "q_blocksize", "implementation", "x"]
    ), x, max_size=4),
    max_leaves=8,
))  # fmt: skip
def test_any_json_is_a_config_or_a_value_error(value):
    try:
        config = FlashAttentionConfig.from_json(json.dumps(value))
    except ValueError:
        return
    assert FlashAttentionConfig.from_json(config.to_json()) == config
