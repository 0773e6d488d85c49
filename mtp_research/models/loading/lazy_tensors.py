"""Tensors of a checkpoint that are made when a part of them is asked for: random ones, and FP8.

The library's loader indexes what it is handed with the slices that a rank keeps, one tensor after
the other. So a tensor that is whole nowhere costs the part that is asked for, and while it is made:

    random          one chunk of its numbers
    block-scaled    one row of its blocks

Letters: O output rows, C input columns.
"""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import NamedTuple, Protocol, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from mtp_research.models.loading.quantised import (
    SCALES,
    require_fitting,
    without_scales,
)
from mtp_research.models.loading.source import read_weight_map
from mtp_research.runtime.hash_bits import GOLDEN, mix, shift_right, signed

# Numbers that a thread draws at a time, on a CPU and on a GPU, where a chunk is some 20 launches; a
# number takes some 40 bytes meanwhile.
_CHUNK = 1 << 18
_GPU_CHUNK = 1 << 23
_MATRIX_DIMS = 2
DEFAULT_STD = 0.02  # of configs without an `initializer_range`
_RANDOM_BITS = 24  # the most that float32 holds

Index = EllipsisType | tuple[slice, ...]


class LazyTensor(Protocol):
    """What the loader reads: a `get_slice` of safetensors is one, too."""

    def get_shape(self) -> list[int]:
        """Size of the whole tensor."""
        ...

    def get_dtype(self) -> str:
        """Its dtype as safetensors calls it."""
        ...

    def __getitem__(self, index: Index) -> Tensor:
        """A part, in memory of its own; `...` is all of it."""
        ...


class Form(NamedTuple):
    """In what a tensor is handed over."""

    dtype: torch.dtype
    device: torch.device


