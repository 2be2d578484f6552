"""How many blocks of a subject a case crosses."""

from attest.conformance.cases.case import Case
from attest.conformance.subject import Subject


def blocks_crossed(subject: Subject, case: Case) -> tuple[int, int]:
    """Of queries and of keys."""
    tiling = subject.tilings[case.tiling]
    assert tiling.query_block is not None
    assert tiling.key_block is not None
    return -(-case.q_len // tiling.query_block), -(-case.kv_len // tiling.key_block)
