"""What a run shows while it trains, and how it is asked to stop.

    Tracker        `metrics.jsonl` always, Weights & Biases when asked for
    ProgressView   a live line on a terminal, plain lines elsewhere, a table at the end
    StopRequest    SIGTERM and SIGINT: the current step ends, state is saved, then the run stops
    FigureQueue    figures of steps on their way from the device to the host, read one step late

Tracking never ends a run: a failing service costs one warning and its curves, and the file goes on.
Progress goes to stderr; stdout belongs to the result line of the entry. A step never waits for its
own figures: they are copied while the next one runs, so the device always has work.

Letters: k depths.
"""

import json
import logging
import math
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, TextIO

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mtp_research.config.schema import LoggerConfig
from mtp_research.runtime.errors import NumericFault
from mtp_research.runtime.files import write_atomically
from mtp_research.runtime.progress import live_bar
from mtp_research.runtime.wandb_run import OFF, run_mode, run_name, start_run

if TYPE_CHECKING:  # `mtp report` reads this module's file and needs no model
    from mtp_research.training.walk.replay import WalkReport

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
LINE_EVERY = 50  # steps between plain lines where there is no terminal
LAG = 1  # steps in flight
MAX_SKIPPED_IN_A_ROW = 10
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Tracker:
    """Writes metrics of one run; use as a context manager.

    `config` is for W&B; secrets are redacted here. When a run is resumed at `first_step`, later
    lines of an interrupted attempt are dropped, so that a step appears once. Only the rank that
    is the writer writes.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        settings: LoggerConfig,
        config: Mapping[str, object],
        first_step: int = 0,
        is_writer: bool = True,
    ) -> None:
        self._file: TextIO | None = None
        self._wandb: WandbRun | None = None
        # What `result` wrote when the run ended at `first_step`; empty where it did not.
        self.last_result: Mapping[str, object] = {}
        if not is_writer:
            return
        path = output_dir / METRICS_FILE
        self.last_result = _drop_after(path, step=first_step)
        self._file = path.open("a", encoding="utf8")
        if run_mode(settings.wandb) == OFF:
            return
        try:
            self._wandb = WandbRun(output_dir, settings=settings, config=config)
        # Whatever the service and its transport raise, the run is worth more than the curve.
        except Exception as fault:
            logger.warning("W&B is off (%s); curves go to %s only", fault, METRICS_FILE)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._send(lambda run: run.close(exit_code=0 if kind is None else 1))

    def log(self, kind: str, *, step: int, values: Mapping[str, object]) -> None:
        """Write one line `{"kind": ..., "step": ..., ...}`; W&B names a value `kind/name`."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **jsonable(values)}) + "\n")
        self._file.flush()
        flat = {f"{kind}/{name}": value for name, value in _flatten(values).items()}
        self._send(lambda run: run.log(flat, step=step))

    def result(self, *, step: int, values: Mapping[str, object], head: Path) -> None:
        """The figures of a finished run; W&B also gets a summary, a table and the head folder."""
        self.log("result", step=step, values=values)
        self._send(lambda run: run.result(values, head=head))

    def _send(self, call: "Callable[[WandbRun], None]") -> None:
        """Hand something to W&B, which is dropped when it fails."""
        if self._wandb is None:
            return
        try:
            call(self._wandb)
        except Exception as fault:  # as in __init__
            logger.warning("W&B stopped (%s); curves go on in %s", fault, METRICS_FILE)
            self._wandb = None


class WandbRun:
    """Weights & Biases: curves over our own step, a summary, per-domain lengths, the heads.

    The folder's name is the id of the run, so that a resumed run goes on in the same curves; inside
    a sweep the agent chooses the id.
    """

    def __init__(
        self, output_dir: Path, *, settings: LoggerConfig, config: Mapping[str, object]
    ) -> None:
        import wandb

        self._wandb = wandb
        # Inside a sweep the agent chooses the id.
        run_id = None if "WANDB_SWEEP_ID" in os.environ else run_name(output_dir)
        self._run = start_run(
            output_dir, settings=settings, config=config, job_type="train", run_id=run_id
        )
        # W&B drops what comes at a step below its own counter, as after resuming from a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, object], *, step: int) -> None:
        """Scalars of a step, by name."""
        self._run.log({"step": step, **values})

    def result(self, values: Mapping[str, object], *, head: Path) -> None:
        """Figures of the finished run, and the folder of its heads."""
        self._run.summary.update(_flatten(values))
        lengths = values.get("length_by_domain")
        if isinstance(lengths, Mapping):
            table = self._wandb.Table(columns=["domain", "acceptance_length"])
            for domain, length in lengths.items():
                table.add_data(domain, length)
            self._run.log({"acceptance_by_domain": table})
        artifact = self._wandb.Artifact(f"heads-{self._run.id}", type="model")
        artifact.add_dir(str(head))
        self._run.log_artifact(artifact)

    def close(self, *, exit_code: int) -> None:
        """End the run, which W&B shows as failed unless the code is 0."""
        self._run.finish(exit_code=exit_code)


def jsonable(values: Mapping) -> dict[str, object]:
    """`values` with NaN and infinities as None, which strict JSON readers need."""
    return {str(key): _finite(item) for key, item in values.items()}


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return jsonable(value)
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _flatten(values: Mapping[str, object]) -> dict[str, object]:
    """Scalars by name; lists get 1-based suffixes, mappings their keys."""
    flat: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": item for key, item in value.items()}
        elif isinstance(value, list | tuple):
            flat |= {f"{name}/{index}": item for index, item in enumerate(value, start=1)}
        elif value is not None:
            flat[name] = value
    return flat


