"""`task=target`: train a small target from scratch on the corpus, evaluate it, save a model folder.

    documents -> token streams on the device -> rows -> compiled loss -> AdamW on fp32 masters
    at the end: dev losses, samples, Hugging Face folder and PROVENANCE.json

SIGTERM during the loop saves a step folder, from which the same command continues; it is removed
when the target is written. The loop is bound by kernel launches for tiny models, so nothing in it
waits for the device except at the log lines and where it is asked to stop.

Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from mtp_research.config.schema import ModelConfig
from mtp_research.config.training_schema import PretrainConfig
from mtp_research.data.tokenizer import BOS_ID, PAD_ID, STOP_IDS
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.fresh import (
    TargetModel,
    finish_training,
    new_target,
    next_token_logits,
    routers,
    save_target,
)
from mtp_research.models.loading.placement import resolve_device, resolve_dtype
from mtp_research.pretrain.joint import add_modules, count_modules, joint_loss, new_modules
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
from mtp_research.training.checkpoint import clear_leftovers, step_folders
from mtp_research.training.optim import MasterWeights, cosine_learning_rate
from mtp_research.training.tracking import StopRequest

TARGET_FOLDER = "target"
PROVENANCE_FILE = "PROVENANCE.json"


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pretrain_target(
    model: ModelConfig,
    *,
    output_dir: Path,
    seed: int,
    report: Report = _write_line,
    on_start: Callable[[], object] | None = None,
) -> dict[str, object]:
    """Train `model.architecture` on `model.pretrain` and save the result as a target folder.

    Args:
        model: `family`, `architecture` and `pretrain` are read, and `device` and `dtype`.
        output_dir: run folder; `target` in it becomes the Hugging Face folder, and a tokenizer that
            is already there is reused.
        seed: of initialisation and data order.
        report: takes progress lines; standard output by default.
        on_start: called when nothing of the folder speaks against the run.

    Returns:
        The content of PROVENANCE.json: command, versions, data hashes, losses, figures, samples.

    Raises:
        ConfigError: architecture, corpus or domain weights are wrong; names the key. Or the folder
            holds a target that is finished, or one of other settings that was stopped.
        Interrupted: SIGTERM or SIGINT; the state is saved, and the same call continues.
    """
    started = time.monotonic()
    record = run_record()
    device = resolve_device(model.device)
    target_dir = output_dir / TARGET_FOLDER
    if (target_dir / PROVENANCE_FILE).is_file() and not step_folders(output_dir):
        raise ConfigError(
            f"output_dir {str(output_dir)!r} holds a finished target; set output_dir=FOLDER, or "
            f"remove {target_dir} to train it anew."
        )
    target_dir.mkdir(parents=True, exist_ok=True)
    architecture, dtype = _architecture(model), _dtype(model, device)
    data = prepare_data(model.pretrain, tokenizer_dir=target_dir)
    report("\n".join(describe_data(data)))
    target = new_target(model.family, architecture, dtype=dtype, device=device, seed=seed)
    report(f"{model.name}: {target.num_parameters():,} parameters, {dtype} on {device}")
    prepared = time.monotonic()
    with StopRequest() as stop:  # after the last step a signal only waits for the end
        run = TargetRun(target, data, model, seed=seed, root=output_dir, report=report)
        if on_start is not None:
            on_start()
        result = run.train(stop)
        finish_training(target, stop_ids=STOP_IDS, bos_id=BOS_ID, pad_id=PAD_ID)
        if run.modules is not None:
            count_modules(run.modules.target, run.modules.spec.num_mtp_modules)
        num_bytes = save_target(target, target_dir)
        if run.modules is not None:
            num_bytes = add_modules(run.modules, target_dir)
        evaluation = evaluate_target(target, data, seq_len=model.pretrain.seq_len, report=report)
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
        **evaluation,
        **data_record(data),
    }
    text = json.dumps(provenance, indent=2)
    (target_dir / PROVENANCE_FILE).write_text(f"{text}\n", encoding="utf8")
    remove_progress(output_dir)
    return provenance


@dataclass(frozen=True)
class TrainingResult:
    """What the loop did; `loss` is the mean of the last interval, `seconds` include compiling."""

    num_steps: int
    num_tokens: int
    num_skipped_steps: int
    loss: float
    seconds: float
    tokens_per_s: float


class TargetRun:
    """Trains a fresh target in place, from where a stopped run left its step folder in `root`."""

    def __init__(
        self,
        target: TargetModel,
        data: PretrainData,
        model: ModelConfig,
        *,
        seed: int,
        root: Path,
        report: Report,
    ) -> None:
        self.root = root
        self.pretrain = pretrain = model.pretrain
        device = target.device
        self.settings = run_settings(model, data, seed=seed, dtype=target.dtype, device=device)
        self.modules = new_modules(target, pretrain, seed=seed)
        trained: nn.Module = target
        if self.modules is not None:
            trained = nn.ModuleList([target, self.modules])
            num_parameters = sum(parameter.numel() for parameter in self.modules.parameters())
            report(f"with {pretrain.num_mtp_modules} MTP modules, {num_parameters:,} parameters")
        self.trained = trained.train()
        self.balancer = ExpertBalancer(routers(trained), rate=pretrain.router_bias_rate)
        self.optimizer = MasterWeights(
            trained.parameters(),
            learning_rate=pretrain.learning_rate,
            weight_decay=pretrain.weight_decay,
            grad_clip=pretrain.grad_clip,
        )
        done = restore_progress(
            root, trained=trained, optimizer=self.optimizer, settings=self.settings
        )
        clear_leftovers(root)
        if done.step:
            report(f"goes on after step {done.step}, with {done.spent_s:.0f} s spent")
        self.loss_of = _loss_function(target, data, pretrain, modules=self.modules)
        self.batches = device_batches(
            data, pretrain, seed=seed, device=device, first_step=done.step
        )
        self.budget = Budget(pretrain, done=done)
        self.log = TrainingLog(
            pretrain, path=root / LOG_FILE, report=report, device=device, done=done
        )
        self.first_step = self.step = done.step

    def train(self, stop: StopRequest) -> TrainingResult:
        """Steps until `max_steps` or `max_seconds`."""
        while self.step == 0 or self.budget.fraction(self.step) < 1.0:
            self._train_step()
            if stop.name is not None and self.budget.fraction(self.step) < 1.0:
                self._save()
                raise Interrupted(
                    f"stopped by {stop.name} after step {self.step} of the target; the same "
                    f"command with output_dir={self.root} goes on."
                )
        self.log.close(self.step)
        self.balancer.close()
        return TrainingResult(
            num_steps=self.step,
            num_tokens=self.step * self.pretrain.batch_size * self.pretrain.seq_len,
            num_skipped_steps=int(self.optimizer.num_skipped.item()),
            loss=self.log.last_loss,
            seconds=self.budget.seconds,
            tokens_per_s=self.log.tokens_per_s,
        )

    def _train_step(self) -> None:
        pretrain = self.pretrain
        rate = cosine_learning_rate(
            self.budget.fraction(self.step),
            step=self.step,
            peak=pretrain.learning_rate,
            warmup_steps=pretrain.warmup_steps,
            min_ratio=pretrain.min_learning_rate_ratio,
        )
        loss = self.loss_of(next(self.batches))
        loss.backward()
        grad_norm = self.optimizer.step(learning_rate=rate)
        imbalance = self.balancer.update(scale=rate / pretrain.learning_rate)
        self.step += 1
        self.log.add(loss.detach())
        if self.step == self.first_step + 1:
            loss.item()  # compiling ends here; the clock of the schedule starts
            self.budget.start()
            self.log.start(self.step)
        if self.step % pretrain.log_every == 0:
            self.log.write(
                self.step,
                learning_rate=rate,
                grad_norm=grad_norm,
                imbalance=imbalance,
                num_skipped=self.optimizer.num_skipped,
                left_s=self.budget.left_s(self.step),
            )

    def _save(self) -> None:
        """Write a step folder and close the log; waits for the device."""
        last_loss = self.log.last_loss
        progress = Progress(
            step=self.step,
            spent_s=self.budget.seconds,
            scheduled_s=self.budget.scheduled_s,
            num_skipped=int(self.optimizer.num_skipped.item()),
            last_loss=None if math.isnan(last_loss) else last_loss,
            losses=[loss.item() for loss in self.log.losses],
        )
        save_progress(
            self.root,
            progress,
            trained=self.trained,
            optimizer=self.optimizer,
            settings=self.settings,
        )
        self.log.close(self.step)


def _loss_function(
    target: TargetModel,
    data: PretrainData,
    pretrain: PretrainConfig,
    *,
    modules: MTPHeads | None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Row starts [B] -> mean loss over B x S predictions, compiled to one graph on a GPU.

    With `modules` their weighted losses are in it. `<|bos|>` is no label: what document comes next
    in a row is not to be learned.
    """
    device = target.device
    tokens = torch.from_numpy(token_array(data.streams, seq_len=pretrain.seq_len)).to(device)
    offsets = torch.arange(pretrain.seq_len + 1, device=device)

    def loss_of(starts: torch.Tensor) -> torch.Tensor:
        rows = tokens[starts[:, None] + offsets].long()  # [B, S + 1]
        if modules is not None:
            return joint_loss(modules, rows, weight=pretrain.mtp_loss_weight)
        logits = next_token_logits(target, rows[:, :-1])  # [B, S, V]
        return functional.cross_entropy(
            logits.float().flatten(0, 1), rows[:, 1:].flatten(), ignore_index=BOS_ID
        )

    if pretrain.compile and device.type == "cuda":
        return torch.compile(loss_of, fullgraph=True, dynamic=False)
    return loss_of


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
