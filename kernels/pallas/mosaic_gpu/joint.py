"""The choice between one launch and two for the gradients of query, key and value.

A launch of one kernel's tiles leaves multiprocessors idle, if tiles are few or in their last round. In one
launch, tiles of the other kernel fill them. But programs of both then have the same warpgroups and registers,
and XLA cannot drop the gradients that are not used.
"""

from functools import partial

from attest.kernels.call.call import Call
from attest.kernels.call.options import refuse
from attest.kernels.pallas.mosaic_gpu.blocks import BackwardBlocks, choose_backward, rounds, tile_dims
from attest.kernels.pallas.mosaic_gpu.launch.scratch import suits
from attest.kernels.pallas.mosaic_gpu.spec import work_of

# The time of a tile in one launch, relative to its time in two.
_SLOWDOWN = 1.04
# The time of the longest tile, which comes first, relative to the average where bounds make tiles differ.
_LONGEST = 2


def choose_query_blocks(call: Call, of_keys: BackwardBlocks, copies: int = 1) -> BackwardBlocks:
    """Return the table's choice for backward_query: beside that for backward_key, if one launch is to be."""
    batch, queries, heads, _ = call.query.shape
    fits = partial(suits, "backward_query", call, True)
    choose = partial(
        choose_backward,
        "backward_query",
        *tile_dims(call),
        work_of(call),
        queries=queries,
        heads=batch * heads,
    )
    alone = choose(fits=fits)
    beside = choose(fits=fits, prefers=partial(_same_warpgroups, of_keys))
    wanted = of_keys.joint or (of_keys.joint is None and _saves_rounds(call, of_keys, beside, copies))
    return beside if wanted and _same_warpgroups(of_keys, beside) else alone


def is_joint(call: Call, of_keys: BackwardBlocks, of_queries: BackwardBlocks, copies: int = 1) -> bool:
    """Return whether one launch computes the tiles of both kernels. copies: of each key head.

    Raises: ValueError naming the field, where it is asked for and cannot be.
    """
    alike = _same_warpgroups(of_keys, of_queries)
    if of_keys.joint is None:
        return alike and _saves_rounds(call, of_keys, of_queries, copies)
    if of_keys.joint and not alike:
        expected = "False, or as many consumers and registers as backward_query has"
        got = f"True with {of_keys.consumers} consumers beside {of_queries.consumers}"
        refuse("bwd_params.backward_key.joint", got, expected, "None lets the kernel choose.")
    return of_keys.joint


def _same_warpgroups(of_keys: BackwardBlocks, of_queries: BackwardBlocks) -> bool:
    """Return whether programs of both kernels have the same warpgroups, of which one launch can be."""
    alone = of_keys.separate or of_keys.split or of_keys.fused
    same = (of_keys.consumers, of_keys.registers) == (of_queries.consumers, of_queries.registers)
    return same and not alone


def _saves_rounds(call: Call, of_keys: BackwardBlocks, of_queries: BackwardBlocks, copies: int) -> bool:
    """Return whether one launch of the tiles of both kernels ends before two."""
    (batch, queries, heads, _), (_, keys, key_heads, _) = call.query.shape, call.key.shape
    own = batch * copies * key_heads * -(-keys // of_keys.own), batch * heads * -(-queries // of_queries.own)
    work = work_of(call)

    def lasts(tiles: int) -> float:
        return max(rounds(tiles, work), _LONGEST if "bounds" in work else 1)

    return _SLOWDOWN * lasts(sum(own)) < sum(map(lasts, own))
