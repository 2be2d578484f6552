"""A first product that overwrites its accumulator, instead of being added to zeros.

Mosaic GPU sets an accumulator to 0 and adds every product to it. That takes an instruction for each two
registers in front of each tile of logits. WGMMA overwrites the accumulator where its operand scale-d is
false, but Mosaic always writes true. So the operand is changed as soon as Mosaic has written the instruction.

Source: PTX ISA, wgmma.mma_async.
"""

import re
from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

_ASM, _PRODUCT, _COMMIT = "llvm.inline_asm", "wgmma.mma_async", "wgmma.commit_group"
# Where an instruction's text reads scale-d: the number counts results, then operands.
_SCALE_D = re.compile(r"setp\.ne\.b32 p, \$(\d+), 0")
# Operations that forward a register unchanged, and which operand that is.
_FORWARDING = {
    "vector.bitcast": 0,
    "vector.broadcast": 0,
    "vector.extract": 0,
    "vector.extract_strided_slice": 0,
    "llvm.bitcast": 0,
    "llvm.extractvalue": 0,
    "llvm.insertelement": 1,
}


def overwrite_zeros() -> None:
    """Make the product that was just started overwrite its accumulator, if that is known to be 0."""
    plgpu.inline_mgpu()(_overwrite_zeros)()


def _overwrite_zeros(_: Any) -> None:
    product = _first_instruction()
    if product is None:
        return
    # The operands begin with a register of the accumulator for each result.
    registers: Any = llvm.StructType(product.results[0].type).body
    count = len(registers)
    accumulator = [product.operands[i] for i in range(count)]
    barrier, *others = map(_source, accumulator)
    scale_d = _SCALE_D.findall(_text(product))
    if barrier is None or barrier.name != _ASM or len(scale_d) != 1:
        return
    if any(other != barrier for other in others) or not all(map(_is_zero, barrier.operands)):
        return
    at = int(scale_d[0]) - count
    with ir.InsertionPoint(product):
        product.operands[at] = arith.constant(product.operands[at].type, 0)
        undefined = llvm.UndefOp(accumulator[0].type).result
    for i in range(count):
        product.operands[i] = undefined
    _remove_unused(accumulator)


def _first_instruction() -> Any:
    """Return the first instruction of the newest product of this block, None if it has none."""
    newest_first = reversed(list(ir.InsertionPoint.current.block.operations))
    found = None
    for i, op in enumerate(newest_first):
        text = _text(op.operation)
        if i > 0 and _COMMIT in text:
            break
        if _PRODUCT in text:
            found = op.operation
    return found


def _text(op: Any) -> str:
    return op.attributes["asm_string"].value if op.name == _ASM else ""


def _path(register: Any) -> list[Any]:
    """Return the operation that made a register, behind those that only forward it, the newest first."""
    found: list[Any] = []
    while not isinstance(register.owner, ir.Block):
        op = register.owner.operation
        found.append(op)
        if op.name not in _FORWARDING:
            break
        register = op.operands[_FORWARDING[op.name]]
    return found


def _source(register: Any) -> Any:
    """Return the last operation of a register's path, None for an argument of the block."""
    return next(reversed(_path(register)), None)


def _is_zero(register: Any) -> bool:
    source = _source(register)
    if source is None or source.name != "arith.constant":
        return False
    return ir.FloatAttr(source.attributes["value"]).value == 0.0


def _remove_unused(registers: list[Any]) -> None:
    """Remove the paths of registers up to their barrier, which no compiler would remove, as far as unused."""
    for register in registers:
        for op in _path(register):
            if any(list(result.uses) for result in op.results):
                break
            op.erase()
