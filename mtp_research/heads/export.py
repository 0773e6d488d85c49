"""Write trained heads in the published names of their family: `mtp export`.

`stitch_heads` writes a whole checkpoint: links to the target's files and one new shard.
`export_heads` writes the modules alone.

A target that ties lm_head to its embedding has no lm_head.weight, which some engines read all the
same and leave as it was allocated. For those the new shard gets it, and `tie_word_embeddings` is
false, so that no reader takes the two for one.

`config.json` of the result says how many modules it has, and that they are no FP8: a quantised
source lists in `quantization_config` which modules are not, and every other one is taken for
quantised. Exported modules are bfloat16, so they join that list, or an engine would look for scales
that are not there and fail, or cast the weights as if they were FP8.

Sources: transformers' `FineGrainedFP8Config.modules_to_not_convert`; `ignore` of compressed-tensors
and of NVIDIA's modelopt; `llm_int8_skip_modules` of bitsandbytes.
"""

import json
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor

from mtp_research.heads.engines import engine_for
from mtp_research.heads.native import (
    SINGLE_FILE,
    TensorIndex,
    has_stacked_experts,
    native_copies,
    native_keys,
    native_views,
    read_index,
)
from mtp_research.heads.record import CONVENTIONS
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.loading.source import CONFIG_FILE, INDEX_FILE
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.files import write_tensors

logger = logging.getLogger(__name__)

_FIRST_SHARD, _MTP_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
_EXTRA_SHARD = "model-mtp.safetensors"
_FILES_LEFT_OUT = (".safetensors", ".bin", ".pt", ".index.json", ".md")
_QUANTISATION = "quantization_config"
_LISTS = {  # method -> key of its list of modules that are left as they are
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "compressed-tensors": "ignore",
    "modelopt": "ignore",
    "bitsandbytes": "llm_int8_skip_modules",
}
_SEPARATE_FILE = "hf_quant_config.json"  # of modelopt; read where config.json says nothing
_OTHER_NAME = "ignored_layers"  # of vLLM, which then reads no other list
LM_HEAD, _TIED = "lm_head.weight", "tie_word_embeddings"


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
    write_tensors(tensors, out / SINGLE_FILE)
    if config is not None:
        _write_config(config, out)
    return Exported(out, sorted(tensors))


def stitch_heads(
    heads: MTPHeads, out: Path, *, source: Path, engine: str | None = None
) -> Exported:
    """Write a checkpoint of the target at `source` and these modules.

    Shards of the source are hard links (symbolic ones across file systems). Only a shard that holds
    MTP tensors of the source, which these replace, is written anew without them.

    Args:
        heads: what to write.
        out: destination, missing or empty.
        source: checkpoint of their target.
        engine: key of `ENGINES` that the checkpoint is for. A source without lm_head.weight gets it
            unless the engine is known to do without, and config.json the keys that it wants; None
            leaves the source as it is.

    Raises:
        ConfigError: as `export_heads`, or the engine refuses so many modules.
        IntegrityError: the source is damaged.
    """
    entry = None if engine is None else engine_for(engine, heads)
    if entry is None:
        _warn_of_conventions(heads)
    index = read_index(source)
    tensors = native_tensors(heads, source=index)
    old = set(_mtp_keys(heads, index))
    knows_ties = engine is None or (entry is not None and entry.knows_ties)
    if not knows_ties and LM_HEAD not in index.files:
        weight = heads.target.lm_head_weight.detach()
        tensors[LM_HEAD] = weight.to("cpu", _exact_dtype(weight)).contiguous().clone()
    config = exported_config(heads, source, tensors)
    if entry is not None:
        config = {**entry.config, **config}
    _make_folder(out)
    is_single = set(index.files.values()) == {SINGLE_FILE}
    # A file called model.safetensors would be taken for the whole model, index or not.
    renamed = {SINGLE_FILE: _FIRST_SHARD} if is_single else {}
    files: dict[str, str] = {}
    for file in sorted(set(index.files.values())):
        names = [name for name, holder in index.files.items() if holder == file and name not in old]
        if names:
            _place_shard(index, file, names, out / renamed.get(file, file))
        files |= dict.fromkeys(names, renamed.get(file, file))
    mtp_file = _MTP_SHARD if is_single else _EXTRA_SHARD
    write_tensors(tensors, out / mtp_file)
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
    shared = {"embed_tokens": target.embed_weight, "lm_head": target.lm_head_weight}
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


