"""How a Weights & Biases run is opened: the one place that knows mode, key, name and code.

`logger.wandb` says whether there is a run, `WANDB_MODE` of the environment how it is kept. Without
a key an online run is kept offline, and one line says how to send it: nothing is lost, and nobody
is asked for a password in the middle of a job. wandb is imported only when a run is opened.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from mtp_research.runtime.provenance import redact_tree

if TYPE_CHECKING:
    from wandb import Run

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0  # of a service that does not answer; W&B's own 90 s are a long time to warn
OFF = "disabled"
_PACKAGE = Path(__file__).resolve().parents[1]
# What earlier versions of W&B called its modes, which its variable still takes.
_OLD_NAMES = {"dryrun": "offline", "run": "online"}


class LoggerSettings(Protocol):
    """What is read of `logger`, see `mtp_research.config.schema.LoggerConfig`."""

    wandb: str
    project: str
    tags: list[str]


def run_mode(asked: str) -> str:
    """`disabled`, or how the run is kept: `online`, `offline` or what else `WANDB_MODE` says.

    Args:
        asked: `logger.wandb`. With `disabled` there is no run, whatever the environment says.
    """
    mode = os.environ.get("WANDB_MODE", "").lower() or asked
    is_refused = os.environ.get("WANDB_DISABLED", "").lower() in ("1", "true")
    return OFF if OFF in (asked, mode) or is_refused else _OLD_NAMES.get(mode, mode)


def run_name(folder: Path) -> str:
    """The name of an output folder; of a job of `-m`, which has a number, that of all jobs too."""
    folder = folder.resolve()
    return f"{folder.parent.name}-{folder.name}" if folder.name.isdigit() else folder.name


def start_run(
    folder: Path,
    *,
    settings: LoggerSettings,
    config: Mapping[str, object],
    job_type: str,
    run_id: str | None = None,
) -> "Run":
    """Open a run that is named like its output folder, with configuration and code.

    Args:
        folder: the output folder; W&B keeps its files in `folder/wandb`.
        settings: of which the mode must not be `disabled`.
        config: secrets in it are redacted here.
        job_type: by which the runs of a project can be grouped: train, eval or study.
        run_id: by which a later process goes on with the run; None for one that is always new.

    Raises:
        Exception: whatever wandb and its transport raise; a run of ours is worth more than that.
    """
    import wandb

    mode = run_mode(settings.wandb)
    folder.mkdir(parents=True, exist_ok=True)
    if mode == "online" and not wandb.login(prompt=False):
        mode = "offline"
        logger.warning(
            "W&B has no API key (WANDB_API_KEY, or `wandb login`): the run is kept offline; "
            "`wandb sync %s/wandb/offline-run-*` sends it",
            folder,
        )
    run = wandb.init(
        project=settings.project,
        name=run_name(folder),
        dir=str(folder),
        mode=cast(Literal["offline", "online"], mode),  # checked here or by W&B
        tags=list(settings.tags),
        config=cast(dict[str, object], redact_tree(dict(config))),
        job_type=job_type,
        id=run_id,
        resume=None if run_id is None else "allow",
        # A study keeps its own run open while it trains heads, each with a run of its own.
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S, reinit="create_new"),
    )
    if os.environ.get("WANDB_DISABLE_CODE", "").lower() not in ("1", "true"):
        run.log_code(str(_PACKAGE), name="code-mtp-research")  # W&B stores each version once
    return run
