"""Tiny checkpoints in published names, written without our names or our exporter.

The library saves a target under its release's names. The MTP tensors are made from those of a layer
of the same kind: renamed by the family's own rules, written out here once more by hand, and
randomised.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_research.models.target import Target

_NORMS = ("enorm.weight", "hnorm.weight")


@dataclass(frozen=True)
class Release:
    """How a family publishes its modules.

    Attributes:
        layer: layer of the tiny target whose tensors a module's block has.
        block: prefix of the block's tensors.
        second: layer and prefix of a block's second part, in families of one part a layer.
        wrapper: names of the two input norms, the projection and the last norm, None for families
            without one.
        renames: parts of block names that differ from the layer's.
        copies: names under which the target's embedding and lm_head are repeated.
        left_out: parts of the layer's names that no module has.
        norm_offset: what the family's norms add to their weights.
        num_modules: modules to write.
        own_head: name of the output head that each module has, None where they share the target's.
        count_field: config field with their number.
    """

    layer: int
    block: str
    wrapper: tuple[str, str, str, str | None]
    renames: dict[str, str] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    norm_offset: float = 0.0
    num_modules: int = 1
    second: tuple[int, str] | None = None
    own_head: str | None = None
    count_field: str | None = "num_nextn_predict_layers"


_LAST = "model.layers.{layer}."
_DEEPSEEK = Release(
    layer=1,
    block=_LAST,
    wrapper=(
        _LAST + "enorm",
        _LAST + "hnorm",
        _LAST + "eh_proj",
        _LAST + "shared_head.norm",
    ),
    copies={
        _LAST + "embed_tokens.weight": "embed_tokens",
        _LAST + "shared_head.head.weight": "lm_head",
    },
)
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
RELEASES: dict[str, Release] = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "longcat_flash": Release(
        layer=1,
        block="model.mtp.layers.0.",
        wrapper=(
            "model.mtp.layers.0.enorm.m",
            "model.mtp.layers.0.hnorm.m",
            "model.mtp.layers.0.eh_proj",
            "model.mtp.norm",
        ),
        renames={
            "self_attn.0.": "self_attn.",
            "layernorm.0.": "layernorm.",
            "mlps.0.": "transformer_layer.mlp.",
        },
        copies={"model.mtp.embed_tokens.weight": "embed_tokens"},
        left_out=(".mlp.", "mlps.1.", "self_attn.1.", "norm.1."),
    ),
    "mimo": Release(
        layer=1,
        block="model.mtp_layers.{module}.",
        wrapper=tuple(
            "model.mtp_layers.{module}." + name
            for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),
    ),
    "mimo_v2": Release(
        layer=1,
        block="model.mtp.layers.{module}.",
        wrapper=tuple(
            "model.mtp.layers.{module}." + name
            for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")
        ),
        renames={"post_attention_layernorm": "pre_mlp_layernorm"},
        num_modules=3,
        count_field=None,
    ),
    "ernie4_5_moe": Release(
        layer=0,
        block="model.mtp_block.{module}.",
        wrapper=(
            "model.mtp_emb_norm.{module}",
            "model.mtp_hidden_norm.{module}",
            "model.mtp_linear_proj.{module}",
            None,
        ),
    ),
    "exaone_moe": Release(layer=0, block="mtp.layers.0.", wrapper=_QWEN),
    "hy_v3": Release(
        layer=1,
        block=_LAST,
        wrapper=(_LAST + "enorm", _LAST + "hnorm", _LAST + "eh_proj", _LAST + "final_layernorm"),
    ),
    "kimi_k2": _DEEPSEEK,
    "nemotron_h": Release(
        layer=2,
        block="mtp.layers.0.",
        second=(1, "mtp.layers.1."),
        wrapper=(
            "mtp.layers.0.enorm",
            "mtp.layers.0.hnorm",
            "mtp.layers.0.eh_proj",
            "mtp.layers.1.final_layernorm",
        ),
    ),
    "step3p5": Release(
        layer=1,
        block=_LAST,
        wrapper=(
            _LAST + "enorm",
            _LAST + "hnorm",
            _LAST + "eh_proj",
            _LAST + "transformer.shared_head.norm",
        ),
        own_head=_LAST + "transformer.shared_head.output",
        norm_offset=1.0,
        num_modules=3,
    ),
    "gemma3": Release(
        layer=1, block="mtp.layers.0.", wrapper=_QWEN, norm_offset=1.0, count_field=None
    ),
    "qwen3": Release(layer=1, block="mtp.layers.0.", wrapper=_QWEN, count_field=None),
    "qwen3_5": Release(
        layer=1,
        block="mtp.layers.0.",
        wrapper=_QWEN,
        norm_offset=1.0,
        count_field="mtp_num_hidden_layers",
    ),
    "qwen3_next": Release(
        layer=1, block="mtp.layers.0.", wrapper=_QWEN, norm_offset=1.0, count_field=None
    ),
}


def write_release(
    target: Target, folder: Path, *, dtype: torch.dtype = torch.bfloat16, num_modules: int = 0
) -> dict[str, Tensor]:
    """Write target and modules as a sharded checkpoint; returns the MTP tensors.

    Args:
        target: tiny target, whose weights become bfloat16 numbers.
        folder: destination.
        dtype: of the MTP matrices.
        num_modules: modules to write, 0 for the release's usual number.
    """
    release = RELEASES[target.family_name]
    num_modules = num_modules or release.num_modules
    for parameter in target.model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    target.model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    tensors = mtp_tensors(target, saved, num_modules=num_modules, dtype=dtype)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file(tensors, folder / "model-00002-of-00002.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(saved, "model-00001-of-00002.safetensors")
    files |= dict.fromkeys(tensors, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    if release.count_field is not None:
        change_config(folder, {release.count_field: num_modules})
    if target.family.loads_as is not None:  # saved under the type that loads it
        change_config(folder, {"model_type": target.family.model_types[0]})
    return tensors


def mtp_tensors(
    target: Target, saved: dict[str, Tensor], *, num_modules: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Random MTP tensors by published name."""
    release = RELEASES[target.family_name]
    size, num_layers = target.config.hidden_size, target.config.num_hidden_layers
    tensors: dict[str, Tensor] = {}
    for module in range(num_modules):
        numbers = {"module": module, "layer": num_layers + module}
        blocks = [(release.layer, release.block)]
        blocks += [] if release.second is None else [release.second]
        for layer, block in blocks:
            for own, tensor in _layer_tensors(saved, layer, left_out=release.left_out).items():
                for old, new in release.renames.items():
                    own = own.replace(old, new)
                tensors[block.format(**numbers) + own] = torch.empty_like(tensor)
        *norms, projection, last = release.wrapper
        for name in (*norms, last):
            if name is not None:
                tensors[name.format(**numbers) + ".weight"] = torch.empty(size)
        tensors[projection.format(**numbers) + ".weight"] = torch.empty(size, 2 * size)
        if release.own_head is not None:
            shape = (target.config.vocab_size, size)
            tensors[release.own_head.format(**numbers) + ".weight"] = torch.empty(shape)
        shared = {"embed_tokens": target.embed_tokens.weight, "lm_head": target.lm_head_weight}
        for name, original in release.copies.items():
            tensors[name.format(**numbers)] = shared[original].detach()
    _fill(tensors, dtype=dtype, norm_offset=release.norm_offset)
    return tensors


