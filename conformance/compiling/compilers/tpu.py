"""XLA and Mosaic: the TPU kernels, compiled without a TPU.

libtpu compiles for a topology as well as for a TPU: the real compilers, with the limits of a TPU. A job is a
whole pass, forward or backward, with the kernels that it launches and what XLA does around them.
"""

import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh, use_abstract_mesh

from attest.conformance.cases.case import Case
from attest.conformance.compiling.compiler import Binary, Compiler, Job
from attest.conformance.compiling.compilers.capture_fd import capture_fd
from attest.conformance.compiling.compilers.programs import Source, lowered, passes
from attest.conformance.compiling.devices import Device

# XLA would keep small arrays in VMEM, where a kernel needs no buffers for them. With arrays in HBM, where
# large ones have to be, a kernel takes the most VMEM, and the same for every length and batch.
_OPTIONS = {"xla_msa_enable": False}

_KERNEL = re.compile(r"%([\w-]+?)(?:\.\d+)? = .*custom_call_target=\"tpu_custom_call\"")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}')
_OVERFLOW = re.compile(
    r"on stack for %([\w-]+?)(?:\.\d+)? = .*(Scoped allocation .*? by [\d.]+\w?)", re.DOTALL
)


def compile_source(source: Source) -> Binary:
    """Compile one pass. Raises RuntimeError with the words of JAX, Mosaic or XLA in one line."""

    def lower() -> Any:
        device, *_ = devices_of(dict(source.target))
        with use_abstract_mesh(Mesh([device], ("core",)).abstract_mesh):
            return lowered(source, device)

    return compile_program(lower, _OPTIONS)[0]


def compile_program(
    lower: Callable[[], Any], options: Mapping[str, bool] | None = None
) -> tuple[Binary, str]:
    """Compile the `jax.stages.Lowered` of a function: what it takes on a chip, and its module as text.

    options: of XLA.

    Raises RuntimeError with the words of JAX, Mosaic or XLA in one line.
    """
    with capture_fd():
        program = lower()
        try:
            compiled = program.compile(compiler_options=options)
        except Exception as error:
            raise RuntimeError(_reason(str(error))) from error
    hlo = compiled.as_text()
    vmem = vmem_of(hlo)
    if not vmem:
        raise RuntimeError("launches no kernel of Mosaic: XLA compiled all of it")
    memory = compiled.memory_analysis()
    code, temporary = memory.generated_code_size_in_bytes, memory.temp_size_in_bytes
    arrays = memory.argument_size_in_bytes + memory.output_size_in_bytes
    taken = {
        "scoped_vmem_bytes": max(vmem.values()),
        "hbm_bytes": arrays + temporary + code,
        "temporary_bytes": temporary,
        "code_bytes": code,
    }
    notes = tuple(f"{kernel}: {size} bytes of scoped VMEM" for kernel, size in vmem.items())
    return Binary(taken, notes), hlo


def vmem_of(hlo: str) -> Mapping[str, int]:
    """Return the bytes of VMEM that each kernel of Mosaic is given in a compiled module, by its name."""
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        kernel, size = _KERNEL.search(line), _VMEM.search(line)
        if kernel is not None:
            if size is None:
                raise RuntimeError(f"XLA says nothing of the VMEM that {kernel[1]} takes")
            found[kernel[1]] = max(int(size[1]), found.get(kernel[1], 0))
    return found


def devices_of(target: Mapping[str, Any]) -> list[Any]:
    """Return the devices of the topology of a target of devices.toml."""
    return _topology(target["topology"]).devices


@cache
def _topology(name: str) -> Any:
    # libtpu locks a file, so that one process alone has the TPU. None is used here, where many compile.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def _reason(message: str) -> str:
    """Return one line of an error of XLA or Mosaic: that with the kernel and the numbers, if any."""
    overflow = _OVERFLOW.search(message)
    if overflow is not None:
        return f"{overflow[1]}: {overflow[2]}"
    return message.strip().splitlines()[0] if message.strip() else "the compiler says nothing"


def _jobs(case: Case, device: Device) -> list[Job]:
    return passes("attest.kernels.pallas.tpu", "flash_attention_with_lse", case, device)


def _why_not() -> str | None:
    if find_spec("libtpu") is None:
        return "libtpu is not installed: it is the dependency group tpu, for Linux on x86-64"
    return None


TPU = Compiler(
    name="tpu",
    devices=frozenset({"v5e", "v6e", "v5p", "tpu7x"}),
    why_not=_why_not,
    jobs=_jobs,
    compile=compile_source,
    packages=("libtpu",),
)
