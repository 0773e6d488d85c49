"""Clock and log of the pretraining loop: when it ends, how fast it goes, what it says.

Both are written for a loop that never waits for the device: losses stay tensors until a line is
due.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mtp_research.config import PretrainConfig
from mtp_research.errors import NumericFault
from mtp_research.training.pretrain_state import Progress

LOG_FILE = "pretrain_log.jsonl"
Report = Callable[[str], None]


class Budget:
    """How much of `max_steps` and `max_seconds` is spent, whichever is nearer to its end.

    `max_seconds` count from the making of this object and include compiling; the schedule counts
    from `start`, so that a long compilation shortens the run and not the high learning rates.
    """

    def __init__(self, pretrain: PretrainConfig, *, done: Progress) -> None:
        """Start the clock of `max_seconds`, with what earlier parts of the run have spent."""
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

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, those of its earlier parts included."""
        return time.monotonic() - self.created

    @property
    def scheduled_s(self) -> float:
        """Seconds that the schedule counts."""
        return time.monotonic() - self.started


class TrainingLog:
    """Mean loss, speed and router balance per interval, as report lines and as JSON lines."""

    def __init__(
        self,
        pretrain: PretrainConfig,
        *,
        path: Path,
        report: Report,
        device: torch.device,
        done: Progress,
    ) -> None:
        """Open `path` for JSON lines, after those of earlier parts; `report` takes them as text."""
        self.tokens_per_step = pretrain.batch_size * pretrain.seq_len
        kept = _lines_until(path, done.step) if done.step else []
        self.file = path.open("w", encoding="utf8")
        self.file.writelines(kept)
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
    ) -> None:
        """Write one line; waits for the device.

        Raises:
            NumericFault: every step since the last line had non-finite gradients.
        """
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
        """Settle `last_loss` and `tokens_per_s` after the last step and close the file."""
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


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of a log, those of steps that were lost and are made again left out."""
    text = path.read_text(encoding="utf8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # a crash may have cut off the last line
    return [line for line in whole.splitlines(keepends=True) if json.loads(line)["step"] <= step]
