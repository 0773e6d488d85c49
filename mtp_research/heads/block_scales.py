"""De-quantisation of checkpoint tensors, decided per tensor by the scale that lies beside it.

Configurations do not say reliably which MTP tensors are quantised; the files do.

Letters: O output rows, C input columns.
Source: DeepSeek-V3's FP8 weights: 128 x 128 blocks, `weight = stored * weight_scale_inv`.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mtp_research.errors import IntegrityError

_BLOCK = 128
_SCALES = ("_scale_inv", "_scale")
_MATRIX_DIMS = 2
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def without_scales(names: Iterable[str]) -> set[str]:
    """Names less those of scales whose tensor is among them."""
    names = set(names)
    return names - {name + suffix for name in names for suffix in _SCALES}


def dequantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without scales, quantised ones as float32; others are handed back as they are.

    Raises:
        IntegrityError: a quantised tensor without a scale, or a scale that does not fit.
    """
    plain = {}
    for name in without_scales(tensors):
        tensor = tensors[name]
        scales = [tensors[name + suffix] for suffix in _SCALES if name + suffix in tensors]
        if not scales and tensor.dtype in _FP8:
            raise IntegrityError(f"{name} is stored as {tensor.dtype} and has no scale beside it.")
        plain[name] = _scaled(name, tensor, scales[0]) if scales else tensor
    return plain


def _scaled(name: str, stored: Tensor, scale: Tensor) -> Tensor:
    """`[O, C]` weights times a scale per tensor, per row or per block."""
    if scale.numel() == 1 or scale.shape == (stored.shape[0], 1):
        return stored.float() * scale.float()
    num_blocks = tuple(-(-size // _BLOCK) for size in stored.shape)
    if stored.dim() != _MATRIX_DIMS or tuple(scale.shape) != num_blocks:
        raise IntegrityError(
            f"{name} {list(stored.shape)} needs a scale per tensor, row or {_BLOCK} x {_BLOCK} "
            f"block {list(num_blocks)}, got {list(scale.shape)}."
        )
    rows, columns = stored.shape
    full = scale.float().repeat_interleave(_BLOCK, dim=0)[:rows]
    return stored.float() * full.repeat_interleave(_BLOCK, dim=1)[:, :columns]
