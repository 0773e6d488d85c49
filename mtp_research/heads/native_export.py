"""MTP modules written in a family's published names, for engines that load its own modules.

`export_heads` writes a folder with the modules alone; `stitch_heads` makes a checkpoint folder of a
target and the modules, whose target shards are links to the source's.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtp_research.errors import ConfigError, IntegrityError
from mtp_research.heads.exported_config import exported_config
from mtp_research.heads.native_names import (
    has_stacked_experts,
    native_copies,
    native_keys,
    native_views,
)
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.tensor_index import SINGLE_FILE, TensorIndex, read_index
from mtp_research.models.shard_index import INDEX_FILE
from mtp_research.models.source import CONFIG_FILE

_FIRST_SHARD, _MTP_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_EXTRA_SHARD = "model-mtp.safetensors"
_FILES_LEFT_OUT = (".safetensors", ".bin", ".pt", ".index.json", ".md")

logger = logging.getLogger(__name__)


class Exported(NamedTuple):
    """What was written: the folder, and the published names in it."""

    folder: Path
    names: list[str]


def export_heads(heads: MTPHeads, out: Path, *, source: Path | None = None) -> Exported:
    """Write the modules alone: `model.safetensors` and the target's configuration.

    Args:
        heads: what to write.
        out: destination, missing or empty.
        source: checkpoint whose MTP tensors decide names and dtypes; None writes the family's usual
            names, parameters in bfloat16.

    Raises:
        ConfigError: `out` is in use, the family's names cannot hold these modules, or the source's
            kind of quantisation cannot leave them out.
    """
    _warn_of_conventions(heads)
    tensors = native_tensors(heads, source=None if source is None else read_index(source))
    config = None if source is None else exported_config(heads, source, tensors)
    _make_folder(out)
    save_file(tensors, out / SINGLE_FILE, metadata={"format": "pt"})
    if config is not None:
        _write_config(config, out)
    return Exported(out, sorted(tensors))


def stitch_heads(heads: MTPHeads, out: Path, *, source: Path) -> Exported:
    """Write a checkpoint of the target at `source` and these modules.

    Shards of the source are hard links (symbolic ones across file systems). Only a shard that holds
    MTP tensors of the source, which these replace, is written anew without them.

    Args:
        heads: modules of that target.
        out: destination, missing or empty.
        source: the target's checkpoint folder.

    Raises:
        ConfigError: `out` is in use, the family's names cannot hold these modules, or the source's
            kind of quantisation cannot leave them out.
        IntegrityError: the source is damaged.
    """
    _warn_of_conventions(heads)
    index = read_index(source)
    tensors = native_tensors(heads, source=index)
    old = set(_mtp_keys(heads, index))
    config = exported_config(heads, source, tensors)
    _make_folder(out)
    is_single = set(index.files.values()) == {SINGLE_FILE}
    # A file called model.safetensors would be taken for the whole model, index or not.
    renamed = {SINGLE_FILE: _FIRST_SHARD} if is_single else {}
    files: dict[str, str] = {}
    for file in sorted(set(index.files.values())):
        kept = [name for name in _names_of(index, file) if name not in old]
        if kept:
            _place_shard(index, file, kept, out / renamed.get(file, file))
        files |= dict.fromkeys(kept, renamed.get(file, file))
    mtp_file = _MTP_SHARD if is_single else _EXTRA_SHARD
    save_file(tensors, out / mtp_file, metadata={"format": "pt"})
    files |= dict.fromkeys(tensors, mtp_file)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    content = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (out / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf8")
    _link_other_files(source, out)
    _write_config(config, out)
    return Exported(out, sorted(tensors))


def native_tensors(heads: MTPHeads, *, source: TensorIndex | None = None) -> dict[str, Tensor]:
    """The modules' tensors by published name, on the CPU, copies of shared ones included.

    Where `source` holds MTP tensors of its own, names, copies and dtypes are the same as there
    (quantised ones are written in bfloat16, without scales).
    """
    layout = heads.target.family.native
    keys = [] if source is None else _mtp_keys(heads, source)
    tensors = native_views(heads, layout, has_stacked_experts=has_stacked_experts(keys))
    dtypes = {name: _usual_dtype(name) for name in tensors}
    target = heads.target
    shared = {"embed_tokens": target.embed_tokens.weight, "lm_head": target.lm_head_weight}
    for name, original in native_copies(heads, layout).items():
        if not keys or name in keys:
            tensors[name] = cast(Tensor, shared[original])
            dtypes[name] = _exact_dtype(tensors[name])
    if source is not None:
        dtypes |= _dtypes(source, [key for key in keys if key in tensors])
    return {
        name: tensor.detach().to("cpu", dtypes[name]).contiguous().clone()
        for name, tensor in tensors.items()
    }


def _warn_of_conventions(heads: MTPHeads) -> None:
    """Published names do not say how modules are run: whoever loads them goes by the family."""
    family = heads.target.family
    differing = [
        f"{name}={got} (the family's: {usual})"
        for name, got, usual in (
            ("hidden_source", heads.spec.hidden_source, family.hidden_source),
            ("recycle_norm", heads.spec.recycle_norm, family.recycle_norm),
            ("concat_order", heads.spec.concat_order, family.concat_order),
        )
        if got != usual
    ]
    if differing:
        logger.warning(
            "published names cannot tell that these heads have %s: what loads them by family runs "
            "them otherwise, at a loss of acceptance",
            ", ".join(differing),
        )


def _mtp_keys(heads: MTPHeads, index: TensorIndex) -> list[str]:
    num_layers = heads.target.config.num_hidden_layers
    return native_keys(index.files, heads.target.family.native, num_layers=num_layers)


def _usual_dtype(name: str) -> torch.dtype:
    is_correction = name.endswith(("e_score_correction_bias", "expert_bias"))
    return torch.float32 if is_correction else torch.bfloat16


def _exact_dtype(tensor: Tensor) -> torch.dtype:
    """bfloat16 if that holds the same numbers: a copy must stay equal to its original."""
    is_exact = torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)
    return torch.bfloat16 if is_exact else tensor.dtype


def _dtypes(index: TensorIndex, keys: list[str]) -> dict[str, torch.dtype]:
    """Dtypes of stored tensors; those of one byte count as quantised and are left out."""
    dtypes = {name: tensor.dtype for name, tensor in index.read(keys).items()}
    return {name: dtype for name, dtype in dtypes.items() if dtype.itemsize > 1}


def _names_of(index: TensorIndex, file: str) -> list[str]:
    return [name for name, holder in index.files.items() if holder == file]


def _place_shard(index: TensorIndex, file: str, kept: list[str], path: Path) -> None:
    source = (index.folder / file).resolve()
    if not source.is_file():
        raise IntegrityError(f"{index.folder} must hold {file}, which its index names.")
    with safe_open(source, framework="pt") as shard:
        is_whole = set(shard.keys()) == set(kept)
    if is_whole:
        _link(source, path)
    else:
        save_file(index.read(kept), path, metadata={"format": "pt"})


def _link_other_files(source: Path, out: Path) -> None:
    """Tokenizer, generation settings and the like; no code: remote code is never carried along."""
    for path in sorted(source.iterdir()):
        left_out = path.name.endswith((*_FILES_LEFT_OUT, ".py")) or path.name == CONFIG_FILE
        if path.is_file() and not left_out:
            _link(path.resolve(), out / path.name)


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system
        path.symlink_to(source)


def _write_config(config: Mapping[str, object], out: Path) -> None:
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf8")


def _make_folder(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"out must be a missing or empty folder, {str(out)!r} is in use.")
    out.mkdir(parents=True, exist_ok=True)
