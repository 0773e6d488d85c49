"""How far a run of `task=target` is: its clock, its log, and the step folder of a stopped one.

A step folder of `checkpoint.py` is saved at SIGTERM and holds fp32 masters, moments and router
biases. The order of the rows follows from the seed and the number of steps, and nothing else is
random, so a continued run whose schedule follows the steps ends with the bits of one that nobody
stopped. One whose schedule follows the clock has the seconds that are left.

The loop never waits for the device: losses stay tensors until a line of the log is due.
"""

import dataclasses
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from mtp_research.config.schema import ModelConfig
from mtp_research.config.training_schema import PretrainConfig
from mtp_research.models.fresh import routers
from mtp_research.pretrain.pretrain_data import PretrainData
from mtp_research.runtime.errors import ConfigError, IntegrityError, NumericFault
from mtp_research.runtime.progress import clock
from mtp_research.training.checkpoint import newest_checkpoint, save_checkpoint, step_folders
from mtp_research.training.optim import MasterWeights, trained_parameters

# Keys of `model` that may change between the parts of a run.
_FREE_KEYS = ("name", "path", "device", "dtype", "tp_plan", "device_map", "experts")
_FREE_PRETRAIN_KEYS = ("corpus_dir", "max_seconds", "log_every", "compile")
_NUM_LISTED = 8
LOG_FILE = "pretrain_log.jsonl"
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come; zeros at its start."""

    step: int = 0  # steps done
    spent_s: float = 0.0  # seconds of all parts of the run, compiling included
    scheduled_s: float = 0.0  # of them, those that the schedule counts
    num_skipped: int = 0  # steps without an update
    last_loss: float | None = None  # of the last line of the log
    losses: Sequence[float] = ()  # of the steps since


class Budget:
    """How much of `max_steps` and `max_seconds` is spent, whichever is nearer to its end.

    `max_seconds` count from the making of this object and include compiling; the schedule counts
    from `start`, so that a long compilation shortens the run and not the high learning rates.
    """

    def __init__(self, pretrain: PretrainConfig, *, done: Progress) -> None:
        self.max_steps = pretrain.max_steps
        self.created = self.started = time.monotonic() - done.spent_s
        self.deadline = self.created + pretrain.max_seconds
        self._scheduled_before_s = done.scheduled_s

    def start(self) -> None:
        """Start the clock of the schedule."""
        self.started = time.monotonic() - self._scheduled_before_s

    def fraction(self, step: int) -> float:
        """Spent part of the budget after `step` steps; 1 or more when it is over."""
        now = time.monotonic()
        left = max(self.deadline - self.started, 1e-9)
        return max(step / self.max_steps, (now - self.started) / left)

    def left_s(self, step: int) -> float:
        """Seconds until the end of the budget, at the pace so far."""
        spent = max(self.fraction(step), 1e-9)
        return max((time.monotonic() - self.started) * (1 - spent) / spent, 0.0)

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, those of its earlier parts included."""
        return time.monotonic() - self.created

    @property
    def scheduled_s(self) -> float:
        """Seconds that the schedule counts."""
        return time.monotonic() - self.started


class TrainingLog:
    """Mean loss, speed and router balance per interval, as report lines and as JSON lines.

    JSON lines go to `path`, after those of earlier parts of the run.
    """

    def __init__(
        self,
        pretrain: PretrainConfig,
        *,
        path: Path,
        report: Report,
        device: torch.device,
        done: Progress,
    ) -> None:
        self.tokens_per_step = pretrain.batch_size * pretrain.seq_len
        earlier = _lines_until(path, done.step) if done.step else []
        self.file = path.open("w", encoding="utf8")
        self.file.writelines(earlier)
        self.report = report
        self.losses = [torch.tensor(loss, device=device) for loss in done.losses]
        self.last_loss = math.nan if done.last_loss is None else done.last_loss
        self.last_skipped = done.num_skipped
        self.last_write = (done.step, time.monotonic())
        self.first = (done.step, time.monotonic())
        self.tokens_per_s = 0.0

    def start(self, step: int) -> None:
        """Leave the step that was just made, which compiled, out of the speeds."""
        self.first = self.last_write = (step, time.monotonic())

    def add(self, loss: torch.Tensor) -> None:
        """Take the 0-dim loss of one step; it stays on the device."""
        self.losses.append(loss)

    def write(
        self,
        step: int,
        *,
        learning_rate: float,
        grad_norm: torch.Tensor,
        imbalance: torch.Tensor | None,
        num_skipped: torch.Tensor,
        left_s: float = 0.0,
    ) -> None:
        """Write one line, with the seconds that are left; waits for the device."""
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
            + f"  {clock(left_s)} left"
        )

    def close(self, step: int) -> None:
        """Set `last_loss` and `tokens_per_s` after the last step and close the file."""
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