def _drop_after(path: Path, *, step: int) -> Mapping[str, object]:
    """Keep the lines of a run up to checkpoint `step`, none at 0; what comes now is left out.

    The result is written again at the end; that of `step` is returned, empty without one. A line
    cut off by a crash is dropped, too.
    """
    last_result: Mapping[str, object] = {}
    if not path.is_file():
        return last_result
    kept, damaged = [], []
    lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            fields = json.loads(line.decode("utf8"))
            if 0 <= fields["step"] <= step and step > 0 and fields["kind"] != "result":
                kept.append(line.decode("utf8") + "\n")
            elif fields["kind"] == "result" and fields["step"] == step:
                last_result = fields
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += [number] if number < len(lines) or not line.startswith(b'{"kind') else []
    if damaged:
        logger.warning("%s: dropped what is no line of metrics, at line %s", path, damaged[:5])
    write_atomically(path, "".join(kept))
    return last_result


class ProgressView:
    """Progress of one run; use as a context manager, shown by one rank only.

    `first_step` steps were done before, when resumed.
    """

    def __init__(self, *, num_steps: int, first_step: int, is_shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not is_shown)
        self._num_steps = num_steps
        self._progress = live_bar(self._console, is_shown=is_shown)
        self._task = self._progress.add_task(
            "training heads",
            total=num_steps,
            completed=first_step,
            unit="steps",
            note="measuring held-out text",
        )
        self._walk = ""

    def __enter__(self) -> "ProgressView":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """One line of information."""
        self._console.print(text, highlight=False)

    def step(self, step: int, *, loss: float, accuracy: list[float]) -> None:
        """Figures of a finished step; `accuracy` per depth, on training tokens."""
        figures = f"loss {loss:.3f}  accuracy {_percent(accuracy)}{self._walk}"
        self._progress.update(self._task, completed=step, note=figures)
        is_due = step % LINE_EVERY == 0 or step == self._num_steps
        if self._progress.disable and is_due:
            self.note(f"step {step}/{self._num_steps}  {figures}")

    def walk(self, step: int, report: "WalkReport") -> None:
        """A new held-out report."""
        length = f"{report.acceptance_length:.3f} +- {report.standard_error:.3f}"
        self._walk = f"  walk {report.acceptance_length:.3f}"
        self._progress.update(self._task, note=self._walk.strip())
        self.note(
            f"step {step}/{self._num_steps}  held-out acceptance length {length}  "
            f"accuracy {_percent(list(report.accuracy_per_depth))}"
        )

    def table(self, before: "WalkReport", after: "WalkReport") -> None:
        """Held-out figures before and after training, overall and per domain."""
        self._console.print(result_table(before, after))


def result_table(before: "WalkReport", after: "WalkReport") -> Table:
    """Acceptance length of the replay walk before and after training; marginal accuracies below."""
    table = Table(title=f"held-out acceptance length ({after.num_documents} documents)")
    table.add_column("text")
    for name in ("before", "after"):
        table.add_column(name, justify="right")
    table.add_row(
        "all",
        f"{before.acceptance_length:.3f}",
        f"{after.acceptance_length:.3f} +- {after.standard_error:.3f}",
    )
    for domain, length in after.length_by_domain.items():
        first = before.length_by_domain.get(domain, float("nan"))
        table.add_row(f"  {domain}", f"{first:.3f}", f"{length:.3f}")
    table.add_section()
    pairs = zip(before.accuracy_per_depth, after.accuracy_per_depth, strict=True)
    for depth, (first, last) in enumerate(pairs, start=1):
        table.add_row(f"accuracy at depth {depth}", f"{first:.1%}", f"{last:.1%}")
    return table


def _percent(values: list[float]) -> str:
    return "/".join(f"{value:.0%}" for value in values)


class StopRequest:
    """Catches the signals inside a `with` block; a second one acts at once, as without us."""

    def __init__(self) -> None:
        self.name: str | None = None  # of the signal that came
        self._previous: dict[int, signal.Handlers] = {}

    def __enter__(self) -> "StopRequest":
        self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class StepStats(NamedTuple):
    """What a step leaves on the device; sums over all ranks."""

    loss: Tensor  # 0-dim, token-weighted, depth-weighted mean of the step
    num_correct: Tensor  # `[k]` labels whose argmax is right
    sum_acceptance: Tensor  # `[k]` chance that a sampled draft is accepted, summed over the labels
    num_labels: Tensor  # `[k]`
    num_tokens: Tensor  # 0-dim, tokens read, padding not counted
    num_stops: Tensor  # 0-dim, ranks that got a signal
    # `[2]` largest and smallest load of a module's expert over the mean; None without experts
    expert_loads: Tensor | None = None


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
    expert_loads: dict[str, float]  # those of `StepStats` by name; empty without experts

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
        loads = stats.expert_loads
        loads = scalars.new_full((2,), math.nan) if loads is None else loads
        counts = (stats.num_labels, stats.num_correct, stats.sum_acceptance)
        values = torch.cat([scalars, loads.double(), *(count.double() for count in counts)])
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
    loss, grad_norm, num_tokens, num_stops, most, least, *counts = pending.values.tolist()
    loads = {"expert_load_max": most, "expert_load_min": least}
    num_depths = len(counts) // 3
    if not any(counts[:num_depths]):  # a mean over nothing
        loss = math.nan
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
        expert_loads={} if math.isnan(most) else loads,
    )
