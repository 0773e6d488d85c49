"""Figures come one step late and in order; skipped steps are counted."""

import math

import pytest
import torch

from mtp_research.runtime.errors import NumericFault
from mtp_research.training.tracking import FigureQueue, SkippedSteps, StepStats


def push(
    queue: FigureQueue,
    step: int,
    *,
    grad_norm: float = 1.0,
    num_stops: int = 0,
    num_labels: int = 4,
) -> None:
    stats = StepStats(
        loss=torch.tensor(0.5 * step),
        num_correct=torch.tensor([2, 0]),
        sum_acceptance=torch.tensor([1.0, 3.0]),
        num_labels=torch.tensor([num_labels, 0]),
        num_tokens=torch.tensor(9),
        num_stops=torch.tensor(num_stops),
    )
    queue.push(stats, step=step, learning_rate=0.1, grad_norm=torch.tensor(grad_norm))


def test_queue_keeps_the_newest_step_until_it_is_drained() -> None:
    queue = FigureQueue()
    seen = []
    for step in (1, 2, 3):
        push(queue, step)
        seen.append([figures.step for figures in queue.ready()])
    assert seen == [[], [1], [2]]
    assert [figures.step for figures in queue.drain()] == [3]
    assert list(queue.drain()) == []


def test_figures_are_means_over_the_labels() -> None:
    queue = FigureQueue()
    push(queue, 3, num_stops=1)
    (figures,) = queue.drain()
    assert figures.loss == 1.5
    assert figures.accuracy == [0.5, 0.0]
    assert figures.acceptance == [0.25, 3.0]
    assert (figures.num_tokens, figures.is_stop_requested) == (9, True)


def test_tenth_skipped_step_in_a_row_raises() -> None:
    queue, skips = FigureQueue(), SkippedSteps()
    for step in range(1, 21):
        push(queue, step, grad_norm=math.nan if step > 10 or step == 3 else 1.0)
    with pytest.raises(NumericFault, match=r"10 steps in a row .* at step 20"):
        any(skips.add(figures) and False for figures in queue.drain())
    assert skips == SkippedSteps(total=11, in_a_row=10)


def test_step_without_labels_has_no_loss() -> None:
    queue = FigureQueue()
    push(queue, 1, num_labels=0)
    push(queue, 2, num_labels=1)
    without, with_one = queue.drain()
    assert math.isnan(without.loss)
    assert with_one.loss == 1.0


@pytest.mark.gpu
def test_queue_on_a_gpu_does_not_wait_for_the_step() -> None:
    queue = FigureQueue()
    device = torch.device("cuda")
    values = [torch.tensor([2, 0], device=device), torch.tensor([1.0, 3.0], device=device)]
    labels = torch.tensor([4, 1], device=device)
    one = torch.tensor(1.0, device=device)
    mode = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        queue.push(
            StepStats(one, *values, labels, one, one), step=1, learning_rate=0.1, grad_norm=one
        )
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    (figures,) = queue.drain()
    assert figures.accuracy == [0.5, 0.0]
    assert figures.acceptance == [0.25, 3.0]
