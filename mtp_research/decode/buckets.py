"""Batch sizes that decode steps are captured for, and which of them serves a batch."""

from bisect import bisect_left
from collections.abc import Sequence


def captured_sizes(max_num_requests: int, *, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Buckets, ascending: the sizes wanted, none of them above the largest batch there can be.

    For example 6 requests at most give 1, 2, 4, 6; with `[4, 8]` wanted they give 4 and 6, and with
    `[4]` alone 4, to which larger batches are split.

    Args:
        max_num_requests: largest batch.
        wanted: ascending; None for powers of two.
    """
    sizes = wanted or [1 << power for power in range(max_num_requests.bit_length() + 1)]
    return tuple(sorted({min(size, max_num_requests) for size in sizes}))


def bucket_of(num_requests: int, batch_sizes: Sequence[int]) -> int:
    """Smallest bucket that holds a batch."""
    return batch_sizes[bisect_left(batch_sizes, num_requests)]


def split_batch(num_requests: int, largest: int) -> list[slice]:
    """Parts of a batch that fit the largest bucket, all but the last one full."""
    return [
        slice(start, min(start + largest, num_requests))
        for start in range(0, num_requests, largest)
    ]
