"""Curves of a run: `metrics.jsonl` always, Weights & Biases or TensorBoard when asked for.

Tracking never ends a run: a failing service costs one warning and its curves, the file goes on.

Source: the project's reliability rules.
"""

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TextIO, cast

from mtp_research.config import LoggerConfig
from mtp_research.files import write_atomically
from mtp_research.provenance import redact_tree

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker:
    """Writes metrics of one run; use as a context manager.

    Args:
        output_dir: folder of `metrics.jsonl`.
        settings: which services.
        config: resolved configuration, for W&B; secrets are redacted here.
        first_step: steps already done when the run is resumed; later lines of an interrupted
            attempt are dropped, so that a step appears once.
        is_writer: False on all ranks but one, which then write nothing.
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
        """Open the file and the services that are asked for."""
        self._file: TextIO | None = None
        self._services: list[Service] = []
        if not is_writer:
            return
        path = output_dir / METRICS_FILE
        _drop_after(path, step=first_step)
        self._file = path.open("a", encoding="utf8")
        if settings.wandb != "disabled":
            self._add("W&B", partial(WandbService, output_dir, settings=settings, config=config))
        if settings.tensorboard:
            self._add("TensorBoard", partial(TensorboardService, output_dir, first_step=first_step))

    def __enter__(self) -> "Tracker":
        """The tracker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close file and services."""
        if self._file is not None:
            self._file.close()
        self._each(lambda service: service.close())

    def log(self, kind: str, *, step: int, values: Mapping[str, object]) -> None:
        """Write one line `{"kind": ..., "step": ..., ...}`; services name a value `kind/name`."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **jsonable(values)}) + "\n")
        self._file.flush()
        flat = {f"{kind}/{name}": value for name, value in _flatten(values).items()}
        self._each(lambda service: service.log(flat, step=step))

    def result(self, *, step: int, values: Mapping[str, object], head: Path) -> None:
        """The figures of a finished run; W&B also gets a summary, a table and the head folder."""
        self.log("result", step=step, values=values)
        if self._file is not None:
            self._each(lambda service: service.result(values, head=head))

    def _add(self, name: str, start: "Callable[[], Service]") -> None:
        try:
            self._services.append(start())
        except Exception as fault:  # see _each
            logger.warning("%s is off (%s); curves go to %s only", name, fault, METRICS_FILE)

    def _each(self, call: "Callable[[Service], None]") -> None:
        """Hand something to every service; one that fails is dropped."""
        for service in list(self._services):
            try:
                call(service)
            # Whatever a service and its transport raise, the run is worth more than the curve.
            except Exception as fault:
                logger.warning("%s stopped (%s); curves go on in %s", service, fault, METRICS_FILE)
                self._services.remove(service)


class Service(Protocol):
    """Somewhere else that curves go."""

    def log(self, values: Mapping[str, object], *, step: int) -> None:
        """Scalars of a step, by name."""

    def result(self, values: Mapping[str, object], *, head: Path) -> None:
        """Figures of the finished run, and the folder of its heads."""

    def close(self) -> None:
        """Nothing more will come."""


class WandbService:
    """Weights & Biases: curves over our own step, a summary, per-domain lengths, the heads.

    Args:
        output_dir: of the run; its name is the run's id, so that a resumed run goes on in the same
            curves. Inside a sweep the agent names the run.
        settings: mode, project, tags.
        config: resolved configuration.

    Raises:
        RuntimeError: online without an API key.
    """

    def __init__(
        self, output_dir: Path, *, settings: LoggerConfig, config: Mapping[str, object]
    ) -> None:
        """Start the run."""
        import wandb

        if settings.wandb == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key; run `wandb login` or set logger.wandb=offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=settings.project,
            dir=str(output_dir),
            mode=cast(Literal["offline", "online"], settings.wandb),  # checked
            tags=list(settings.tags),
            config=cast(dict[str, object], redact_tree(dict(config))),
            id=None if "WANDB_SWEEP_ID" in os.environ else output_dir.resolve().name,
            resume="allow",
        )
        # W&B drops what comes at a step below its own counter, as after resuming from a checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def __str__(self) -> str:
        return "W&B"

    def log(self, values: Mapping[str, object], *, step: int) -> None:
        """See `Service.log`."""
        self._run.log({"step": step, **values})

    def result(self, values: Mapping[str, object], *, head: Path) -> None:
        """See `Service.result`."""
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

    def close(self) -> None:
        """See `Service.close`."""
        self._run.finish()


class TensorboardService:
    """TensorBoard event files in `output_dir/tensorboard`.

    Args:
        output_dir: of the run.
        first_step: steps already done; later points of an interrupted attempt are dropped.

    Raises:
        ImportError: the package is not installed.
    """

    def __init__(self, output_dir: Path, *, first_step: int) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(output_dir / "tensorboard", purge_step=first_step + 1)

    def __str__(self) -> str:
        return "TensorBoard"

    def log(self, values: Mapping[str, object], *, step: int) -> None:
        """See `Service.log`."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def result(self, values: Mapping[str, object], *, head: Path) -> None:
        """Nothing beyond the curves."""

    def close(self) -> None:
        """See `Service.close`."""
        self._writer.close()


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


def _drop_after(path: Path, *, step: int) -> None:
    """Keep the lines of steps <= `step`; a line cut off by a crash is dropped too."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    write_atomically(path, "".join(kept))
