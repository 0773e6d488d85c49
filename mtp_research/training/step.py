"""Gradients of one optimizer step: micro-batches, label counts and sums over ranks.

Letters: k depths, B batch rows, S row length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor

from mtp_research.config import TrainConfig
from mtp_research.training.figures import StepStats
from mtp_research.training.losses import depth_labels, label_counts
from mtp_research.training.rows import Batch, row_indices
from mtp_research.training.setup import RunParts
from mtp_research.training.signals import StopRequest
from mtp_research.training.state import step_seed


def accumulate_gradients(
    parts: RunParts, *, config: TrainConfig, ranks: Accelerator, step: int, stop: StopRequest
) -> StepStats:
    """Forward and backward of all micro-batches of a step.

    Labels are counted over the whole step first, so that each token weighs the same however the
    step is cut into micro-batches and ranks.

    Args:
        parts: of the run; gradients are left in the parameters of `parts.heads`.
        config: of the run.
        ranks: processes and device.
        step: optimizer steps done before.
        stop: whether this rank got a signal, read after the last backward.
    """
    num_micro = config.trainer.gradient_accumulation_steps
    chosen = [
        _rows_of(micro, parts=parts, config=config, ranks=ranks, step=step)
        for micro in range(num_micro)
    ]
    batches = [parts.rows.batch(indices) for indices in chosen]
    labels = [_labels(batch, num_depths=parts.unroll_spec.num_depths) for batch in batches]
    counts = _sum_over(ranks, torch.stack([label_counts(micro) for micro in labels]).sum(dim=0))

    loss, num_correct = torch.zeros((), device=counts.device), torch.zeros_like(counts[:-1])
    sum_acceptance = torch.zeros_like(num_correct, dtype=torch.float32)
    for micro, (indices, batch) in enumerate(zip(chosen, batches, strict=True)):
        hidden = parts.rows.hidden(indices)
        rank = ranks.process_index
        torch.manual_seed(step_seed(config.seed, step=step, micro_batch=micro, rank=rank))
        with parts.engine.micro_batch(is_last=micro == num_micro - 1):
            part = parts.engine.objective(batch, hidden, labels[micro], counts)
            parts.engine.backward(part.loss * _poison(part.loss))
        loss += part.loss.detach()
        num_correct += part.num_correct
        sum_acceptance += part.sum_acceptance
    num_tokens = torch.stack([(batch.document_index >= 0).sum() for batch in batches]).sum()
    num_stops = num_tokens.new_full((), int(stop.name is not None))
    totals = _sum_over(ranks, torch.cat([num_correct, torch.stack([num_tokens, num_stops])]))
    return StepStats(
        loss=_sum_over(ranks, loss),
        num_correct=totals[:-2],
        sum_acceptance=_sum_over(ranks, sum_acceptance),
        num_labels=counts[:-1],
        num_tokens=totals[-2],
        num_stops=totals[-1],
    )


def _poison(loss: Tensor) -> Tensor:
    """1, or NaN for a loss that is not finite, which may have finite gradients.

    So a bad loss on one rank shows in the gradient norm of all, which alone decides on the update.
    """
    return torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)


@contextmanager
def repeatable_sums(device: torch.device) -> Iterator[None]:
    """Make a step give the same bits each time it runs, which bit-exact resume needs.

    On a CPU with several threads the backward of a row gather adds duplicates in any order; the
    ordered form is as fast. GPU kernels are left as they are, and are not bit-exact.
    """
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        if device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def _labels(batch: Batch, *, num_depths: int) -> list[Tensor]:
    return depth_labels(
        batch.input_ids,
        document_index=batch.document_index,
        loss_mask=batch.loss_mask,
        num_depths=num_depths,
    )


def _sum_over(ranks: Accelerator, tensor: Tensor) -> Tensor:
    return cast(Tensor, ranks.reduce(tensor, reduction="sum"))


def _rows_of(
    micro_batch: int, *, parts: RunParts, config: TrainConfig, ranks: Accelerator, step: int
) -> list[int]:
    """Rows of this rank's micro-batch: a function of seed and step only."""
    index = step * config.trainer.gradient_accumulation_steps + micro_batch
    slot = index * ranks.num_processes + ranks.process_index
    batch_size = config.trainer.batch_size
    return row_indices(
        slot * batch_size, count=batch_size, num_rows=len(parts.rows), seed=config.seed
    )
