"""Tensors that are made as they are read, and which of them stay FP8 (`model.keep_fp8`).

With FP8 kept, the library's loader is handed tensors by the model's names: FP8 matrices as they are
stored, float32 scales, and the matrices of an expert layer stacked when they are asked for. So no
plain copy of the model exists at any time. What a checkpoint stores as FP8 and a layer cannot hold
so (`fp8_layers.keepable`) is de-quantised as it always is.

    model.layers.3.mlp.experts.7.gate_proj.weight            experts.gate_up_proj[7, :I]
    model.layers.3.mlp.experts.7.gate_proj.weight_scale_inv  experts.gate_up_proj_scale[7, :I / B]

Letters: E experts, I inner size of an expert, O output rows, C input columns, B edge of a
scale's block.
Source: names of DeepSeek-V3's and GLM-4.5's FP8 releases.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple, cast

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from mtp_research.kernels.products.scaled_weights import FP8, scale_shape
from mtp_research.models.experts import FP8_PROJECTIONS
from mtp_research.models.fp8_layers import keepable
from mtp_research.models.loading.lazy_tensors import (
    DEFAULT_STD,
    Form,
    Index,
    LazyTensor,
    RandomTensor,
    open_tensors,
    plain_tensors,
    random_tensors,
    scale_beside,
)
from mtp_research.models.loading.quantised import block_size, scales_rows, unquantised
from mtp_research.models.loading.source import split_hub_id
from mtp_research.runtime.errors import ConfigError

_NAME = "F8_E4M3"  # in the headers of files
_PIECES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_RANDOM_STD = 128.0  # of drawn FP8 numbers, the largest of which is 448
_LEAST_BLOCK = 16


class Kept(NamedTuple):
    """What the loader is handed, and the layers that it belongs to."""

    tensors: dict[str, LazyTensor]  # of the whole model
    blocks: dict[str, int]  # edge of the scales' blocks, 0 for a scale per row, by name of a layer


def made_tensors(
    path: str,
    config: PreTrainedConfig,
    model: PreTrainedModel,
    *,
    weights: str,
    keep_fp8: bool,
    form: Form,
) -> Kept:
    """What the loader is handed where the library cannot read the files at `path`, or not so.

    `model` is one of `config` on the meta device; the others are fields of `load_weights.Placing`.
    """
    if weights == "random":
        drawn = random_tensors(model, form=form)
        return random_fp8(drawn, model, config, form=form) if keep_fp8 else Kept(drawn, {})
    hub_id = split_hub_id(path)
    if not Path(path).is_dir():
        files = ["*.json", "*.safetensors"]
        path = snapshot_download(hub_id.name, revision=hub_id.revision, allow_patterns=files)
    stored = open_tensors(Path(path))
    plain = plain_tensors(stored, block=block_size(config), form=form)
    return stored_fp8(stored, plain, model, config, form=form) if keep_fp8 else Kept(plain, {})


class _Matrix(NamedTuple):
    """An FP8 matrix of a checkpoint."""

    names: tuple[str, ...]  # of the tensors in the files
    stored: LazyTensor  # [O, C], or [E, O, C]
    scale: Tensor  # float32 [O / B, C / B] or [O, 1], likewise
    block: int  # B


class StackedTensor:
    """FP8 matrices of all experts, `[E, O, C]`, whose rows are those of several stored ones."""

    def __init__(self, parts: Sequence[Sequence[LazyTensor]], *, device: torch.device) -> None:
        self._parts = parts
        self._device = device

    def get_shape(self) -> list[int]:
        """Size of the whole tensor."""
        pieces = [piece.get_shape() for piece in self._parts[0]]
        return [len(self._parts), sum(shape[0] for shape in pieces), pieces[0][1]]

    def get_dtype(self) -> str:
        """Its dtype as safetensors calls it."""
        return _NAME

    def __getitem__(self, index: Index) -> Tensor:
        """The part; ranks share whole experts, and those alone are read."""
        first, *inside = (slice(None),) if isinstance(index, EllipsisType) else index
        parts, (_, *shape) = self._parts[first], self.get_shape()
        kept = torch.empty(len(parts), *shape, dtype=FP8, device=self._device)
        for expert, pieces in zip(kept, parts, strict=True):
            sizes = [piece.get_shape()[0] for piece in pieces]
            for rows, piece in zip(expert.split(sizes), pieces, strict=True):
                rows.copy_(piece[...])
        return kept[(slice(None), *inside)]


def stored_fp8(
    stored: Mapping[str, LazyTensor],
    plain: Mapping[str, LazyTensor],
    model: PreTrainedModel,
    config: PreTrainedConfig,
    *,
    form: Form,
) -> Kept:
    """`plain` tensors of the files, or those that are `stored` where a layer can hold them so."""
    others = dict(plain)
    block = square_block(config)
    tensors, blocks = dict[str, LazyTensor](), dict[str, int]()
    for layer, module in keepable(model):
        if isinstance(module, nn.Linear):
            found = {"weight": _matrix(f"{layer}.weight", stored, block=block)}
        else:
            num = len(module.get_parameter(FP8_PROJECTIONS[0]))
            found = {
                name: _stack(layer, name, stored, num=num, block=block, form=form)
                for name in FP8_PROJECTIONS
            }
        matrices = {name: matrix for name, matrix in found.items() if matrix is not None}
        if len(matrices) < len(found) or len({matrix.block for matrix in matrices.values()}) > 1:
            continue
        for name, matrix in matrices.items():
            for taken in matrix.names:
                del others[taken]
            tensors[f"{layer}.{name}"] = matrix.stored
            tensors[f"{layer}.{name}_scale"] = cast(LazyTensor, matrix.scale)
            blocks[layer] = matrix.block
    if not blocks:
        raise ConfigError(
            "model.keep_fp8=true needs matrices of decoder layers that are stored as FP8 with "
            "scales, got none; set model.keep_fp8=false."
        )
    return Kept(others | tensors, blocks)


def random_fp8(
    drawn: Mapping[str, LazyTensor], model: PreTrainedModel, config: PreTrainedConfig, *, form: Form
) -> Kept:
    """`drawn` tensors, FP8 where a checkpoint of `config` stores FP8, by default in blocks."""
    tensors, blocks = dict(drawn), random_blocks(model, config)
    std = getattr(model.config.get_text_config(), "initializer_range", None) or DEFAULT_STD
    stored_form = Form(FP8, form.device)
    for layer, block in blocks.items():
        module = model.get_submodule(layer)
        is_linear = isinstance(module, nn.Linear)
        for name in ("weight",) if is_linear else FP8_PROJECTIONS:
            shape = tuple(module.get_parameter(name).shape)
            num_parts = 2 if name == "gate_up_proj" else 1
            full = f"{layer}.{name}"
            tensors[full] = RandomTensor(full, shape, std=_RANDOM_STD, form=stored_form)
            rows, columns = scale_shape(shape[-2] // num_parts, shape[-1], block=block)
            scale = torch.full((*shape[:-2], num_parts * rows, columns), std / _RANDOM_STD)
            tensors[f"{full}_scale"] = cast(LazyTensor, scale)
    return Kept(tensors, blocks)


def random_blocks(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, int]:
    """`Kept.blocks` of a checkpoint that is known by its config alone."""
    block, plain = square_block(config), unquantised(config)
    return {name: block for name, _ in keepable(model) if not _is_among(name, plain)}


def _is_among(layer: str, names: Sequence[str]) -> bool:
    return any(
        re.match(name[3:], layer) if name.startswith("re:") else f".{name}." in f".{layer}."
        for name in names
    )


def square_block(config: PreTrainedConfig) -> int:
    """Edge of the blocks of a checkpoint's scales; 0 for a scale per row."""
    if scales_rows(config):
        return 0
    rows, columns = block_size(config)
    if rows != columns or rows < _LEAST_BLOCK or rows & (rows - 1):
        raise ConfigError(
            f"model.keep_fp8=true needs scales of square blocks, powers of two from {_LEAST_BLOCK} "
            f"on, got {rows} x {columns}; set model.keep_fp8=false."
        )
    return rows


