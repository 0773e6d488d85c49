"""`task=target`: train a small target from scratch on the corpus, evaluate it, save a model folder.

Flow: documents -> token streams on the device -> compiled loss -> AdamW on fp32 masters -> dev losses,
samples, Hugging Face folder and PROVENANCE.json. The loop is bound by kernel launches for tiny models,
so nothing in it waits for the device except at the log lines.
Letters: B rows of a batch, S tokens of a row, V vocabulary.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from mtp_research.config import ModelConfig, PretrainConfig
from mtp_research.data.packing import sample_rows
from mtp_research.data.tokenizer import BOS_ID, PAD_ID, STOP_IDS
from mtp_research.errors import ConfigError, EnvironmentFault, NumericFault
from mtp_research.models.fresh import (
    TargetModel,
    finish_training,
    new_target,
    next_token_logits,
    routers,
    save_target,
)
from mtp_research.provenance import run_record
from mtp_research.training.balance import ExpertBalancer
from mtp_research.training.optim import MasterWeights, cosine_learning_rate
from mtp_research.training.pretrain_data import PretrainData, prepare_data, token_array
from mtp_research.training.pretrain_report import dev_losses, sample_texts

LOG_FILE = "pretrain_log.jsonl"
SAMPLE_TOKENS = 96
Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingResult:
    """What the loop did. `loss` is the mean of the last log interval, `seconds` include compiling."""

    num_steps: int
    num_tokens: int
    num_skipped_steps: int
    loss: float
    seconds: float
    tokens_per_s: float


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pretrain_target(
    model: ModelConfig, *, output_dir: Path, seed: int, report: Report = _write_line
) -> dict[str, object]:
    """Train `model.architecture` on `model.pretrain` and save the result as a target folder.

    Args:
        model: `family`, `architecture` and `pretrain` are read, and `device` and `dtype`.
        output_dir: becomes the Hugging Face folder; a tokenizer already in it is reused.
        seed: of initialisation and data order.
        report: takes progress lines; standard output by default.

    Returns:
        The content of PROVENANCE.json: command, versions, data hashes, losses, figures, samples.

    Raises:
        ConfigError: architecture, corpus or domain weights are wrong; names the key.
        EnvironmentFault: `device=cuda` without a GPU.
        NumericFault: a whole log interval had non-finite gradients.
    """
    started = time.monotonic()
    record = run_record()
    device = _device(model)
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    architecture = _architecture(model)
    data = prepare_data(model.pretrain, tokenizer_dir=output_dir)
    _report_data(data, report)
    dtype = _dtype(model, device)
    target = new_target(model.family, architecture, dtype=dtype, device=device, seed=seed)
    num_parameters = sum(parameter.numel() for parameter in target.parameters())
    report(f"{model.name}: {num_parameters:,} parameters, {dtype} on {device}")
    prepared = time.monotonic()
    result = _train(target, data, model.pretrain, seed=seed, log_dir=output_dir, report=report)

    finish_training(target, stop_ids=STOP_IDS, bos_id=BOS_ID, pad_id=PAD_ID)
    num_bytes = save_target(target, output_dir)
    seq_len = model.pretrain.seq_len
    losses = dev_losses(target, data.dev_documents, tokenizer=data.tokenizer, seq_len=seq_len)
    samples = sample_texts(target, tokenizer=data.tokenizer, max_new_tokens=SAMPLE_TOKENS)
    for domain, entry in losses.items():
        report(f"dev {domain:14s} loss {entry['loss']:.3f} bits/byte {entry['bits_per_byte']:.3f}")
    for domain, text in samples.items():
        report(f"--- sample {domain}\n{text}")
    provenance = record | {
        "name": model.name,
        "family": model.family,
        "seed": seed,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_parameters": num_parameters,
        "weights_bytes": num_bytes,
        "training": dataclasses.asdict(result),
        "setup_seconds": prepared - started,
        "total_seconds": time.monotonic() - started,
        "dev": losses,
        "samples": samples,
        "data_sha256": data.sha256,
        "data_bytes": data.num_bytes,
        "data_tokens": {name: len(stream.token_ids) for name, stream in data.streams.items()},
        "pretrain": dataclasses.asdict(model.pretrain),
        "architecture": architecture,
    }
    text = json.dumps(provenance, indent=2)
    (output_dir / "PROVENANCE.json").write_text(f"{text}\n", encoding="utf8")
    return provenance


def _train(
    target: TargetModel,
    data: PretrainData,
    pretrain: PretrainConfig,
    *,
    seed: int,
    log_dir: Path,
    report: Report,
) -> TrainingResult:
    device = target.device
    target.train()
    balancer = ExpertBalancer(routers(target), rate=pretrain.router_bias_rate)
    optimizer = MasterWeights(
        target.parameters(),
        learning_rate=pretrain.learning_rate,
        weight_decay=pretrain.weight_decay,
        grad_clip=pretrain.grad_clip,
    )
    loss_of = _loss_function(target, data, pretrain)
    batches = _device_batches(data, pretrain, seed=seed, device=device)
    budget = _Budget(pretrain)
    log = _Log(pretrain, path=log_dir / LOG_FILE, report=report)
    step = 0
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
        if step == 1:
            loss.item()  # compiling ends here; the clock of the schedule starts
            budget.start()
            log.start()
        if step % pretrain.log_every == 0:
            log.write(
                step,
                learning_rate=rate,
                grad_norm=grad_norm,
                imbalance=imbalance,
                num_skipped=optimizer.num_skipped,
            )
    log.close(step)
    balancer.close()
    num_tokens = step * pretrain.batch_size * pretrain.seq_len
    return TrainingResult(
        num_steps=step,
        num_tokens=num_tokens,
        num_skipped_steps=int(optimizer.num_skipped.item()),
        loss=log.last_loss,
        seconds=budget.seconds,
        tokens_per_s=log.tokens_per_s,
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


def _device_batches(
    data: PretrainData, pretrain: PretrainConfig, *, seed: int, device: torch.device
) -> Iterator[torch.Tensor]:
    """Row starts [B] on the device, copied without waiting for it."""
    is_cuda = device.type == "cuda"
    for starts in sample_rows(
        data.streams,
        weights=data.weights,
        batch_size=pretrain.batch_size,
        seq_len=pretrain.seq_len,
        seed=seed,
    ):
        batch = torch.from_numpy(starts)
        yield batch.pin_memory().to(device, non_blocking=True) if is_cuda else batch


class _Budget:
    """How much of `max_steps` and `max_seconds` is spent, whichever is nearer to its end.

    `max_seconds` count from the making of this object and include compiling; the schedule counts from
    `start`, so that a long compilation shortens the run and not the high learning rates.
    """

    def __init__(self, pretrain: PretrainConfig) -> None:
        self.max_steps = pretrain.max_steps
        self.created = self.started = time.monotonic()
        self.deadline = self.created + pretrain.max_seconds

    def start(self) -> None:
        self.started = time.monotonic()

    def fraction(self, step: int) -> float:
        now = time.monotonic()
        left = max(self.deadline - self.started, 1e-9)
        return max(step / self.max_steps, (now - self.started) / left)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.created


class _Log:
    """Mean loss, speed and router balance per interval, as report lines and as JSON lines."""

    def __init__(self, pretrain: PretrainConfig, *, path: Path, report: Report) -> None:
        self.tokens_per_step = pretrain.batch_size * pretrain.seq_len
        self.file = path.open("w", encoding="utf8")
        self.report = report
        self.losses: list[torch.Tensor] = []
        self.last_loss = math.nan
        self.last_skipped = 0
        self.last_write = (0, time.monotonic())
        self.first = (0, time.monotonic())
        self.tokens_per_s = 0.0

    def start(self) -> None:
        """Leave the first step, which compiles, out of the speeds."""
        self.first = self.last_write = (1, time.monotonic())

    def add(self, loss: torch.Tensor) -> None:
        self.losses.append(loss)

    def write(
        self,
        step: int,
        *,
        learning_rate: float,
        grad_norm: torch.Tensor,
        imbalance: torch.Tensor | None,
        num_skipped: torch.Tensor,
    ) -> None:
        self._take_loss()
        entry = {
            "step": step,
            "loss": self.last_loss,
            "learning_rate": learning_rate,
            "grad_norm": grad_norm.item(),
            "router_imbalance": None if imbalance is None else imbalance.item(),
            "num_skipped_steps": int(num_skipped.item()),
            "tokens_per_s": self._speed(step, since=self.last_write),
            "seconds": time.monotonic() - self.first[1],
        }
        num_steps = step - self.last_write[0]
        if num_steps > 1 and entry["num_skipped_steps"] - self.last_skipped >= num_steps:
            raise NumericFault(
                f"all {num_steps} steps up to step {step} had non-finite gradients; lower "
                "model.pretrain.learning_rate"
            )
        self.last_skipped = entry["num_skipped_steps"]
        self.last_write = (step, time.monotonic())
        self.file.write(json.dumps(entry) + "\n")
        self.file.flush()
        self.report(
            f"step {step:6d}  loss {self.last_loss:.4f}  lr {learning_rate:.2e}  "
            f"grad {entry['grad_norm']:.2f}  {entry['tokens_per_s']:,.0f} tok/s"
            + ("" if imbalance is None else f"  imbalance {entry['router_imbalance']:.2f}")
        )

    def close(self, step: int) -> None:
        if self.losses:
            self._take_loss()
        self.tokens_per_s = self._speed(step, since=self.first)
        self.file.close()

    def _take_loss(self) -> None:
        self.last_loss = torch.stack(self.losses).mean().item()
        self.losses = []

    def _speed(self, step: int, *, since: tuple[int, float]) -> float:
        seconds = max(time.monotonic() - since[1], 1e-9)
        return (step - since[0]) * self.tokens_per_step / seconds


def _device(model: ModelConfig) -> torch.device:
    has_gpu = torch.cuda.is_available()
    if model.device == "cuda" and not has_gpu:
        raise EnvironmentFault("model.device is cuda, but no GPU is visible; set model.device=cpu")
    if model.device == "auto":
        return torch.device("cuda" if has_gpu else "cpu")
    return torch.device(model.device)


def _dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    if model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[model.dtype]


def _architecture(model: ModelConfig) -> dict[str, object]:
    """Architecture with the tokenizer's vocabulary, checked against the row length."""
    vocab_size = model.pretrain.vocab_size
    architecture = {"vocab_size": vocab_size} | model.architecture
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


def _report_data(data: PretrainData, report: Report) -> None:
    total = sum(data.weights.values())
    for name, stream in data.streams.items():
        num_tokens = len(stream.token_ids)
        report(
            f"domain {name:14s} weight {data.weights[name] / total:.3f}  {num_tokens:>11,} tokens  "
            f"{data.num_bytes[name] / num_tokens:.2f} bytes/token"
        )
