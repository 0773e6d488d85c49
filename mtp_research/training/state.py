"""What a checkpoint of a run contains: optimizer tensors by name, and the settings it stands for.

Random numbers need no state: each micro-batch is seeded from (seed, step, micro-batch, rank), and
the rows of a step follow from (seed, step), see `rows.row_indices`.
"""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mtp_research.config import TrainConfig
from mtp_research.errors import IntegrityError
from mtp_research.heads.stack import MTPHeads

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
# Trainer keys that change neither the weights nor the order of the data.
_FREE_TRAINER_KEYS = (
    "eval_every",
    "save_every",
    "keep_last",
    "resume",
    "allow_drift",
    "early_stopping_patience",
    "decode_eval_prompts",
)


def moment_tensors(
    name: str, *, master: Tensor, moments: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Master and moments of one parameter as `<what>.<parameter name>`."""
    tensors = {f"{moment}.{name}": moments[moment] for moment in MOMENTS}
    return {f"master.{name}": master, **tensors}


def check_optimizer_tensors(
    tensors: Mapping[str, Tensor], *, shapes: Mapping[str, torch.Size]
) -> None:
    """Refuse masters and moments that are not those of these parameters.

    Args:
        tensors: as `moment_tensors` names them.
        shapes: of the trained parameters, by name.

    Raises:
        IntegrityError: tensors are missing, extra or of another shape.
    """
    expected = {f"{what}.{name}" for what in ("master", *MOMENTS) for name in shapes}
    if expected != tensors.keys():
        odd = sorted(expected ^ tensors.keys())
        raise IntegrityError(f"optimizer state: missing or extra tensors {odd[:5]}")
    for name, shape in shapes.items():
        saved = tensors[f"master.{name}"].shape
        if saved != shape:
            raise IntegrityError(
                f"optimizer state: {name} must be {list(shape)}, got {list(saved)}"
            )


def run_settings(
    config: TrainConfig, *, heads: MTPHeads, num_depths: int, data_sha256: str, world_size: int
) -> dict[str, object]:
    """Everything that a resumed run must share with the one that was saved, by dotted key."""
    trainer = dataclasses.asdict(config.trainer)
    settings: dict[str, object] = {
        f"trainer.{key}": list(value) if isinstance(value, tuple) else value
        for key, value in trainer.items()
        if key not in _FREE_TRAINER_KEYS
    }
    settings |= {f"head.{key}": value for key, value in dataclasses.asdict(config.head).items()}
    settings |= {f"objective.{k}": v for k, v in dataclasses.asdict(config.objective).items()}
    target = heads.target
    norm = getattr(target.model.base_model, target.family.final_norm).weight
    return settings | {
        "seed": config.seed,
        "objective.num_depths": num_depths,
        "data.seq_len": config.data.seq_len,
        "data.eval_documents": config.data.eval_documents,
        "data.max_documents": config.data.max_documents,
        "data (sha256)": data_sha256,
        "model.dtype": str(target.dtype),
        # A vector that differs between any two trained targets, and is cheap to read.
        "model (sha256 of its final norm)": hashlib.sha256(
            norm.detach().float().cpu().numpy().tobytes()
        ).hexdigest(),
        "world_size": world_size,
    }


def step_seed(seed: int, *, step: int, micro_batch: int, rank: int) -> int:
    """Seed of one micro-batch."""
    return int(np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(1)[0])
