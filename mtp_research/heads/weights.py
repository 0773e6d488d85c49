"""Files of a trained head: a folder with `model.safetensors` and `head.json`.

`head.json` holds the head's spec (which hidden state it reads, which norm is recycled ...), the
family and sizes of the target it belongs to, and whatever provenance the trainer adds. The target's
weights are never in the folder.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mtp_research.errors import IntegrityError
from mtp_research.heads.record import HEAD_FORMAT, RECORD_FILE, check_head_fits, read_head_record
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import Target

__all__ = ["load_head_state", "load_heads", "read_head_record", "save_heads"]

_WEIGHTS = "model.safetensors"


def save_heads(
    heads: MTPHeads,
    folder: Path,
    *,
    provenance: dict[str, object] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write the head folder (created if missing; files are replaced).

    Args:
        heads: what to write.
        folder: destination.
        provenance: JSON-serialisable facts to record under `provenance`.
        dtype: dtype of floating tensors in the file; None keeps the current one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in heads.state_dict().items()
    }
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    record = {
        "format": HEAD_FORMAT,
        "spec": dataclasses.asdict(heads.spec),
        "target": _target_facts(heads.target),
        "provenance": provenance or {},
    }
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")


def load_heads(folder: str | Path, target: Target) -> MTPHeads:
    """Load heads onto `target`: its dtype and device, eval mode, no gradients.

    Raises:
        ConfigError: nothing is there, or the head belongs to another family, hidden size or
            vocabulary.
        IntegrityError: a tensor is missing, extra or of another shape, or a file cannot be read.
    """
    folder = Path(folder)
    record = read_head_record(folder)
    check_head_fits(record, folder=folder, target=_target_facts(target))
    try:
        spec = HeadSpec(**record["spec"])
    except TypeError as fault:
        raise IntegrityError(f"{folder / RECORD_FILE}: spec has other fields: {fault}.") from fault
    heads = MTPHeads(target, spec=spec)
    load_head_state(heads, folder / _WEIGHTS)
    return heads.eval().requires_grad_(False)


def load_head_state(heads: MTPHeads, path: Path) -> None:
    """Copy the tensors of a safetensors file into `heads`, strictly.

    Raises:
        IntegrityError: unreadable file; missing, extra or misshaped tensors, by name.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as fault:
        raise IntegrityError(f"cannot read {path}: {fault}") from fault
    own = heads.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    misshaped = sorted(
        name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape
    )
    if missing or extra or misshaped:
        raise IntegrityError(
            f"{path} must hold the tensors of {len(heads.mtp_modules)} MTP modules; missing "
            f"{missing}, extra {extra}, of another shape {misshaped}."
        )
    heads.load_state_dict(tensors)


def _target_facts(target: Target) -> dict[str, object]:
    return {
        "family": target.family_name,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }
