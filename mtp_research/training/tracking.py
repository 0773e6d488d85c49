"""Curves of a run: `metrics.jsonl` always, Weights & Biases when asked for.

Tracking never ends a run: a failing W&B costs one warning and its curves, the file goes on.

Source: the project's reliability rules.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO, cast

from mtp_research.config import LoggerConfig

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"


class Tracker:
    """Writes metrics of one run; use as a context manager.

    Args:
        output_dir: folder of `metrics.jsonl`.
        settings: which services.
        config: resolved configuration, for W&B.
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
        """Open the file and, if asked for, the W&B run."""
        self._file: TextIO | None = None
        self._wandb_run: wandb.Run | None = None
        if is_writer:
            path = output_dir / METRICS_FILE
            _drop_after(path, step=first_step)
            self._file = path.open("a", encoding="utf8")
            self._wandb_run = _start_wandb(output_dir, settings=settings, config=config)

    def __enter__(self) -> "Tracker":
        """The tracker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close file and W&B run."""
        if self._file is not None:
            self._file.close()
        if self._wandb_run is not None:
            self._guarded(self._wandb_run.finish)

    def log(self, kind: str, *, step: int, values: Mapping[str, object]) -> None:
        """Write one line `{"kind": ..., "step": ..., ...}`; `kind` prefixes the names in W&B."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, "step": step, **jsonable(values)}) + "\n")
        self._file.flush()
        flat = {f"{kind}/{name}": value for name, value in _flatten(values).items()}
        if self._wandb_run is not None:
            self._guarded(partial(self._wandb_run.log, flat, step=step))

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        # Whatever W&B and its transport raise, the run is worth more than the curve.
        except Exception as fault:
            logger.warning("W&B stopped (%s); curves go on in %s", fault, METRICS_FILE)
            self._wandb_run = None


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
    replacement = path.with_suffix(".tmp")
    replacement.write_text("".join(kept), encoding="utf8")
    replacement.replace(path)


def _start_wandb(
    output_dir: Path, *, settings: LoggerConfig, config: Mapping[str, object]
) -> "wandb.Run | None":
    if settings.wandb == "disabled":
        return None
    try:
        import wandb

        if settings.wandb == "online" and not wandb.login(prompt=False):
            raise RuntimeError("no API key; run `wandb login` or set logger.wandb=offline")
        return wandb.init(
            project=settings.project,
            dir=str(output_dir),
            mode=cast(Literal["offline", "online"], settings.wandb),  # checked
            tags=list(settings.tags),
            config=dict(config),
            # The folder names the run, so that a resumed run goes on in the same curves.
            id=output_dir.resolve().name,
            resume="allow",
        )
    except Exception as fault:  # see Tracker._guarded
        logger.warning("W&B is off (%s); curves go to %s only", fault, METRICS_FILE)
        return None
