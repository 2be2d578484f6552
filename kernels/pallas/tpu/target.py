"""The devices of the TPU kernels: TPUs, and Pallas's interpreter."""

from typing import NoReturn

from jax._src import config

from attest.kernels.pallas.target import requirement


def interpreting() -> bool:
    """Return whether `pltpu.force_tpu_interpret_mode` is in force here."""
    return bool(config.pallas_tpu_interpret_mode_context_manager.value)


def _refuse(platforms: str) -> NoReturn:
    raise NotImplementedError(
        f"attest.kernels.pallas.tpu: compiled for {platforms}, expected tpu. Use attest.kernels.xla there, "
        "or call it under jax.experimental.pallas.tpu.force_tpu_interpret_mode() to interpret the kernels."
    )


# Return x. Lowering it for any device other than a TPU raises NotImplementedError.
require_tpu = requirement("require_tpu", "tpu", _refuse)
