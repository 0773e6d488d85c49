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

LOG_FILE = "pretrain_log.jsonl"
Report = Callable[[str], None]


class Budget:
    """How much of `max_steps` and `max_seconds` is spent, whichever is nearer to its end.

    `max_seconds` count from the making of this object and include compiling; the schedule counts
    from `start`, so that a long compilation shortens the run and not the high learning rates.
    """

    def __init__(self, pretrain: PretrainConfig) -> None:
        """Start the clock of `max_seconds`."""
        self.max_steps = pretrain.max_steps
        self.created = self.started = time.monotonic()
        self.deadline = self.created + pretrain.max_seconds

    def start(self) -> None:
        """Start the clock of the schedule."""
        self.started = time.monotonic()

    def fraction(self, step: int) -> float:
        """Spent part of the budget after `step` steps; 1 or more when it is over."""
        now = time.monotonic()
        left = max(self.deadline - self.started, 1e-9)
        return max(step / self.max_steps, (now - self.started) / left)

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self.created


class TrainingLog:
    """Mean loss, speed and router balance per interval, as report lines and as JSON lines."""

    def __init__(self, pretrain: PretrainConfig, *, path: Path, report: Report) -> None:
        """Open `path` for JSON lines; `report` takes the same as text."""
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