def _matrix(name: str, stored: Mapping[str, LazyTensor], *, block: int) -> _Matrix | None:
    """A stored matrix with its scale; None for one that is plain, missing or scaled otherwise."""
    if name not in stored or stored[name].get_dtype() != _NAME:
        return None
    scale = scale_beside(name, stored)
    rows, columns = stored[name].get_shape()
    if scale is None:
        return None
    if block and tuple(scale.shape) == scale_shape(rows, columns, block=block):
        return _Matrix((name,), stored[name], scale.float(), block)
    if scale.numel() not in (1, rows):
        return None
    return _Matrix((name,), stored[name], scale.float().reshape(-1, 1).expand(rows, 1).clone(), 0)


def _stack(
    layer: str,
    projection: str,
    stored: Mapping[str, LazyTensor],
    *,
    num: int,
    block: int,
    form: Form,
) -> _Matrix | None:
    """A projection of all `num` experts; None unless each matrix is FP8, and scaled alike."""
    pieces = _PIECES[projection]
    found = [
        [_matrix(f"{layer}.{expert}.{piece}.weight", stored, block=block) for piece in pieces]
        for expert in range(num)
    ]
    matrices = [matrix for row in found for matrix in row if matrix is not None]
    if len(matrices) < num * len(pieces) or len({matrix.block for matrix in matrices}) > 1:
        return None
    rows = list(zip(*[iter(matrices)] * len(pieces), strict=True))  # of each expert
    return _Matrix(
        tuple(name for matrix in matrices for name in matrix.names),
        StackedTensor([[matrix.stored for matrix in row] for row in rows], device=form.device),
        torch.stack([torch.cat([matrix.scale for matrix in row]) for row in rows]),
        matrices[0].block,
    )
