"""The device that a call runs on: that of its arrays, or JAX's default device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attest.kernels.choice.choose import Device, device_of


class Gpu:
    def __init__(self, capability: Any) -> None:
        if capability is not None:
            self.compute_capability = capability

    platform, device_kind = "gpu", "GPU of tests"


CPU = Device("cpu", kind="cpu")


@pytest.mark.parametrize("capability", ["9.0", "8.0", "gfx942", None])
def test_without_arrays_the_device_is_the_first_of_the_default_backend(capability, monkeypatch):
    assert device_of() == CPU
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(capability), Gpu("1.0")])
    assert device_of() == device_of(np.zeros(3)) == Device("gpu", capability, "GPU of tests")
    assert device_of(jnp.zeros(3)) == CPU, "an array runs where it is"


@pytest.mark.parametrize("named", [False, True])
def test_the_device_is_that_of_default_device(named, monkeypatch):
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "devices", lambda backend="gpu": [cpu] if backend == "cpu" else [Gpu("9.0")])
    with jax.default_device("cpu" if named else cpu):
        assert device_of() == CPU
        told: list[Device] = []
        jax.make_jaxpr(lambda x: told.append(device_of(x)) or x)(1.0)
        assert told == [CPU]
    assert device_of() == Device("gpu", "9.0", "GPU of tests")
