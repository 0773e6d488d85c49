"""Where a step's time goes: seconds of target, verification and drafting, read between the parts.

A `StepClock` is the probe of `decode.step.DeviceStep`. On a CPU it reads the host's clock; on a GPU
it records events on the stream and reads them after the run, so that no step waits for it. Captured
steps have no probe: their parts are one graph.
"""

import time
from collections.abc import Callable

import torch

from mtp_research.evaluation.step_cost import StepParts

_PARTS = ("target", "verify", "draft")


class StepClock:
    """Adds up the parts of steps; a step counts once `end_step` keeps it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._marks: dict[str, float | torch.cuda.Event] = {}
        self._kept: list[dict[str, float | torch.cuda.Event]] = []
        self._wall_s = 0.0

    def __call__(self, part: str) -> None:
        """Note that the step starts, or that a part of it ends."""
        self._marks[part] = self._now()

    def end_step(self, *, wall_s: float, keep: bool) -> None:
        """Count the step that was started since the last call, if any was, or forget it.

        Args:
            wall_s: seconds of the call of the loop that started it. With deferred output they end
                with the step before, which `keep` must cover too.
            keep: whether neither had prompt rows.
        """
        if keep and self._marks:
            self._kept.append(self._marks)
            self._wall_s += wall_s
        self._marks = {}

    def parts(self) -> StepParts | None:
        """The sums so far; None if no step was kept. Waits for the device."""
        if not self._kept:
            return None
        if self._is_gpu:
            torch.cuda.synchronize()
        names = ("start", *_PARTS)
        seconds = [
            sum(_seconds(marks[before], marks[after]) for marks in self._kept)
            for before, after in zip(names, _PARTS, strict=False)
        ]
        target_s, verify_s, draft_s = seconds
        host_s = max(self._wall_s - sum(seconds), 0.0)
        return StepParts(len(self._kept), target_s, verify_s, draft_s, host_s)

    def _now(self) -> float | torch.cuda.Event:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1e3
    assert isinstance(begin, float), "a step has marks of one clock"
    assert isinstance(end, float), "a step has marks of one clock"
    return end - begin


def device_timer(device: torch.device) -> Callable[[], float | None]:
    """Start an event clock on a GPU; the function that is returned stops it.

    Returns:
        a function that waits for the device and gives seconds since now; None on a CPU.
    """
    if device.type != "cuda":
        return lambda: None
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()

    def stop() -> float:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return stop
