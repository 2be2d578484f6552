"""The first product of a sum: the matrix unit writes it to registers, instead of adding it to zeros.

Mosaic GPU sets an accumulator to 0 and lets every product add to it. That takes an instruction for each two
registers in front of each tile of logits. The unit can ignore what an accumulator holds, but Mosaic always
asks it to add. So the instruction is changed as soon as Mosaic has written it.
"""

import re
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

plgpu: Any = mosaic_gpu  # a checker takes some of its names for private

_ASM, _PRODUCT, _COMMIT = "llvm.inline_asm", "wgmma.mma_async", "wgmma.commit_group"
# The operand that says whether a product adds to its accumulator.
_ADDS = re.compile(r"setp\.ne\.b32 p, \$(\d+), 0")
# The operand that goes on, of operations that only pass a register on.
_PASSED = {
    "vector.bitcast": 0,
    "vector.broadcast": 0,
    "vector.extract": 0,
    "vector.extract_strided_slice": 0,
    "llvm.bitcast": 0,
    "llvm.extractvalue": 0,
    "llvm.insertelement": 1,
}


def ignore_zeros() -> None:
    """Let the product that has just been started ignore its accumulator, if that is known to hold zeros."""
    plgpu.inline_mgpu()(_ignore_zeros)()


def _ignore_zeros(_: Any) -> None:
    product = _first_instruction()
    if product is None:
        return
    # The instruction's text counts results, then operands. These begin with a register for each result.
    registers: Any = llvm.StructType(product.results[0].type).body
    count = len(registers)
    starts = [product.operands[i] for i in range(count)]
    barrier, asks = _source(starts[0]), _ADDS.findall(_text(product))
    if barrier is None or barrier.name != _ASM or len(asks) != 1:
        return
    if any(_source(x) != barrier for x in starts) or not all(_is_zero(x) for x in barrier.operands):
        return
    adds = int(asks[0]) - count
    with ir.InsertionPoint(product):
        product.operands[adds] = arith.constant(product.operands[adds].type, 0)
        nothing = llvm.UndefOp(starts[0].type).result
    for i in range(count):
        product.operands[i] = nothing
    _remove_unused(starts)


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


def _passed_on(value: Any) -> Iterator[Any]:
    """Yield the operations through which a register has come, the last one first."""
    while not isinstance(value.owner, ir.Block):
        op = value.owner.operation
        yield op
        if op.name not in _PASSED:
            return
        value = op.operands[_PASSED[op.name]]


def _source(register: Any) -> Any:
    """Return the operation behind those that only pass the register on, None for an argument of the block."""
    return next(reversed(list(_passed_on(register))), None)


def _is_zero(register: Any) -> bool:
    source = _source(register)
    if source is None or source.name != "arith.constant":
        return False
    return ir.FloatAttr(source.attributes["value"]).value == 0.0


def _remove_unused(registers: list[Any]) -> None:
    """Remove what has led to registers that nothing reads, with a barrier that no compiler would remove."""
    for register in registers:
        for op in list(_passed_on(register)):
            if any(list(result.uses) for result in op.results):
                break
            is_barrier = op.name == _ASM
            op.erase()
            if is_barrier:
                break
