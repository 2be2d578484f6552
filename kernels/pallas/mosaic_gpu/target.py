"""The devices of the Hopper kernels: NVIDIA GPUs of compute capability 9.0."""

from typing import NoReturn

import jax

from attest.kernels.pallas.target import requirement

CAPABILITY = "9.0"


def _check() -> None:
    """Refuse GPUs that are present and not Hopper; without a GPU, a program may still be compiled for one."""
    if jax.default_backend() == "gpu":
        found = {getattr(device, "compute_capability", "none") for device in jax.devices()}
        if CAPABILITY not in found:
            _refuse(f"GPUs of compute capability {', '.join(sorted(found))}")


def _refuse(target: str) -> NoReturn:
    raise NotImplementedError(
        f"attest.kernels.pallas.mosaic_gpu: compiled for {target}, expected an NVIDIA GPU of compute "
        f"capability {CAPABILITY}. Use attest.kernels.flash_attention, which chooses."
    )


# Return x. Lowering it for any device other than a Hopper GPU raises NotImplementedError.
require_hopper = requirement("require_hopper", "cuda", _refuse, _check)
