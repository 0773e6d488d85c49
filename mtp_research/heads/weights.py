"""Files of heads: a folder with `model.safetensors` and `head.json`, or modules of a checkpoint.

`head.json` holds the head's spec (which hidden state it reads, which norm is recycled ...), the
family, sizes and hashes of the target it belongs to, and whatever provenance the trainer adds. The
target's weights are never in the folder. Of a checkpoint on the hub only the config, the index and
the shards with modules are fetched: the others are the target's, which is loaded elsewhere.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mtp_research.heads.native import (
    INDEX_FILE,
    SINGLE_FILE,
    has_native_heads,
    load_native_heads,
    native_keys,
    read_index,
)
from mtp_research.heads.publish import RANKING_FILE, target_facts, write_head_files
from mtp_research.heads.record import (
    RECORD_FILE,
    check_head_fits,
    check_weights,
    read_head_record,
    recorded_schedule,
    refuse_run_folder,
    warn_of_rounding,
)
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.loading.source import CONFIG_FILE, looks_like_hub_id, split_hub_id
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import resolve_path

logger = logging.getLogger(__name__)


def save_heads(
    heads: MTPHeads,
    folder: Path,
    *,
    provenance: dict[str, object] | None = None,
    dtype: torch.dtype | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the head folder (created if missing; each file is replaced at once).

    `provenance` are JSON-serialisable facts to record. Floating tensors are written in `dtype`,
    None for their own. `tensors` are the whole ones of heads that are sharded over ranks.
    """
    write_head_files(
        folder,
        heads.state_dict() if tensors is None else tensors,
        spec=dataclasses.asdict(heads.spec),
        target=heads.target,
        provenance=provenance or {},
        dtype=dtype,
    )


def load_heads(folder: str | Path, target: Target) -> MTPHeads:
    """Load heads onto `target`: its dtype and device, eval mode, no gradients.

    Args:
        folder: heads in our own format, or a checkpoint with the MTP modules of its family, which
            may be a hub id. A relative path is looked for in the working directory, then among the
            shipped files (`assets/lab_tiny/heads/chain_n3`).
        target: the model they belong to.

    Raises:
        ConfigError: nothing is there, or the head belongs to another family, hidden size or
            vocabulary.
        IntegrityError: the head belongs to another target of these sizes; a tensor is missing,
            extra or of another shape; the weights are not those of the recorded hash; or a file
            cannot be read.
    """
    folder = native_folder(resolve_path(str(folder)), target)
    refuse_run_folder(folder)
    if not (folder / RECORD_FILE).exists() and (folder / CONFIG_FILE).is_file():
        if has_native_heads(folder, target):
            return load_native_heads(folder, target)
        raise ConfigError(
            f"spec.head must be a folder of trained heads ({RECORD_FILE}) or a checkpoint with MTP "
            f"modules of the target's family {target.family_name}, {str(folder)!r} is a checkpoint "
            "without them; set spec.head=PATH."
        )
    record = read_head_record(folder)
    check_head_fits(record, folder=folder, target=target_facts(target))
    warn_of_rounding(record, folder=folder, holds_fp8=target.holds_fp8)
    try:
        spec = HeadSpec(**record["spec"])
    except TypeError as fault:
        raise IntegrityError(f"{folder / RECORD_FILE}: spec has other fields: {fault}.") from fault
    if "module_schedule" not in record["spec"]:  # written by an older version
        spec = dataclasses.replace(spec, module_schedule=recorded_schedule(record))
        if spec.num_mtp_modules > 1:
            path, name = folder / RECORD_FILE, spec.module_schedule
            logger.warning("%s lacks spec.module_schedule; the head counts as %s", path, name)
    heads = MTPHeads(target, spec=spec)
    load_head_state(heads, folder / SINGLE_FILE)
    check_weights(folder, record, file=SINGLE_FILE)
    heads.path, heads.provenance = str(folder), record.get("provenance") or {}
    return heads.eval().requires_grad_(False)


def load_head_state(heads: MTPHeads, path: Path) -> None:
    """Copy the tensors of a safetensors file into `heads`, strictly."""
    tensors = read_tensors(path)
    shapes = {name: tensor.shape for name, tensor in heads.state_dict().items()}
    missing, extra = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    misshaped = sorted(
        name for name in shapes.keys() & tensors.keys() if shapes[name] != tensors[name].shape
    )
    if missing or extra or misshaped:
        modules = {name.split(".")[1] for name in shapes if name.startswith("mtp_modules.")}
        raise IntegrityError(
            f"{path} must hold the tensors of {len(modules)} MTP modules; missing "
            f"{missing}, extra {extra}, of another shape {misshaped}."
        )
    heads.load_state_dict(tensors)


def native_folder(path: str | Path, target: Target) -> Path:
    """The folder with the MTP modules of `path`; those of a hub id are fetched into its cache."""
    name = str(path)
    if Path(path).exists() or not looks_like_hub_id(name):
        return Path(path)
    folder = _fetch(name, [CONFIG_FILE, INDEX_FILE, RECORD_FILE])
    if (folder / RECORD_FILE).is_file():  # heads of our own, by `push_to_hub`
        return _fetch(name, [RECORD_FILE, SINGLE_FILE, RANKING_FILE], required=[SINGLE_FILE])
    if not (folder / INDEX_FILE).is_file():
        return _fetch(name, [CONFIG_FILE, SINGLE_FILE])
    index, layout = read_index(folder), target.family.native
    keys = native_keys(index.files, layout, num_layers=target.config.num_hidden_layers)
    shards = sorted({index.files[key] for key in keys})
    return _fetch(name, shards, required=shards) if shards else folder


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a safetensors file by name, on the CPU."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as fault:
        raise IntegrityError(f"cannot read {path}: {fault}") from fault


def _fetch(name: str, files: list[str], *, required: list[str] | None = None) -> Path:
    """Folder of a snapshot with these files, of which the required ones must be there."""
    reason = "the hub is offline or out of reach"
    try:
        hub_id = split_hub_id(name)
        folder = Path(
            snapshot_download(hub_id.name, revision=hub_id.revision, allow_patterns=files)
        )
    except (HfHubHTTPError, HFValidationError, OSError) as fault:
        reason = next(iter(str(fault).splitlines()), type(fault).__name__)
    else:
        missing = [file for file in required or [] if not (folder / file).is_file()]
        if not missing:
            return folder
        reason = f"the cache lacks {missing} and {reason}"
    raise ConfigError(
        f"MTP modules of {name!r} (no local path from {Path.cwd()}) cannot be fetched from the "
        f"hub: {reason}; download the model where there is a network and set the path to its "
        "folder."
    )
