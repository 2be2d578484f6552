"""What the text of a scheduled module says of exchanges, in modules that are written here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.compiling.overlap import overlap_of

HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4"
RING = "{{0,1},{1,2},{2,3},{3,0}}"
# Under causal order the last keys are not passed on.
PART_OF_RING = "{{0,1},{1,2}}"
HOME = "{{0,3},{1,0},{2,1},{3,2}}"
ZIGZAG = "{{0,1},{1,3},{2,2},{3,0}}"

BRANCHES = """\
%computing (x: bf16[8]) -> bf16[8] {
  %x = bf16[8]{0} parameter(0)
  ROOT %launched = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call"
}

%hidden (y: bf16[8]) -> bf16[8] {
  %y = bf16[8]{0} parameter(0)
  ROOT %nothing = bf16[8]{0} copy(%y)
}

%step (z: bf16[8]) -> bf16[8] {
  %z = bf16[8]{0} parameter(0)
  ROOT %inner = bf16[8]{0} fusion(%z), kind=kCustom, calls=%computing
}
"""

# Instructions by a short name, as XLA writes them.
WRITTEN = {
    "kernel": '%kernel = (f32[8]{0:T(8,128)}, s32[]) custom-call(%a), custom_call_target="tpu_custom_call"',
    "launch": '%launch = f32[8]{0} custom-call(%key), custom_call_target="mosaic_gpu_v2", backend_config={}',
    "hint": '%hint = s32[8]{0} custom-call(%key), custom_call_target="AssumeGatherIndicesInBound"',
    "copy": "%copy = bf16[8]{0} copy(%key)",
    "branch": "%branch = bf16[8]{0} conditional(%i, %a, %b), branch_computations={%computing, %hidden}",
    "no branch": "%none = bf16[8]{0} conditional(%i, %a, %b), branch_computations={%hidden, %hidden}",
    "either": "%either = f32[8] conditional(%p, %a), true_computation=%computing, false_computation=%hidden",
    "loop": "%loop = bf16[8]{0} while(%a), condition=%hidden, body=%step",
    "fusion": "%fused = bf16[8]{0} fusion(%a), kind=kCustom, calls=%computing",
    "other fusion": "%sum = bf16[8]{0} fusion(%a), kind=kLoop, calls=%hidden",
    "call": "%called = bf16[8]{0} call(%a), to_apply=%step",
    "wait": f"%wait = bf16[8]{{0}} collective-permute(%key), source_target_pairs={RING}",
    "gather": "%gather = bf16[32]{0} all-gather(%key), dimensions={0}",
}


def started(name: str, pairs: str = RING) -> str:
    types = "(bf16[8]{0:T(8)(2,1)}, bf16[8]{0}, u32[], /*index=3*/u32[])"
    return f"%{name} = {types} collective-permute-start(%key), channel_id=1, source_target_pairs={pairs}"


def done(name: str) -> str:
    return f"%{name}.done = bf16[8]{{0}} collective-permute-done(%{name})"


def module(*lines: str) -> str:
    body = "\n".join(f"  {WRITTEN.get(line, line)}" for line in lines)
    entry = f"ENTRY %main (key: bf16[8]) -> bf16[8] {{\n  %key = bf16[8]{{0}} parameter(0)\n{body}\n}}\n"
    return f"{HEADER}\n\n{BRANCHES}\n{entry}"


@pytest.mark.parametrize("name", ["kernel", "launch", "branch", "either", "loop", "fusion", "call"])
def test_what_runs_a_kernel_hides_an_exchange(name):
    overlap = overlap_of(module(started("a"), name, done("a")), 4)
    assert (overlap.exchanges, overlap.exposed, overlap.faults) == (1, (), ())


@pytest.mark.parametrize("name", ["hint", "copy", "no branch", "other fusion", "gather"])
def test_what_runs_no_kernel_hides_nothing(name):
    overlap = overlap_of(module(started("a"), name, done("a"), "kernel"), 4)
    assert overlap.faults == ("1 of 1 exchanges overlap no kernel: a",)


def test_a_permute_that_is_one_instruction_is_awaited_before_anything_else():
    overlap = overlap_of(module("wait", "kernel"), 4)
    assert overlap.faults == ("1 of 1 exchanges overlap no kernel: wait",)


def test_exchanges_that_race_ahead_of_the_kernels_are_told_by_name():
    lines = (started("a"), done("a"), started("b"), done("b"), started("c"), "kernel", "kernel", done("c"))
    overlap = overlap_of(module(*lines), 4)
    assert overlap.faults == ("2 of 3 exchanges overlap no kernel: a, b",)


def test_the_order_of_zigzag_is_no_exchange():
    lines = (started("order", ZIGZAG), done("order"), started("a", PART_OF_RING), "kernel", done("a"))
    overlap = overlap_of(module(*lines, started("home", HOME), "kernel", done("home")), 4)
    assert (overlap.exchanges, overlap.faults) == (2, ())
    assert overlap.collectives == {"collective-permute": 3}


@pytest.mark.parametrize("lines", [("kernel",), (started("order", ZIGZAG), "kernel", done("order"))])
def test_a_program_that_exchanges_nothing_fails(lines):
    (fault,) = overlap_of(module(*lines), 4).faults
    assert fault.startswith("exchanges no keys")


def test_collectives_are_counted_by_kind():
    scattered = "%scatter = bf16[2]{0} reduce-scatter(%key), dimensions={0}, to_apply=%hidden"
    lines = ("gather", started("a"), "kernel", done("a"), "wait", scattered)
    assert overlap_of(module(*lines), 4).collectives == {
        "collective-permute": 2,
        "all-gather": 1,
        "reduce-scatter": 1,
    }


def test_a_module_without_a_schedule_is_an_error():
    with pytest.raises(RuntimeError, match="has no schedule"):
        overlap_of(module("kernel").replace("is_scheduled=true, ", ""), 4)


def test_a_permute_that_is_not_awaited_is_an_error():
    with pytest.raises(RuntimeError, match="a is not awaited"):
        overlap_of(module(started("a"), "kernel"), 4)


@given(st.lists(st.sampled_from(["start", "done", "kernel", "copy"]), max_size=24))
def test_an_exchange_is_exposed_exactly_if_no_kernel_runs_meanwhile(schedule):
    lines: list[str] = []
    flying: dict[str, int] = {}  # kernels so far, when each permute in flight started
    kernels, count = 0, 0
    exposed: set[str] = set()
    for event in [*schedule, *["done"] * schedule.count("start")]:
        if event == "start":
            name = f"p.{count}"
            count += 1
            flying[name] = kernels
            lines.append(started(name))
        elif event == "done":
            if not flying:
                continue
            name = next(iter(flying))
            if flying.pop(name) == kernels:
                exposed.add(name)
            lines.append(done(name))
        else:
            kernels += event == "kernel"
            lines.append(event)
    overlap = overlap_of(module(*lines), 4)
    assert overlap.exchanges == count
    assert set(overlap.exposed) == exposed
    assert bool(overlap.faults) == bool(not count or exposed)