def exported_config(heads: MTPHeads, source: Path, names: Collection[str]) -> dict[str, object]:
    """The source's configuration, changed where the exported tensors `names` need it."""
    path = source / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        text = config.get("text_config", config)
        quantised = [part for part in (config, text) if part.get(_QUANTISATION)]
    except (OSError, ValueError, AttributeError) as fault:
        raise IntegrityError(
            f"{path} must be a model's configuration in JSON, got {fault}."
        ) from fault
    count_field = heads.target.family.native.count_field
    if count_field is not None:
        text[count_field] = heads.spec.num_mtp_modules
    if LM_HEAD in names:
        text[_TIED] = config[_TIED] = False
    if (source / _SEPARATE_FILE).exists() and not quantised:
        raise ConfigError(
            f"{path} must hold the quantization_config of its model, which is in {_SEPARATE_FILE} "
            "alone, where the bfloat16 modules cannot be marked; export with --model set to the "
            "unquantised checkpoint."
        )
    if quantised:  # in both places at most one and the same
        _leave_out(quantised[0][_QUANTISATION], _modules(names), path=path)
    return config


def _leave_out(quantisation: dict[str, object], modules: list[str], *, path: Path) -> None:
    """Add modules to the list of those that are not quantised."""
    method = str(quantisation.get("quant_method"))
    if method not in _LISTS:
        raise ConfigError(
            f"a target of {path} must be quantised by one of {sorted(_LISTS)} or not at all, got "
            f"quant_method {method!r}, where the bfloat16 modules cannot be marked; export with "
            "--model set to the unquantised checkpoint."
        )
    keys = {_LISTS[method]} | ({_OTHER_NAME} & quantisation.keys())
    for key in keys:
        listed = quantisation.get(key) or []
        if not isinstance(listed, list):
            raise IntegrityError(f"{path}: {key} must be a list of module names, got {listed!r}.")
        quantisation[key] = listed + [name for name in modules if name not in listed]


def _modules(names: Iterable[str]) -> list[str]:
    """Modules of tensors; experts also as the one module that transformers makes of them."""
    modules = {name.rpartition(".")[0] for name in names}
    stacks = {
        name.partition(".experts.")[0] + ".experts" for name in modules if ".experts." in name
    }
    return sorted(modules | stacks)


def _warn_of_conventions(heads: MTPHeads) -> None:
    """Published names do not say how modules are run: whoever loads them goes by the family."""
    family, spec = heads.target.family, heads.spec
    differing = [
        f"{name}={getattr(spec, name)} (the family's: {getattr(family, name)})"
        for name in CONVENTIONS
        if getattr(spec, name) != getattr(family, name)
    ]
    if differing:
        logger.warning(
            "published names cannot say that these heads have %s: what loads them by family runs "
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


def _place_shard(index: TensorIndex, file: str, names: list[str], path: Path) -> None:
    source = (index.folder / file).resolve()
    if not source.is_file():
        raise IntegrityError(f"{index.folder} must hold {file}, which its index names.")
    with safe_open(source, framework="pt") as shard:
        is_whole = set(shard.keys()) == set(names)
    if is_whole:
        _link(source, path)
    else:
        write_tensors(index.read(names), path)


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
        raise ConfigError(
            f"out must be a missing or empty folder, {str(out)!r} is not empty; name another one."
        )
    out.mkdir(parents=True, exist_ok=True)
