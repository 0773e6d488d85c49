"""Figures of steps on their way from the device to the host, read one step late.

A step never waits for its own numbers: they are copied while the next one runs, so the device
always has work. Letters: k depths.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.runtime.errors import NumericFault

LAG = 1  # steps in flight
MAX_SKIPPED_IN_A_ROW = 10


class StepStats(NamedTuple):
    """What a step leaves on the device; sums over all ranks."""

    loss: Tensor  # 0-dim, token-weighted, depth-weighted mean of the step
    num_correct: Tensor  # `[k]` labels whose argmax is right
    sum_acceptance: Tensor  # `[k]` chance that a sampled draft is accepted, summed over the labels
    num_labels: Tensor  # `[k]`
    num_tokens: Tensor  # 0-dim, tokens read, padding not counted
    num_stops: Tensor  # 0-dim, ranks that got a signal


class StepFigures(NamedTuple):
    """A finished step, on the host."""

    step: int  # optimizer steps done, this one included
    learning_rate: float  # of the step
    loss: float  # see `StepStats`
    grad_norm: float  # before clipping; the step was skipped if it is not finite
    accuracy: list[float]  # `[k]` share of labels whose argmax is right
    # `[k]` mean chance that a sampled draft is accepted; 0 for a loss that does not look at the
    # target
    acceptance: list[float]
    num_tokens: int  # see `StepStats`
    is_stop_requested: bool  # some rank got a signal

    @property
    def diagnosis(self) -> str:
        """Loss and gradient norm in words."""
        return f"loss {self.loss}, gradient norm {self.grad_norm}"


@dataclass
class SkippedSteps:
    """Steps that changed nothing because their gradient norm was not finite."""

    total: int = 0
    in_a_row: int = 0

    def add(self, figures: StepFigures) -> bool:
        """Count a step; whether it was skipped. The tenth in a row is a fault."""
        is_skipped = not math.isfinite(figures.grad_norm)
        self.total += is_skipped
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if self.in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise NumericFault(
                f"{self.in_a_row} steps in a row were not finite, the last at step {figures.step} "
                f"({figures.diagnosis}); lower trainer.learning_rate or look at the data."
            )
        return is_skipped


class _Pending(NamedTuple):
    step: int
    learning_rate: float
    values: Tensor
    is_copied: torch.cuda.Event | None


class FigureQueue:
    """First in, first out; at most `LAG` steps stay behind after `ready`."""

    def __init__(self) -> None:
        self._pending: deque[_Pending] = deque()

    def push(self, stats: StepStats, *, step: int, learning_rate: float, grad_norm: Tensor) -> None:
        """Start the copy of a step's figures; does not wait for it."""
        scalars = torch.stack(
            [value.double() for value in (stats.loss, grad_norm, stats.num_tokens, stats.num_stops)]
        )
        counts = (stats.num_labels, stats.num_correct, stats.sum_acceptance)
        values = torch.cat([scalars, *(count.double() for count in counts)])
        is_copied = None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = pinned.copy_(values, non_blocking=True)
            is_copied = torch.cuda.Event()
            is_copied.record()
        self._pending.append(_Pending(step, learning_rate, values, is_copied))

    def ready(self) -> Iterator[StepFigures]:
        """Steps that are old enough to be read, oldest first."""
        while len(self._pending) > LAG:
            yield _read(self._pending.popleft())

    def drain(self) -> Iterator[StepFigures]:
        """All steps, oldest first; waits for the device."""
        while self._pending:
            yield _read(self._pending.popleft())


def _read(pending: _Pending) -> StepFigures:
    if pending.is_copied is not None:
        pending.is_copied.synchronize()
    loss, grad_norm, num_tokens, num_stops, *counts = pending.values.tolist()
    num_depths = len(counts) // 3
    labels = [max(count, 1) for count in counts[:num_depths]]
    means = [total / labels[index % num_depths] for index, total in enumerate(counts)]
    return StepFigures(
        step=pending.step,
        learning_rate=pending.learning_rate,
        loss=loss,
        grad_norm=grad_norm,
        accuracy=means[num_depths : 2 * num_depths],
        acceptance=means[2 * num_depths :],
        num_tokens=int(num_tokens),
        is_stop_requested=num_stops > 0,
    )
