"""What a worker was given is sent again once the worker has gone, whatever else is known of it."""

from types import SimpleNamespace

import pytest

from attest.conformance.cluster.batches import Batch, Batches
from attest.conformance.cluster.cluster import Cluster
from attest.conformance.cluster.members import Member, Members, Wanted
from tests.cluster.test_batches import jobs


@pytest.mark.parametrize("refused", [False, True])
def test_a_worker_that_has_gone_keeps_nothing(refused):
    """One of its threads may have failed before, so that it gets no more cases."""
    cancelled: list[object] = []
    cluster = Cluster.__new__(Cluster)
    cluster._client = SimpleNamespace(cancel=cancelled.extend)
    cluster._members = Members(Wanted(), lambda *_: None, lambda _: None)
    gone, stays = (Member(f"tcp://{name}", 2, gpu=False, takes=frozenset({False})) for name in "ab")
    cluster._members.admitted.update({gone.address: gone, stays.address: stays})
    if refused:
        cluster._members.refuse(gone.address, "No space left on device")
    first, second = jobs(2)
    flight = {"one": (gone, Batch((first,)), "future 1"), "two": (stays, Batch((second,)), "future 2")}
    batches = {False: Batches(), True: Batches()}
    assert list(cluster._lost(flight, batches, {stays.address})) == []
    assert list(flight) == ["two"]
    assert cancelled == ["future 1"]
    assert batches[False].next(lambda _job: True, 1, idle=True).jobs == (first,)
