"""The schedules that the table chooses for Hopper kernels, and those that a tuner may try."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.configs.rows import Row
from attest.kernels.configs.tunable import Neutral, Tunable, check_understood, distinct, key_span, useful
from attest.kernels.few_queries import has_few_queries
from attest.kernels.pallas.mosaic_gpu.blocks import (
    LEAST_STAGES,
    ROWS,
    BackwardBlocks,
    BackwardSizes,
    Blocks,
    Config,
    choose,
    choose_backward,
    columns,
    tile_dims,
)
from attest.kernels.pallas.mosaic_gpu.joint import choose_query_blocks
from attest.kernels.pallas.mosaic_gpu.key_heads import choose_copies
from attest.kernels.pallas.mosaic_gpu.launch.scratch import suits
from attest.kernels.pallas.mosaic_gpu.spec import work_of

_UNDERSTOOD = frozenset({"q_blocksize", "kv_blocksize", "num_warps", "num_stages"})
# The registers of a consumer and of the producer, by the number of consumers.
_REGISTERS = {1: (240, 24), 2: (240, 24), 3: (160, 32)}
_WARPS = 4  # of a warpgroup
# Keys and stages of the forward kernel; step and stages of a backward kernel.
_FORWARD = ((128, 2), (64, 3), (128, 3), (64, 4), (64, 2), (192, 2), (128, 4))
_BACKWARD = ((64, 2), (128, 2), (64, 3), (64, 1), (128, 1))


def chosen(call: Call, apart: bool = False) -> Config:
    """Return what the table has; apart: with no fused backward kernel."""
    dims, work = tile_dims(call), work_of(call)
    few = has_few_queries(call)
    queries = None if few else call.query.shape[1]
    fits = partial(suits, "forward", call, False)
    heads = call.query.shape[0] * call.query.shape[2]
    forward = choose(*dims, work_of(call, few), queries, fits, heads)

    def backward(kernel: str) -> BackwardBlocks:
        fits = partial(suits, kernel, call, apart)
        return choose_backward(kernel, *dims, work, fits, call.query.shape[1])

    key = backward("backward_key")
    query = None if key.fused else choose_query_blocks(call, key, choose_copies(call, key))
    return Config(
        forward, BackwardSizes(query, key, None if call.bias is None else backward("backward_bias"))
    )


def candidates(call: Call, most: int | None = None) -> tuple[Config, ...]:
    """Return blocks of 64 to 192 keys with two or three consumers that fit: for each kernel alone.

    Of backward kernels, those that sum dquery apart; the fused form has no other blocks that fit.
    """
    first, apart = chosen(call), chosen(call, apart=True)
    forward, _ = _given(first)
    _, backward = _given(apart)
    return distinct(
        first,
        most,
        (
            replace(first, forward=blocks)
            for blocks in _forward(call, forward)
            if suits("forward", call, False, blocks)
        ),
        (apart,),
        *(
            (
                replace(first, backward=replace(backward, **{name: blocks}))
                for blocks in _backward(sizes)
                if suits(name, call, True, blocks)
            )
            for name, sizes in (
                ("backward_query", backward.backward_query),
                ("backward_key", backward.backward_key),
            )
        ),
    )


def rows(call: Call, config: Config) -> tuple[Row, ...]:
    """Return a row for each kernel, for calls of the same padded head dims and work.

    The fused kernel is worth it from a number of queries on: its row is for calls of at least as many.
    """
    backward = vars(config.backward or BackwardSizes())
    dims = tile_dims(call)
    selecting = {"over": dims[0] - 1, "head_dim": dims[0], "value_over": dims[1] - 1, "value_dim": dims[1]}

    def row(kernel: str, blocks: Blocks | BackwardBlocks) -> Row:
        fused = isinstance(blocks, BackwardBlocks) and blocks.fused
        least = {"least_queries": call.query.shape[1]} if fused else {}
        work = work_of(call, kernel == "forward" and has_few_queries(call))
        return {"kernel": kernel, **selecting, **columns(blocks), **least, "only": sorted(work)}

    found = {"forward": config.forward, **backward}
    return tuple(row(kernel, blocks) for kernel, blocks in found.items() if blocks is not None)


def translated(call: Call, forward: Neutral, backward: Neutral) -> Config:
    """Return the schedule that neutral sizes say, the rest as the table has it, and fewer stages if need be.

    A consumer owns 64 queries, in backward_key and backward_bias 64 keys. Its warps are 4, as are those of
    the producer, and num_warps counts both. Stages that are given are not changed.
    """
    for argument, given in (("fwd_params", forward), ("bwd_params", backward)):
        check_understood("mosaic_gpu", argument, given, _UNDERSTOOD)
    # Neutral sizes are those of kernels that sum dquery apart.
    blocks, by_kernel = _given(chosen(call, apart=bool(backward)))
    changes: dict[str, Any] = _schedule("fwd_params", forward, "q_blocksize")
    if "kv_blocksize" in forward:
        changes["k"] = forward["kv_blocksize"]
    sizes: dict[str, BackwardBlocks | None] = {}
    for name, own, step in (
        ("backward_query", "q_blocksize", "kv_blocksize"),
        ("backward_key", "kv_blocksize", "q_blocksize"),
        ("backward_bias", "kv_blocksize", "q_blocksize"),
    ):
        blocks_of = getattr(by_kernel, name)
        more: dict[str, Any] = _schedule("bwd_params", backward, own)
        if step in backward:
            more["step"] = backward[step]
        if "stages" in more:
            more["value_stages"] = None
        if blocks_of is not None:
            sizes[name] = _changed(call, name, blocks_of.unsplit if more else blocks_of, more)
    return Config(_changed(call, "forward", blocks, changes), BackwardSizes(**sizes))


def capped(call: Call, q: int, k: int) -> Config:
    """Return the table's choice with forward blocks of at most q rows and k keys, and no smaller than 64."""
    first = chosen(call)
    blocks, _ = _given(first)
    consumers = min(blocks.consumers, max(1, q // ROWS))
    keys = min(blocks.k, max(ROWS, k // ROWS * ROWS))
    changed = replace(blocks, k=keys, consumers=consumers, registers=_REGISTERS[consumers])
    return (
        first if changed.k == blocks.k and consumers == blocks.consumers else replace(first, forward=changed)
    )


def _changed[T: (Blocks, BackwardBlocks)](call: Call, kernel: str, blocks: T, changes: dict[str, Any]) -> T:
    """Return the blocks with changes; where those name no stages, as many as fit."""
    blocks = replace(blocks, **changes)
    least = LEAST_STAGES if kernel == "forward" else 1
    while "stages" not in changes and blocks.stages > least and not suits(kernel, call, False, blocks):
        blocks = replace(blocks, stages=blocks.stages - 1)
    return blocks


def _schedule(argument: str, given: Neutral, own: str) -> dict[str, Any]:
    """Return the consumers, registers and stages of neutral sizes; own: the size that consumers share."""
    changes: dict[str, Any] = {}
    if own in given:
        consumers, rest = divmod(given[own], ROWS)
        if rest or consumers not in _REGISTERS:
            expected = f"a multiple of {ROWS} up to {ROWS * max(_REGISTERS)} with 'mosaic_gpu'"
            refuse(f"{argument}.{own}", given[own], expected, "A consumer has 64 rows, and there are 1 to 3.")
        changes |= {"consumers": consumers, "registers": _REGISTERS[consumers]}
        warps = given.get("num_warps", _WARPS * (consumers + 1))
        if warps != _WARPS * (consumers + 1):
            expected = f"{_WARPS * (consumers + 1)}, 4 for each 64 of {own} and 4 that copy"
            refuse(f"{argument}.num_warps", warps, expected, "Leave it None.")
    elif "num_warps" in given:
        refuse(f"{argument}.num_warps", given["num_warps"], f"{own} beside it", "Leave it None.")
    if "num_stages" in given:
        changes["stages"] = given["num_stages"]
    return changes


def _forward(call: Call, like: Blocks) -> Iterator[Blocks]:
    for consumers in (like.consumers, *(() if has_few_queries(call) else {2, 3} - {like.consumers})):
        for k, stages in _FORWARD:
            if useful(k, key_span(call), ROWS):
                yield replace(like, k=k, stages=stages, consumers=consumers, registers=_REGISTERS[consumers])


def _backward(like: BackwardBlocks | None) -> Iterator[BackwardBlocks]:
    if like is None:
        return
    for consumers in (like.consumers, *({2, 3} - {like.consumers})):
        for step, stages in _BACKWARD:
            yield replace(
                like.unsplit,
                step=step,
                stages=stages,
                value_stages=None,
                consumers=consumers,
                registers=_REGISTERS[consumers],
            )


def _given(config: Config) -> tuple[Blocks, BackwardSizes]:
    assert config.forward is not None
    assert config.backward is not None
    return config.forward, config.backward


TUNABLE = Tunable(chosen, candidates, translated, _UNDERSTOOD, capped, rows)
