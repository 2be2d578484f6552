"""The collectives of a compiled program, and whether exchanges of keys run while kernels compute.

Read from the text of a scheduled module of XLA, in which instructions stand in the order in which they are
started. A collective permute is either one instruction, which is awaited before the next one starts, or a
start and a done with others between them.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_PERMUTE = "collective-permute"
_COLLECTIVES = (_PERMUTE, "all-gather", "reduce-scatter", "all-reduce", "all-to-all")

_SCHEDULED = "is_scheduled=true"
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.-]+) = (.*)$")
# The opcode is the first word before a parenthesis; those of tiled layouts follow no space.
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")
_OPERAND = re.compile(r"\(%([\w.-]+)")
_KERNEL = re.compile(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"')
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(?:%([\w.-]+)|\{([^}]*)\})")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


@dataclass(frozen=True)
class Instruction:
    """An instruction of a program. pairs: (from, to) of a permute. computes: whether it runs a kernel.

    A loop, a branch, a call or a fusion computes if a computation that it calls does.
    """

    name: str
    opcode: str
    operand: str
    pairs: tuple[tuple[int, int], ...]
    computes: bool

    def exchanges(self, devices: int) -> bool:
        """Return whether it starts an exchange of a ring: each sender is as far from its receiver.

        Other permutes, such as those of the order of zigzag, precede or follow all computation.
        """
        permutes = self.opcode in (_PERMUTE, f"{_PERMUTE}-start")
        distances = {(target - source) % devices for source, target in self.pairs}
        return permutes and len(distances) == 1 and distances != {0}


type Program = Mapping[str, Sequence[Instruction]]


@dataclass(frozen=True)
class Overlap:
    """The exchanges of a program. collectives: how many there are of each kind, by the opcode of XLA.

    exchanges: how many permutes of a ring start. exposed: the names of those that overlap no kernel.
    """

    collectives: Mapping[str, int]
    exchanges: int
    exposed: tuple[str, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """The reasons why exchanges are not hidden behind computation, in sentences; empty if they are."""
        found: list[str] = []
        if not self.exchanges:
            found.append("exchanges no keys: it has no collective permute between neighbours")
        if self.exposed:
            words = f"{len(self.exposed)} of {self.exchanges} exchanges overlap no kernel"
            found.append(f"{words}: {', '.join(self.exposed)}")
        return tuple(found)


def overlap_of(hlo: str, devices: int) -> Overlap:
    """Return what the text of a compiled module says of the collectives of a ring of devices.

    Raises RuntimeError if the module has no schedule, or if a permute is started and not awaited where it is.
    """
    if _SCHEDULED not in hlo.partition("\n")[0]:
        raise RuntimeError("the compiled module has no schedule: its order says nothing of overlap")
    program = _parsed(hlo)
    counts: Counter[str] = Counter()
    exposed: list[str] = []
    exchanges = 0
    for instructions in program.values():
        counts.update(x.opcode.removesuffix("-start") for x in instructions)
        kernels = [at for at, x in enumerate(instructions) if x.computes]
        starts = [at for at, x in enumerate(instructions) if x.exchanges(devices)]
        exchanges += len(starts)
        for start in starts:
            end = _end(instructions, start)
            if not any(start < at < end for at in kernels):
                exposed.append(instructions[start].name)
    collectives = {opcode: counts[opcode] for opcode in _COLLECTIVES if counts[opcode]}
    return Overlap(collectives, exchanges, tuple(exposed))


def _end(instructions: Sequence[Instruction], start: int) -> int:
    """Return where a permute is awaited: by itself, if it is one instruction."""
    begun = instructions[start]
    if begun.opcode == _PERMUTE:
        return start
    for at in range(start + 1, len(instructions)):
        if instructions[at].opcode == f"{_PERMUTE}-done" and instructions[at].operand == begun.name:
            return at
    raise RuntimeError(f"{begun.name} is not awaited in the computation that starts it")


def _parsed(hlo: str) -> Program:
    """Return the instructions of each computation in order. XLA writes a computation after those it calls."""
    found: dict[str, list[Instruction]] = {}
    instructions: list[Instruction] = []
    for line in hlo.splitlines():
        computation = _COMPUTATION.match(line)
        if computation is not None:
            instructions = found.setdefault(computation[1], [])
        written = _INSTRUCTION.match(line)
        opcode = None if written is None else _OPCODE.search(f" {written[2]}")
        if written is None or opcode is None:
            continue
        rest = written[2][opcode.end() - 2 :]
        operand, pairs = _OPERAND.match(rest), _PAIRS.search(rest)
        called = [name for one, many in _CALLED.findall(rest) for name in re.findall(r"[\w.-]+", one or many)]
        instructions.append(
            Instruction(
                name=written[1],
                opcode=opcode[1],
                operand=operand[1] if operand else "",
                pairs=tuple((int(a), int(b)) for a, b in _PAIR.findall(pairs[1])) if pairs else (),
                computes=_KERNEL.search(rest) is not None
                or any(x.computes for name in called for x in found.get(name, ())),
            )
        )
    return found
