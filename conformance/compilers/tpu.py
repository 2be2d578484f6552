"""What XLA and Mosaic make of the passes of the Pallas kernels, for TPUs that are not here.

libtpu compiles for a topology as well as for a TPU: the real compilers, with the limits of a TPU. A job is a
whole pass, forward or backward, with the kernels that it launches and what XLA does around them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding, use_abstract_mesh

from conformance.case import Case
from conformance.compilers import Binary, Compiler, Device, Job
from conformance.compilers.overheard import overheard
from conformance.execute import describe
from conformance.roofline import FORWARD, PASSES
from conformance.shapes import shapes_of

# XLA would keep small arrays in VMEM, where a kernel needs no buffers for them. With arrays in HBM, where
# large ones have to be, a kernel takes the most VMEM, and the same for every length and batch.
_OPTIONS = {"xla_msa_enable": False}

_KERNEL = re.compile(r"%([\w-]+?)(?:\.\d+)? = .*custom_call_target=\"tpu_custom_call\"")
_VMEM = re.compile(r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"\}')
_OVERFLOW = re.compile(
    r"on stack for %([\w-]+?)(?:\.\d+)? = .*(Scoped allocation .*? by [\d.]+\w?)", re.DOTALL
)


@dataclass(frozen=True)
class Source:
    """A pass to compile, found again in any process: module and name are those of a function with the
    signature of our kernels that return lse.
    """

    module: str
    name: str
    which: str
    case: Case
    topology: str


def passes(module: str, name: str, case: Case, device: Device) -> list[Job]:
    """The forward and the backward pass of a function; nothing is traced before it is compiled."""
    return [Job(which, {}, Source(module, name, which, case, device.target["topology"])) for which in PASSES]


def compile_source(source: Source) -> Binary:
    """Compiles one pass. Raises RuntimeError with the words of JAX, Mosaic or XLA in one line."""
    with overheard():
        device = _device(source.topology)
        with use_abstract_mesh(Mesh([device], ("core",)).abstract_mesh):
            try:
                program = _lowered(source, SingleDeviceSharding(device))
            except Exception as error:  # kernels are code that may be wrong
                raise RuntimeError(f"its launch raised {describe(error)}") from error
            try:
                compiled = program.compile(compiler_options=_OPTIONS)
            except Exception as error:
                raise RuntimeError(_reason(str(error))) from error
    vmem = vmem_of(compiled.as_text())
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
    return Binary(taken, tuple(f"{kernel}: {size} bytes of scoped VMEM" for kernel, size in vmem.items()))


def vmem_of(hlo: str) -> Mapping[str, int]:
    """Bytes of VMEM that each kernel of Mosaic is given in a compiled module, by its name."""
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        kernel, size = _KERNEL.search(line), _VMEM.search(line)
        if kernel is not None:
            if size is None:
                raise RuntimeError(f"XLA says nothing of the VMEM that {kernel[1]} takes")
            found[kernel[1]] = max(int(size[1]), found.get(kernel[1], 0))
    return found


@cache
def _device(topology: str) -> Any:
    # libtpu locks a file, so that one process alone has the TPU. None is used here, where many compile.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def _lowered(source: Source, sharding: SingleDeviceSharding) -> Any:
    def placed(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    call = getattr(import_module(source.module), source.name)
    arrays, options = shapes_of(source.case)
    varied = placed({name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)})
    fixed = placed({name: x for name, x in arrays.items() if name not in varied})

    def forward(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return call(**varied, **fixed, **options)

    if source.which == FORWARD:
        return jax.jit(forward).lower(varied, fixed)

    def pulled(varied: dict[str, Any], fixed: dict[str, Any]) -> Any:
        return jax.vjp(lambda varied: forward(varied, fixed), varied)

    # What JAX keeps for the backward pass is a tree of arrays: its shapes alone make that pass a program.
    outputs, pull = jax.eval_shape(pulled, varied, fixed)
    return jax.jit(lambda pull, cotangents: pull(cotangents)).lower(placed(pull), placed(outputs))


def _reason(said: str) -> str:
    """One line of an error of XLA or Mosaic: that with the kernel and the numbers, where there is one."""
    overflow = _OVERFLOW.search(said)
    if overflow is not None:
        return f"{overflow[1]}: {overflow[2]}"
    return said.strip().splitlines()[0] if said.strip() else "the compiler says nothing"


def _jobs(case: Case, device: Device) -> list[Job]:
    return passes("kernels.pallas.tpu", "flash_attention_with_lse", case, device)


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
)