def _fill(tensors: dict[str, Tensor], *, dtype: torch.dtype, norm_offset: float) -> None:
    """Random values in place; copies of the target's tensors keep theirs."""
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "shared_head.head.weight")):
            tensors[name] = tensor.to(dtype).clone()
            continue
        noise = torch.randn(tensor.shape, generator=generator) * 0.15
        is_correction = name.endswith(("correction_bias", "expert_bias"))
        is_norm = "norm" in name
        tensors[name] = (noise + 1.0 - norm_offset if is_norm else noise).to(
            torch.float32 if is_correction else dtype
        )


def _layer_tensors(
    saved: dict[str, Tensor], layer: int, *, left_out: tuple[str, ...]
) -> dict[str, Tensor]:
    """Tensors of a layer by their names in it."""
    pattern = re.compile(rf"(?:model|backbone)\.layers\.{layer}\.(.+)")
    found = {name: pattern.fullmatch(name) for name in saved}
    return {
        match[1]: saved[name]
        for name, match in found.items()
        if match and not any(part in name for part in left_out)
    }


def change_config(folder: Path, changes: dict[str, object]) -> None:
    """Set fields of `config.json`."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_mtp_file(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write other MTP tensors, with an index that names them."""
    path = folder / "model.safetensors.index.json"
    file = "model-00002-of-00002.safetensors"
    files = json.loads(path.read_text())["weight_map"]
    files = {name: holder for name, holder in files.items() if holder != file}
    path.write_text(
        json.dumps({"metadata": {}, "weight_map": files | dict.fromkeys(tensors, file)})
    )
    save_file(tensors, folder / file, metadata={"format": "pt"})