class RandomTensor:
    """Uniform numbers of mean 0, each a function of the tensor's name and its place in the tensor.

    So ranks that keep parts hold what one process would, however the tensor is cut.
    """

    def __init__(self, name: str, shape: Sequence[int], *, std: float, form: Form) -> None:
        self._shape = list(shape)
        self._std = std
        self._form = form
        self._seed = _seed(name)

    def get_shape(self) -> list[int]:
        """Size of the whole tensor."""
        return self._shape

    def get_dtype(self) -> str:
        """Some floating dtype."""
        return "F32"

    def __getitem__(self, index: Index) -> Tensor:
        """The part, drawn chunk by chunk on the device where it stays."""
        ranges = _ranges(index, self._shape)
        part = torch.empty([len(one) for one in ranges], **self._form._asdict())
        if part.numel() == 0:
            return part
        *leading, columns = ranges
        rows = part.view(-1, len(columns))
        at_column = torch.arange(columns.start, columns.stop, device=part.device)
        chunk = _GPU_CHUNK if part.is_cuda else _CHUNK
        step = max(chunk // len(columns), 1)
        for first in range(0, len(rows), step):
            row = torch.arange(first, min(first + step, len(rows)), device=part.device)
            place = self._row_starts(row, leading)[:, None] + at_column
            rows[first : first + step] = self._numbers(place)
        return part

    def _row_starts(self, row: Tensor, leading: Sequence[range]) -> Tensor:
        """Where rows of the part begin in the flat whole tensor, by their number in the part."""
        start = torch.zeros_like(row)
        stride = self._shape[-1]
        for size, kept in zip(reversed(self._shape[:-1]), reversed(leading), strict=True):
            start += (row % len(kept) + kept.start) * stride
            row, stride = row // len(kept), stride * size
        return start

    def _numbers(self, place: Tensor) -> Tensor:
        bits = shift_right(mix(place * signed(GOLDEN) + self._seed), 64 - _RANDOM_BITS)
        # A uniform number in [0, 1) has a standard deviation of 1 / sqrt(12).
        return (bits.float() * 2.0**-_RANDOM_BITS - 0.5) * (self._std * math.sqrt(12))


def random_tensors(model: PreTrainedModel, *, form: Form) -> dict[str, LazyTensor]:
    """Weights for each name of `model`, which is on the meta device and whole.

    Matrices are random, with the config's `initializer_range`. What has one dimension (norms,
    biases, a router's correction) is small and drawn by the family's own rule, whole.
    """
    std = getattr(model.config.get_text_config(), "initializer_range", None) or DEFAULT_STD
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        if tensor.dim() >= _MATRIX_DIMS:
            tensors[name] = RandomTensor(name, tensor.shape, std=std, form=form)
        else:
            # The loader takes tensors for whole as well.
            tensors[name] = cast(LazyTensor, _drawn_by_rule(model, name))
    return tensors


def _drawn_by_rule(model: PreTrainedModel, name: str) -> Tensor:
    """A small tensor as the family's class draws it, in a copy of its module without matrices."""
    path, _, own_name = name.rpartition(".")
    module = copy.copy(model.get_submodule(path))
    for kind in ("_parameters", "_buffers"):
        vars(module)[kind] = {key: _shell(one) for key, one in vars(module)[kind].items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(_seed(name))
        model._init_weights(module)
    return cast(Tensor, getattr(module, own_name)).detach()


def _shell(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    shape = tensor.shape if tensor.dim() < _MATRIX_DIMS else (0,) * tensor.dim()
    empty = torch.zeros(shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty


class BlockScaledTensor:
    """A matrix `[O, C]` that is stored as FP8 with scales; parts are plain numbers."""

    def __init__(
        self, name: str, stored: LazyTensor, scale: Tensor, *, block: tuple[int, int], form: Form
    ) -> None:
        require_fitting(name, stored.get_shape(), scale, block=block)
        self._name = name
        self._stored = stored
        self._scale = scale.float()
        self._block = block
        self._form = form

    def get_shape(self) -> list[int]:
        """Size of the whole tensor."""
        return self._stored.get_shape()

    def get_dtype(self) -> str:
        """Some floating dtype: not that in which it is stored."""
        return "F32"

    def __getitem__(self, index: Index) -> Tensor:
        """The part, one row of blocks after the other."""
        rows, columns = _ranges(index, self.get_shape())
        part = torch.empty(len(rows), len(columns), **self._form._asdict())
        height, _ = self._block
        for top in range(rows.start // height * height, rows.stop, height):
            kept = range(max(top, rows.start), min(top + height, rows.stop))
            stored = self._stored[_slice_of(kept), _slice_of(columns)].to(part.device)
            scale = self._scale_of(kept, columns).to(part.device)
            part[kept.start - rows.start : kept.stop - rows.start] = stored.float() * scale
        return part

    def _scale_of(self, rows: range, columns: range) -> Tensor:
        """What rows of one block, in some columns, are multiplied by."""
        if self._scale.numel() == 1:
            return self._scale
        if self._scale.shape == (self.get_shape()[0], 1):
            return self._scale[_slice_of(rows)]
        height, width = self._block
        return self._scale[rows.start // height].repeat_interleave(width)[_slice_of(columns)]


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """The tensors in the files of `folder`, scales among them, as they are stored."""
    index = read_weight_map(folder)
    files = {path.name for path in folder.glob("*.safetensors")}
    stored: dict[str, LazyTensor] = {}
    for file in sorted(files if index is None else set(index.values())):
        shard = safe_open(folder / file, framework="pt")
        stored |= {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
    return stored


def plain_tensors(
    stored: Mapping[str, LazyTensor], *, block: tuple[int, int], form: Form
) -> dict[str, LazyTensor]:
    """What `open_tensors` gives; those with a scale beside them as plain numbers."""
    plain: dict[str, LazyTensor] = {}
    for name in without_scales(stored):
        plain[name] = stored[name]
        if (scale := scale_beside(name, stored)) is not None:
            plain[name] = BlockScaledTensor(name, stored[name], scale, block=block, form=form)
    return plain


def scale_beside(name: str, stored: Mapping[str, LazyTensor]) -> Tensor | None:
    """The scale of a stored tensor, read whole; None for one without."""
    found = (stored[name + suffix][...] for suffix in SCALES if name + suffix in stored)
    return next(found, None)


def _ranges(index: Index, shape: Sequence[int]) -> list[range]:
    slices = () if isinstance(index, EllipsisType) else index
    whole = [slice(None)] * (len(shape) - len(slices))
    return [range(*one.indices(size)) for one, size in zip([*slices, *whole], shape, strict=True)]


def _slice_of(places: range) -> slice:
    return slice(places.start, places.stop)


def _seed(name: str) -> int:
    return signed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
