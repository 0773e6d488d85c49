"""Median time and peak memory of calls too long for a captured graph.

Where it sits: used by `bench_distill`. Device events on CUDA, the host's clock elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

_NUM_WARM_UP = 2

Result = TypeVar("Result")


class Wall(NamedTuple):
    """Time of a call, and the memory it needed above what was allocated before; None on a CPU."""

    median_ms: float
    spread_ms: float  # slowest minus fastest
    peak_bytes: int | None


def measure_wall(
    call: Callable[[], Result], *, device: torch.device, num_repeats: int
) -> tuple[Result, Wall]:
    """The call's last result and its figures, after two calls that are not counted."""
    on_gpu = device.type == "cuda"
    for _ in range(_NUM_WARM_UP):
        call()
    times_ms, peak_bytes = [], None
    for _ in range(num_repeats):
        result = None  # its memory is not the next call's
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        elapsed_ms, result = _timed(call, on_gpu=on_gpu)
        times_ms.append(elapsed_ms)
        if on_gpu:
            peak_bytes = torch.cuda.max_memory_allocated() - before
    assert result is not None, "num_repeats must be at least 1"
    return result, Wall(statistics.median(times_ms), max(times_ms) - min(times_ms), peak_bytes)


def _timed(call: Callable[[], Result], *, on_gpu: bool) -> tuple[float, Result]:
    if not on_gpu:
        started_s = time.perf_counter()
        result = call()
        return (time.perf_counter() - started_s) * 1e3, result
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result
