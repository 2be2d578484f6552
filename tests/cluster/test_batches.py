"""Batches hold what their worker can do in a few seconds, and nothing of them is lost with the worker."""

from hypothesis import given
from hypothesis import strategies as st

from attest.conformance.cluster.batches import Batches
from attest.conformance.process.pool import Job


def work(_subject, argument):
    return argument


def jobs(count: int, also: int = 0, subject: str = "toys.right") -> list[Job]:
    return [
        Job(subject, work, [number], tuple([number, extra] for extra in range(also)))
        for number in range(count)
    ]


def filled(*these: Job) -> Batches:
    batches = Batches()
    batches.waiting.extend(these)
    return batches


def wanted(_job: Job) -> bool:
    return True


def test_the_first_batches_hold_one_job_each():
    batches = filled(*jobs(100))
    assert [len(batches.next(wanted, 2, True).jobs) for _ in range(3)] == [1, 1, 1]
    assert len(batches) == 97


def test_a_batch_grows_with_the_speed_and_shrinks_towards_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("attest.conformance.cluster.batches.time.monotonic", lambda: now[0])
    batches = filled(*jobs(400))
    first = batches.next(wanted, 2, True)
    batches.finished(type(first)(first.jobs, began=-0.5))
    assert len(batches.next(wanted, 2, True).jobs) == 8
    sizes = []
    while len(batches):
        sizes.append(len(batches.next(wanted, 2, True).jobs))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert sum(sizes) == 391


def test_a_batch_is_of_one_subject():
    batches = filled(*jobs(3), *jobs(3, subject="toys.wrong"))
    batches.finished(type(batches.next(wanted, 1, True))(tuple(jobs(1000)), began=float("inf")))
    seen = []
    while len(batches):
        seen.append({job.subject for job in batches.next(wanted, 1, True).jobs})
    assert all(len(subjects) == 1 for subjects in seen)


def test_what_is_not_wanted_any_more_is_left_out():
    batches = filled(*jobs(5))
    asked = []
    assert batches.next(asked.append, 1, True) is None
    assert len(asked) == 5
    assert not len(batches)


def test_a_lost_batch_is_sent_again_one_call_after_the_other():
    batches = filled(*jobs(2, also=2))
    sent = batches.next(wanted, 1, True)
    assert batches.lost(sent, "worker a") == []
    assert batches.next(wanted, 1, idle=False).jobs == tuple(jobs(2, also=2)[1:])
    again = [batches.next(wanted, 1, idle=True) for _ in range(3)]
    assert [batch.alone for batch in again] == [True] * 3
    assert [call.argument for batch in again for call in batch.calls] == [[0], [0, 0], [0, 1]]


def test_a_call_that_is_lost_alone_twice_is_given_up():
    batches = filled(*jobs(1))
    sent = batches.next(wanted, 1, True)
    assert batches.lost(sent, "worker a") == []
    assert batches.lost(batches.next(wanted, 1, True), "worker b") == []
    (outcome,) = batches.lost(batches.next(wanted, 1, True), "worker c")
    assert outcome.lost
    assert outcome.job == jobs(1)[0]
    assert outcome.fault == "lost 2 times with a worker that did nothing else, at last since worker c"
    assert not len(batches)


def test_the_losses_of_a_call_are_its_own():
    """Also where another call has the very same argument."""
    shared = [0]
    batches = filled(Job("toys.right", work, shared, (shared,)))
    batches.lost(batches.next(wanted, 1, True), "worker")
    first = batches.next(wanted, 1, True)
    assert batches.lost(first, "worker") == []
    assert batches.lost(batches.next(wanted, 1, True), "worker") == []
    assert [outcome.job for outcome in batches.lost(batches.next(wanted, 1, True), "worker")] == [
        *first.calls
    ]


def test_a_call_beside_one_that_ends_its_worker_is_judged_in_the_end():
    """Innocent calls share a batch with it once, and then have a worker for themselves."""
    batches = filled(Job("toys.right", work, [0], ([1], [2])))
    done, lost = [], batches.lost(batches.next(wanted, 1, True), "worker")
    while len(batches):
        batch = batches.next(wanted, 1, True)
        if batch.calls[0].argument == [1]:
            lost += batches.lost(batch, "worker")
        else:
            done += batch.calls
    assert [call.argument for call in done] == [[0], [2]]
    assert [outcome.job.argument for outcome in lost] == [[1]]


@given(st.data())
def test_every_call_has_one_end_whatever_is_lost(data):
    given_jobs = jobs(data.draw(st.integers(0, 6)), also=data.draw(st.integers(0, 2)))
    batches, ends = filled(*given_jobs), []
    for _ in range(1000):
        batch = batches.next(wanted, data.draw(st.integers(1, 3)), True)
        if batch is None:
            break
        if data.draw(st.booleans()):
            ends += [outcome.job.argument for outcome in batches.lost(batch, "worker")]
        else:
            batches.finished(batch)
            ends += [call.argument for call in batch.calls]
    assert sorted(ends) == sorted(call.argument for job in given_jobs for call in job.calls)
