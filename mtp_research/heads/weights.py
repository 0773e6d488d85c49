"""Files of a trained head: a folder with `model.safetensors` and `head.json`.

`head.json` holds the head's spec (which hidden state it reads, which norm is recycled ...), the family and sizes of the
target it belongs to, and whatever provenance the trainer adds. The target's weights are never in the folder.
"""

import dataclasses
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import Target

HEAD_FORMAT = 1
_WEIGHTS, _SPEC = "model.safetensors", "head.json"


def save_heads(heads: MTPHeads, folder: Path, *, provenance: dict[str, object] | None = None, dtype: torch.dtype | None = None) -> None:
    """Write the head folder (created if missing; files are replaced).

    Args:
        heads: what to write.
        folder: destination.
        provenance: JSON-serialisable facts to record under `provenance`.
        dtype: dtype of floating tensors in the file; None keeps the current one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous().cpu()
        for name, tensor in heads.state_dict().items()
    }
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    record = {
        "format": HEAD_FORMAT,
        "spec": dataclasses.asdict(heads.spec),
        "target": _target_facts(heads.target),
        "provenance": provenance or {},
    }
    (folder / _SPEC).write_text(json.dumps(record, indent=2) + "\n")


def load_heads(folder: str | Path, target: Target) -> MTPHeads:
    """Load a head folder onto `target`, in the target's dtype and on its device, in eval mode without gradients.

    Raises:
        ConfigError: nothing is there, or the head belongs to another family, hidden size or vocabulary.
        IntegrityError: a tensor is missing, extra or of another shape, or a file cannot be read.
    """
    folder = Path(folder)
    record = read_head_record(folder)
    expected, got = _target_facts(target), record["target"]
    for key, value in expected.items():
        if got.get(key) != value:
            raise ConfigError(
                f"spec.head {str(folder)!r} was trained for a target with {key} {got.get(key)!r}, this target has {value!r}; "
                "set spec.head to a head trained on this model."
            )
    heads = MTPHeads(target, spec=HeadSpec(**record["spec"]))
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
    misshaped = sorted(name for name in own.keys() & tensors.keys() if own[name].shape != tensors[name].shape)
    if missing or extra or misshaped:
        raise IntegrityError(f"{path}: missing tensors {missing}, extra tensors {extra}, other shapes {misshaped}")
    heads.load_state_dict(tensors)


def read_head_record(folder: Path) -> dict:
    """The parsed `head.json`.

    Raises:
        ConfigError: the folder or the file is missing.
        IntegrityError: the file is not valid JSON or has another format number.
    """
    path = folder / _SPEC
    if not path.is_file():
        raise ConfigError(f"spec.head must be a head folder, null or oracle; {str(folder)!r} has no {_SPEC}.")
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as fault:
        raise IntegrityError(f"{path}: invalid JSON at line {fault.lineno}: {fault.msg}") from fault
    if record.get("format") != HEAD_FORMAT:
        raise IntegrityError(f"{path}: head format must be {HEAD_FORMAT}, got {record.get('format')!r}")
    return record


def _target_facts(target: Target) -> dict[str, object]:
    return {
        "family": target.family_name,
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.config.vocab_size,
    }
