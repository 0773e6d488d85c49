"""Checkpoints of a run: step folders that are whole or absent, verified before they are used.

    output_dir/step_000100/   <file>.safetensors ..., state.json, manifest.json
    output_dir/latest         name of the newest step folder

A step folder is written beside its final place, synced to disk, and renamed; `manifest.json` holds
size and sha256 of each file. The target's weights are never in it, and nothing is pickled.
Random numbers need no state: each micro-batch is seeded from (seed, step, micro-batch, rank), and
the rows of a step follow from (seed, step), see `packed_rows.row_indices`.
"""

import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import read_tensors
from mtp_research.models.loading.source import weights_sha256
from mtp_research.runtime.errors import ConfigError, IntegrityError, NumericFault
from mtp_research.runtime.files import sha256_of, sync_to_disk, write_atomically, write_tensors

logger = logging.getLogger(__name__)

SCHEMA = 1
_MANIFEST, _STATE, _LATEST = "manifest.json", "state.json", "latest"
_STEP_FOLDER = re.compile(r"step_(\d{6,})")
# What runs did before the key was there.
_BEFORE: Mapping[str, object] = {"head.init_noise": 0.0, "objective.half_logits": False}
_RENAMED = {"data (sha256)": "data_sha256"}
_MODEL, _OLD_MODEL = "model_sha256", "model (sha256 of its final norm)"
_UNFINISHED, _RETIRED = ".writing-", ".retired-"
# Trainer keys that change neither the weights nor the order of the data.
_FREE_TRAINER_KEYS = (
    "eval_every", "save_every", "keep_last", "resume", "allow_drift", "early_stopping_patience",
    "decode_eval_prompts", "deepspeed_config",
    "cuda_graphs",  # replay the kernels that are launched otherwise
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A verified step folder.

    `step` counts optimizer steps done, `state` is what was saved under that name.
    """

    folder: Path
    step: int
    state: dict

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Tensors of `<name>.safetensors`, on the CPU."""
        return read_tensors(self.folder / f"{name}.safetensors")


def save_checkpoint(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, object],
    keep_last: int,
) -> Path:
    """Write `root/step_XXXXXX` so that a crash at any moment leaves older steps usable.

    `tensors` are named ones, all finite, by file name without suffix; `state` is JSON-serialisable.
    The `keep_last` newest step folders stay, at least 1.
    """
    for name, members in tensors.items():
        bad = [key for key, tensor in members.items() if not _is_finite(tensor)]
        if bad:
            raise NumericFault(f"step {step}: {name} has non-finite values in {bad[:3]}; not saved")
    final = root / f"step_{step:06d}"
    folder = root / f"{_UNFINISHED}{final.name}-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        _write_step(folder, step=step, tensors=tensors, state=state)
    except (OSError, SafetensorError):  # a full disk gets its room back
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if final.exists():  # a damaged folder of this step that an earlier resume skipped
        final.rename(root / f"{_RETIRED}{final.name}-{os.getpid()}")
    folder.rename(final)
    sync_to_disk(root)
    write_atomically(root / _LATEST, f"{final.name}\n")
    sync_to_disk(root)
    _rotate(root, keep_last=keep_last)
    return final


def _write_step(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, object],
) -> None:
    for name, members in tensors.items():
        contiguous = {key: tensor.detach().contiguous().cpu() for key, tensor in members.items()}
        write_tensors(contiguous, folder / f"{name}.safetensors")
    (folder / _STATE).write_text(json.dumps(dict(state), indent=1))
    files = sorted(folder.iterdir())
    facts = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
    _write_manifest(folder / _MANIFEST, {"schema": SCHEMA, "step": step, "files": facts})
    sync_to_disk(*files, folder / _MANIFEST, folder)


