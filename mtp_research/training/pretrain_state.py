"""An interrupted `task=target`: what is saved at SIGTERM, and how the same command goes on with it.

A step folder of `checkpoint.py` holds fp32 masters, moments and router biases. The order of the
rows follows from the seed and the number of steps, and nothing else is random, so that a run whose
schedule follows the steps ends with the bits of one that nobody stopped. One whose schedule follows
the clock goes on with the seconds that are left.
"""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from mtp_research.config import ModelConfig
from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.models.fresh import TargetModel, routers
from mtp_research.training.checkpoint import newest_checkpoint, save_checkpoint, step_folders
from mtp_research.training.optim import MasterWeights
from mtp_research.training.pretrain_data import PretrainData
from mtp_research.training.state import MOMENTS, check_optimizer_tensors, moment_tensors

# Keys of `model` that may change between the parts of a run.
_FREE_KEYS = ("name", "path", "device", "dtype", "tp_plan", "device_map", "experts")
_FREE_PRETRAIN_KEYS = ("corpus_dir", "max_seconds", "log_every", "compile")
_NUM_LISTED = 8


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come; zeros at its start.

    Attributes:
        step: steps done.
        spent_s: seconds of all parts of the run, compiling included.
        scheduled_s: of them, those that the schedule counts.
        num_skipped: steps without an update.
        last_loss: of the last line of the log.
        losses: of the steps since.
    """

    step: int = 0
    spent_s: float = 0.0
    scheduled_s: float = 0.0
    num_skipped: int = 0
    last_loss: float | None = None
    losses: Sequence[float] = ()


def run_settings(
    model: ModelConfig, data: PretrainData, *, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, object]:
    """What the parts of a run must share, by dotted key."""
    fields = dataclasses.asdict(model)
    pretrain = fields.pop("pretrain")
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
    target: TargetModel,
    optimizer: MasterWeights,
    settings: Mapping[str, object],
) -> None:
    """Write a step folder in `root`, and remove the one before it.

    Raises:
        NumericFault: a tensor is not finite.
    """
    names = _trained_names(target)
    tensors: dict[str, torch.Tensor] = {}
    for name, master in zip(names, optimizer.masters, strict=True):
        tensors |= moment_tensors(name, master=master, moments=optimizer.optimizer.state[master])
    save_checkpoint(
        root,
        step=progress.step,
        tensors={"optimizer": tensors, "routers": _biases(target)},
        state={"settings": settings, "progress": dataclasses.asdict(progress)},
        keep_last=1,
    )


def restore_progress(
    root: Path,
    *,
    target: TargetModel,
    optimizer: MasterWeights,
    settings: Mapping[str, object],
) -> Progress:
    """Put the newest step folder of `root` into target and optimizer, in place.

    Returns:
        Where the run goes on: zeros without a step folder.

    Raises:
        ConfigError: it is of a run with other settings; names them with both values.
        IntegrityError: it is damaged, or lacks tensors.
    """
    checkpoint = newest_checkpoint(root)
    if checkpoint is None:
        return Progress()
    _require_equal(root, checkpoint.state["settings"], settings, step=checkpoint.step)
    tensors, biases = checkpoint.tensors("optimizer"), checkpoint.tensors("routers")
    names, own = _trained_names(target), _biases(target)
    shapes = {n: m.shape for n, m in zip(names, optimizer.masters, strict=True)}
    check_optimizer_tensors(tensors, shapes=shapes)
    if biases.keys() != own.keys():
        raise IntegrityError(
            f"{checkpoint.folder}: expected biases of {len(own)} routers, got {len(biases)}; set "
            "output_dir=FOLDER."
        )
    for name, master in zip(names, optimizer.masters, strict=True):
        master.copy_(tensors[f"master.{name}"])
        optimizer.optimizer.state[master] = {
            moment: tensors[f"{moment}.{name}"].to(master.device) for moment in MOMENTS
        }
    for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
        parameter.data.copy_(master)
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


def _trained_names(target: nn.Module) -> list[str]:
    return [name for name, parameter in target.named_parameters() if parameter.requires_grad]


def _biases(target: TargetModel) -> dict[str, torch.Tensor]:
    found = enumerate(routers(target))
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
