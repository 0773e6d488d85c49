"""`task=target`: train a small target from scratch on the corpus, evaluate it, save a model folder.

Flow: documents -> token streams on the device -> the loop of `pretrain_loop.py` -> dev losses,
samples, Hugging Face folder and PROVENANCE.json. SIGTERM during the loop saves a step folder, from
which the same command goes on; it is removed when the target is written.

The loop of `task=target`: rows -> compiled loss -> AdamW on fp32 masters, until a limit.

Bound by kernel launches for tiny models, so nothing in it waits for the device except at the log
lines and where it is asked to stop. Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from mtp_research.config.schema import ModelConfig
from mtp_research.config.training_schema import PretrainConfig
from mtp_research.data.tokenizer import BOS_ID, PAD_ID, STOP_IDS
from mtp_research.models.fresh import (
    TargetModel,
    finish_training,
    new_target,
    next_token_logits,
    routers,
    save_target,
)
from mtp_research.models.loading.placement import resolve_device, resolve_dtype
from mtp_research.pretrain.pretrain_data import (
    PretrainData,
    data_record,
    describe_data,
    device_batches,
    prepare_data,
    token_array,
)
from mtp_research.pretrain.pretrain_report import ExpertBalancer, evaluate_target
from mtp_research.pretrain.pretrain_state import (
    LOG_FILE,
    Budget,
    Progress,
    Report,
    TrainingLog,
    remove_progress,
    restore_progress,
    run_settings,
    save_progress,
)
from mtp_research.runtime.errors import ConfigError, Interrupted
from mtp_research.runtime.provenance import run_record
from mtp_research.training.checkpoint import clear_leftovers
from mtp_research.training.optim import MasterWeights, cosine_learning_rate
from mtp_research.training.tracking import StopRequest


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


TARGET_FOLDER = "target"


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pretrain_target(
    model: ModelConfig, *, output_dir: Path, seed: int, report: Report = _write_line
) -> dict[str, object]:
    """Train `model.architecture` on `model.pretrain` and save the result as a target folder.

    Args:
        model: `family`, `architecture` and `pretrain` are read, and `device` and `dtype`.
        output_dir: run folder; `target` in it becomes the Hugging Face folder, and a tokenizer that
            is already there is reused.
        seed: of initialisation and data order.
        report: takes progress lines; standard output by default.

    Returns:
        The content of PROVENANCE.json: command, versions, data hashes, losses, figures, samples.

    Raises:
        ConfigError: architecture, corpus or domain weights are wrong, or `output_dir` holds an
            interrupted run with other settings; names the key.
        EnvironmentFault: `device=cuda` without a GPU.
        Interrupted: SIGTERM or SIGINT; the state is saved, and the same call goes on.
        IntegrityError: what an interrupted run saved is damaged.
        NumericFault: a whole log interval had non-finite gradients.
    """
    started = time.monotonic()
    record = run_record()
    device = resolve_device(model.device)
    target_dir = output_dir / TARGET_FOLDER
    target_dir.mkdir(parents=True, exist_ok=True)
    architecture, dtype = _architecture(model), _dtype(model, device)
    data = prepare_data(model.pretrain, tokenizer_dir=target_dir)
    report("\n".join(describe_data(data)))
    target = new_target(model.family, architecture, dtype=dtype, device=device, seed=seed)
    report(f"{model.name}: {target.num_parameters():,} parameters, {dtype} on {device}")
    prepared = time.monotonic()
    with StopRequest() as stop:  # after the last step a signal only waits for the end
        result = train_target(
            target,
            data,
            model.pretrain,
            seed=seed,
            root=output_dir,
            settings=run_settings(model, data, seed=seed, dtype=dtype, device=device),
            stop=stop,
            report=report,
        )
        finish_training(target, stop_ids=STOP_IDS, bos_id=BOS_ID, pad_id=PAD_ID)
        num_bytes = save_target(target, target_dir)
        losses, samples = evaluate_target(
            target,
            data.dev_documents,
            tokenizer=data.tokenizer,
            seq_len=model.pretrain.seq_len,
            report=report,
        )
    provenance = record | {
        "model": dataclasses.asdict(model),
        "path": str(target_dir),
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_parameters": target.num_parameters(),
        "weights_bytes": num_bytes,
        "training": dataclasses.asdict(result),
        "setup_seconds": prepared - started,
        "total_seconds": time.monotonic() - started,
        "dev": losses,
        "samples": samples,
        **data_record(data),
    }
    text = json.dumps(provenance, indent=2)
    (target_dir / "PROVENANCE.json").write_text(f"{text}\n", encoding="utf8")
    remove_progress(output_dir)
    return provenance


def _dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    dtype = resolve_dtype(model.dtype, device)
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"task=target trains in bfloat16 or float32, got model.dtype={model.dtype}; "
            "set model.dtype=auto"
        )
    return dtype


def _architecture(model: ModelConfig) -> dict[str, object]:
    """Architecture with the tokenizer's vocabulary, checked against the row length."""
    vocab_size = model.pretrain.vocab_size
    architecture: dict[str, object] = {"vocab_size": vocab_size, **model.architecture}
    if architecture["vocab_size"] != vocab_size:
        raise ConfigError(
            f"model.architecture.vocab_size={architecture['vocab_size']} must equal "
            f"model.pretrain.vocab_size={vocab_size}; set only the latter"
        )
    limit = architecture.get("max_position_embeddings")
    if isinstance(limit, int) and limit < model.pretrain.seq_len:
        raise ConfigError(
            f"model.pretrain.seq_len={model.pretrain.seq_len} exceeds "
            f"model.architecture.max_position_embeddings={limit}; lower seq_len"
        )
    return architecture
