"""A captured step alone on the device: how long a replay takes, and what runs in it.

For benchmarks: a replay goes on with the texts behind the host's back, so that the decoder is of no
use afterwards. `bench_split` cuts the traces into parts.
"""

import statistics
from typing import NamedTuple

import torch

from mtp_research.decode.graphs.capture import Captured


class DeviceRun(NamedTuple):
    """A kernel, copy or fill on the device's clock, in microseconds."""

    name: str
    begin_us: float
    end_us: float


def replay_ms(captured: Captured, *, num_replays: int = 20) -> float:
    """Median milliseconds of a replay, from event to event."""
    times = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def trace_replay(captured: Captured) -> list[DeviceRun]:
    """What a replay runs, by its begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        captured.graph.replay()
        torch.cuda.synchronize()
    runs = [
        DeviceRun(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(runs, key=lambda run: run.begin_us)
