"""The loop of `task=target`: rows -> compiled loss -> AdamW on fp32 masters, until a limit.

Bound by kernel launches for tiny models, so nothing in it waits for the device except at the log
lines and where it is asked to stop. Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from mtp_research.config import PretrainConfig
from mtp_research.data.tokenizer import BOS_ID
from mtp_research.errors import Interrupted
from mtp_research.models.fresh import TargetModel, next_token_logits, routers
from mtp_research.training.balance import ExpertBalancer
from mtp_research.training.checkpoint import clear_leftovers
from mtp_research.training.optim import MasterWeights, cosine_learning_rate
from mtp_research.training.pretrain_data import PretrainData, device_batches, token_array
from mtp_research.training.pretrain_log import LOG_FILE, Budget, Report, TrainingLog
from mtp_research.training.pretrain_state import Progress, restore_progress, save_progress
from mtp_research.training.signals import StopRequest


@dataclass(frozen=True)
class TrainingResult:
    """What the loop did; `loss` is the mean of the last interval, `seconds` include compiling."""

    num_steps: int
    num_tokens: int
    num_skipped_steps: int
    loss: float
    seconds: float
    tokens_per_s: float


def train_target(
    target: TargetModel,
    data: PretrainData,
    pretrain: PretrainConfig,
    *,
    seed: int,
    root: Path,
    settings: Mapping[str, object],
    stop: StopRequest,
    report: Report,
) -> TrainingResult:
    """Train in place until `max_steps` or `max_seconds`, from where a stopped run left `root`.

    Args:
        target: freshly initialised, on its device.
        data: rows.
        pretrain: schedule and limits.
        seed: of the data order.
        root: folder of the log and of the step folder of a stopped run.
        settings: of the run, which a stopped one must have had.
        stop: set by a signal.
        report: takes progress lines.

    Raises:
        ConfigError: `root` holds a run with other settings.
        IntegrityError: what it holds is damaged.
        Interrupted: a signal came; the state is saved.
        NumericFault: a whole log interval had non-finite gradients.
    """
    clear_leftovers(root)
    device = target.device
    target.train()
    balancer = ExpertBalancer(routers(target), rate=pretrain.router_bias_rate)
    optimizer = MasterWeights(
        target.parameters(),
        learning_rate=pretrain.learning_rate,
        weight_decay=pretrain.weight_decay,
        grad_clip=pretrain.grad_clip,
    )
    done = restore_progress(root, target=target, optimizer=optimizer, settings=settings)
    if done.step:
        report(f"goes on after step {done.step}, with {done.spent_s:.0f} s spent")
    loss_of = _loss_function(target, data, pretrain)
    batches = device_batches(data, pretrain, seed=seed, device=device, first_step=done.step)
    budget = Budget(pretrain, done=done)
    log = TrainingLog(pretrain, path=root / LOG_FILE, report=report, device=device, done=done)
    step = done.step
    while step == 0 or budget.fraction(step) < 1.0:
        rate = cosine_learning_rate(
            budget.fraction(step),
            step=step,
            peak=pretrain.learning_rate,
            warmup_steps=pretrain.warmup_steps,
            min_ratio=pretrain.min_learning_rate_ratio,
        )
        loss = loss_of(next(batches))
        loss.backward()
        grad_norm = optimizer.step(learning_rate=rate)
        imbalance = balancer.update(scale=rate / pretrain.learning_rate)
        step += 1
        log.add(loss.detach())
        if step == done.step + 1:
            loss.item()  # compiling ends here; the clock of the schedule starts
            budget.start()
            log.start(step)
        if step % pretrain.log_every == 0:
            log.write(
                step,
                learning_rate=rate,
                grad_norm=grad_norm,
                imbalance=imbalance,
                num_skipped=optimizer.num_skipped,
            )
        if stop.name is not None and budget.fraction(step) < 1.0:
            now = _progress(step, budget=budget, log=log, optimizer=optimizer)
            save_progress(root, now, target=target, optimizer=optimizer, settings=settings)
            log.close(step)
            raise Interrupted(
                f"stopped by {stop.name} after step {step} of the target; the same command with "
                f"output_dir={root} goes on."
            )
    log.close(step)
    balancer.close()
    return TrainingResult(
        num_steps=step,
        num_tokens=step * pretrain.batch_size * pretrain.seq_len,
        num_skipped_steps=int(optimizer.num_skipped.item()),
        loss=log.last_loss,
        seconds=budget.seconds,
        tokens_per_s=log.tokens_per_s,
    )


def _progress(step: int, *, budget: Budget, log: TrainingLog, optimizer: MasterWeights) -> Progress:
    """What is saved beside the tensors; waits for the device."""
    return Progress(
        step=step,
        spent_s=budget.seconds,
        scheduled_s=budget.scheduled_s,
        num_skipped=int(optimizer.num_skipped.item()),
        last_loss=None if math.isnan(log.last_loss) else log.last_loss,
        losses=[loss.item() for loss in log.losses],
    )


def _loss_function(
    target: TargetModel, data: PretrainData, pretrain: PretrainConfig
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Row starts [B] -> mean loss over B x S predictions, compiled to one graph on a GPU.

    `<|bos|>` is no label: what document comes next in a row is not to be learned.
    """
    device = target.device
    tokens = torch.from_numpy(token_array(data.streams, seq_len=pretrain.seq_len)).to(device)
    offsets = torch.arange(pretrain.seq_len + 1, device=device)

    def loss_of(starts: torch.Tensor) -> torch.Tensor:
        rows = tokens[starts[:, None] + offsets].long()  # [B, S + 1]
        logits = next_token_logits(target, rows[:, :-1])  # [B, S, V]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), ignore_index=BOS_ID
        )

    if pretrain.compile and device.type == "cuda":
        return torch.compile(loss_of, fullgraph=True, dynamic=False)
    return loss_of
