"""Over how many devices the batch and the heads of a call are spread."""

import math


def shards(batch: int, heads: int, devices: int) -> tuple[int, int]:
    """Return over how many devices so many batch entries and query heads are spread, each.

    Their product is as large as the devices allow; of equal ones, both are spread if they can be.
    """
    pairs = [
        (over_batch, over_heads)
        for over_batch in range(1, devices + 1)
        for over_heads in range(1, devices // over_batch + 1)
        if batch % over_batch == 0 and heads % over_heads == 0
    ]
    return max(pairs, key=lambda pair: (math.prod(pair), min(pair)))