def load_checkpoint(folder: Path) -> Checkpoint:
    """Open a step folder after checking size and sha256 of each of its files."""
    manifest = _read_manifest(folder / _MANIFEST)
    step, files = manifest["step"], manifest["files"]
    named = _STEP_FOLDER.fullmatch(folder.name)
    if named and int(named[1]) != step:
        raise IntegrityError(f"{folder}: holds step {step}, which is not that of its name")
    for name, facts in files.items():
        path = folder / name
        if path.parent != folder or not path.is_file():
            raise IntegrityError(f"{path}: listed in the manifest, but missing")
        if path.stat().st_size != facts["bytes"]:
            raise IntegrityError(
                f"{path}: {facts['bytes']} bytes expected, got {path.stat().st_size}"
            )
        if sha256_of(path) != facts["sha256"]:
            raise IntegrityError(f"{path}: content differs from the manifest's sha256")
    if _STATE not in files:
        raise IntegrityError(f"{folder / _STATE}: missing from the manifest")
    try:
        state = json.loads((folder / _STATE).read_text())
    except ValueError as fault:
        raise IntegrityError(f"{folder / _STATE}: not JSON ({fault})") from fault
    if not isinstance(state, dict):
        raise IntegrityError(f"{folder / _STATE}: must be a mapping, got {type(state).__name__}")
    return Checkpoint(folder=folder, step=step, state=state)


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest step folder that verifies, None if there is none; damaged ones cost a warning."""
    folders = step_folders(root)
    for folder in reversed(folders):
        try:
            checkpoint = load_checkpoint(folder)
            _warn_of_latest(root, folder)
            return checkpoint
        except IntegrityError as fault:
            logger.warning("skipped checkpoint %s: %s", folder.name, fault)
            damage = fault
    if folders:
        raise IntegrityError(f"{root}: no step folder can be used; the oldest fails with: {damage}")
    return None


def _warn_of_latest(root: Path, found: Path) -> None:
    """`latest` may lag by a step after a kill; it never names a step that is not there."""
    try:
        named = (root / _LATEST).read_text(encoding="utf8").strip()
    except FileNotFoundError:
        return
    except (OSError, ValueError):
        named = ""
    if not named or not (root / named).is_dir():
        logger.warning("%s names no step (%r); goes on from %s", root / _LATEST, named, found.name)


def step_folders(root: Path) -> list[Path]:
    """Finished step folders, oldest first."""
    folders = root.iterdir() if root.is_dir() else ()
    found = [path for path in folders if path.is_dir() and _STEP_FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.split("_")[1]))


def check_same_run(
    saved: Mapping[str, object], current: Mapping[str, object], *, allow_drift: Sequence[str] = ()
) -> None:
    """Refuse to resume a run whose settings, by dotted key, changed; `allow_drift` may differ."""
    saved = {key: value for key, value in _BEFORE.items() if key in current} | {
        _RENAMED.get(key, key): value for key, value in saved.items()
    }
    if _MODEL not in saved:  # written before the key was there
        current = {key: value for key, value in current.items() if key != _MODEL}
    saved.pop(_OLD_MODEL, None)
    keys = sorted(saved.keys() | current.keys())
    wanted = [key for key in keys if key not in allow_drift]
    changed = [key for key in wanted if saved.get(key) != current.get(key)]
    if changed:
        lines = [
            f"{key}: checkpoint {saved.get(key)!r}, now {current.get(key)!r}" for key in changed
        ]
        raise ConfigError(
            "trainer.resume needs the settings of the checkpoint; set them back, choose another "
            f"output_dir, or set trainer.allow_drift=[{','.join(changed)}]. Changed:\n"
            + "\n".join(lines)
        )


def clear_leftovers(root: Path) -> None:
    """Remove what a crash left half written or half removed; the caller holds the folder.

    What a link points to stays. A folder in place of `latest` is refused: it is not ours.
    """
    for leftover in (*root.glob(f"{_UNFINISHED}*"), *root.glob(f"{_RETIRED}*")):
        _remove(leftover)
    latest = root / _LATEST
    if latest.is_dir() and not latest.is_symlink():
        raise ConfigError(
            f"output_dir {str(root)!r} must leave the name {_LATEST} to a file of the run, got a "
            "folder; move it away or set output_dir=FOLDER."
        )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_manifest(path: Path, body: Mapping[str, object]) -> None:
    """The manifest carries the sha256 of its own content, so that a flipped bit in it shows too."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps({"manifest": body, "sha256": digest}, indent=1))


def _read_manifest(path: Path) -> dict:
    try:
        record = json.loads(path.read_text())
        body, digest = record["manifest"], record["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        raise IntegrityError(f"{path}: missing or not a manifest ({fault})") from fault
    if hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest() != digest:
        raise IntegrityError(f"{path}: content differs from its own sha256")
    schema = body.get("schema") if isinstance(body, dict) else type(body).__name__
    if schema != SCHEMA:
        raise IntegrityError(f"{path}: schema must be {SCHEMA}, got {schema!r}")
    step, files = body.get("step"), body.get("files")
    if type(step) is not int or step < 0:
        raise IntegrityError(f"{path}: step must be an integer of at least 0, got {step!r}")
    if not isinstance(files, dict) or not all(
        isinstance(facts, dict) and {"bytes", "sha256"} <= facts.keys() for facts in files.values()
    ):
        raise IntegrityError(f"{path}: files must give bytes and sha256 of each file, by name")
    return body


def _rotate(root: Path, *, keep_last: int) -> None:
    """Remove all but the newest; renamed first, so that a crash leaves no half-deleted step."""
    for folder in step_folders(root)[:-keep_last]:
        folder.rename(root / f"{_RETIRED}{folder.name}-{os.getpid()}")
    for retired in root.glob(f"{_RETIRED}*"):
        _remove(retired)


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


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
    if config.head.init == "auto":  # begun from head.path, which was recorded so before `auto`
        settings["head.init"] = "target_last_layer"
    settings |= {f"objective.{k}": v for k, v in dataclasses.asdict(config.objective).items()}
    return settings | {
        "seed": config.seed,
        "objective.num_depths": num_depths,
        "data.seq_len": config.data.seq_len,
        "data.eval_documents": config.data.eval_documents,
        "data.max_documents": config.data.max_documents,
        "data_sha256": data_sha256,
        "model.dtype": str(heads.target.dtype),
        _MODEL: weights_sha256(config.model.path),
        "world_size": world_size,
    }


def step_seed(seed: int, *, step: int, micro_batch: int, rank: int) -> int:
    """Seed of one micro-batch."""
    return int(np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(1)[0])