def run_settings(
    model: ModelConfig, data: PretrainData, *, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    """What the parts of a run must share, by dotted key."""
    fields = dataclasses.asdict(model)
    pretrain = fields.pop("pretrain")
    if not pretrain["num_mtp_modules"]:  # as in runs that were begun before these keys
        del pretrain["num_mtp_modules"], pretrain["mtp_loss_weight"]
    settings = {f"model.{k}": v for k, v in fields.items() if k not in _FREE_KEYS}
    settings |= {
        f"model.pretrain.{k}": v for k, v in pretrain.items() if k not in _FREE_PRETRAIN_KEYS
    }
    tokens = {name: len(stream.token_ids) for name, stream in data.streams.items()}
    digest = hashlib.sha256(json.dumps([data.sha256, tokens], sort_keys=True).encode()).hexdigest()
    settings |= {"seed": seed, "data (sha256)": digest}
    settings |= {"model.dtype": str(dtype), "model.device": device.type}
    return json.loads(json.dumps(settings))


def save_progress(
    root: Path,
    progress: Progress,
    *,
    trained: nn.Module,
    optimizer: MasterWeights,
    settings: Mapping[str, object],
) -> None:
    """Write a step folder in `root`, and remove the one before it."""
    tensors = optimizer.tensors(list(trained_parameters(trained)))
    save_checkpoint(
        root,
        step=progress.step,
        tensors={"optimizer": tensors, "routers": _biases(trained)},
        state={"settings": settings, "progress": dataclasses.asdict(progress)},
        keep_last=1,
    )


def restore_progress(
    root: Path, *, trained: nn.Module, optimizer: MasterWeights, settings: Mapping[str, object]
) -> Progress:
    """Put the newest step folder of `root` into module and optimizer, in place; how far it was."""
    checkpoint = newest_checkpoint(root)
    if checkpoint is None:
        return Progress()
    _require_equal(root, checkpoint.state["settings"], settings, step=checkpoint.step)
    tensors, biases = checkpoint.tensors("optimizer"), checkpoint.tensors("routers")
    own = _biases(trained)
    if biases.keys() != own.keys():
        raise IntegrityError(
            f"{checkpoint.folder}: expected biases of {len(own)} routers, got {len(biases)}; set "
            "output_dir=FOLDER."
        )
    optimizer.restore(tensors, names=list(trained_parameters(trained)))
    for name, bias in own.items():
        bias.copy_(biases[name])
    progress = Progress(**checkpoint.state["progress"])
    optimizer.num_skipped.fill_(progress.num_skipped)
    return progress


def remove_progress(root: Path) -> None:
    """Remove the step folders of a run whose target is written."""
    for folder in step_folders(root):
        shutil.rmtree(folder)
    (root / "latest").unlink(missing_ok=True)


def _biases(trained: nn.Module) -> dict[str, torch.Tensor]:
    found = enumerate(routers(trained))
    return {str(number): router.get_buffer("e_score_correction_bias") for number, router in found}


def _require_equal(
    root: Path, saved: Mapping[str, object], ours: Mapping[str, object], *, step: int
) -> None:
    keys = sorted(k for k in saved.keys() | ours.keys() if saved.get(k) != ours.get(k))
    if keys:
        shown = "; ".join(f"{k} {saved.get(k)} -> {ours.get(k)}" for k in keys[:_NUM_LISTED])
        more = f"; {len(keys) - _NUM_LISTED} more" if len(keys) > _NUM_LISTED else ""
        raise ConfigError(
            f"output_dir {str(root)!r} holds a target that was stopped after step {step}, with "
            f"other settings: {shown}{more}; set them back to finish it, or set output_dir=FOLDER."
        )


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of a log, those of steps that were lost and are made again left out."""
    text = path.read_text(encoding="utf8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # a crash may have cut off the last line
    return [line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] <= step]
