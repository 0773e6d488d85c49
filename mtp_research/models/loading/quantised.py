"""Checkpoints that are stored quantised: what their own `quantization_config` says, and no more.

    fp8                   FP8 matrices with a scale per block
    compressed-tensors    FP8 matrices with a scale per output row, tensor or block
    bitsandbytes          4 or 8 bits by the package, which must be installed: kept as stored

FP8 is de-quantised while it is read, unless `model.keep_fp8` asks for it (`kept_fp8`). De-quantised
weights have the dtype of the configuration, so that heads, hashes and kernels see an ordinary
model. Every other method is refused by name. Configurations do not say reliably which MTP tensors
are quantised; `dequantise` decides by the scale that lies beside a tensor. Scales of activations
are not read: rows are multiplied as they are.

Letters: O output rows, C input columns.
Source: DeepSeek-V3's FP8 weights, `weight = stored * weight_scale_inv` by blocks of 128 x 128;
`weight = stored * weight_scale` of compressed-tensors, format `float-quantized`.
"""

import copy
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError

_METHODS = ("bitsandbytes", "compressed-tensors", "fp8")
FP8_METHODS = ("compressed-tensors", "fp8")
_FP8_NAMES = ("F8_E4M3", "F8_E5M2")  # in the headers of files
_NUM_LISTED = 3


def quantisation_of(config: PreTrainedConfig) -> str | None:
    """How a checkpoint is stored, by its config; None for plain tensors, others are refused."""
    settings = _settings(config)
    if settings is None:
        return None
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise ConfigError(
            f"model.path must hold plain tensors or be quantised by one of {sorted(_METHODS)}, got "
            f"{method}; set model.path to the unquantised checkpoint."
        )
    if method == "compressed-tensors" and _weights_of(settings).get("type") != "float":
        raise ConfigError(
            "model.path must hold plain tensors, or FP8 where compressed-tensors wrote it, got "
            f"format {settings.get('format')}; set model.path to the unquantised checkpoint."
        )
    if method == "bitsandbytes" and importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            "model.path holds a checkpoint quantised by bitsandbytes, which is not installed; pip "
            "install bitsandbytes, or set model.path to the unquantised checkpoint."
        )
    return method


@contextmanager
def dequantising(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Read block-scaled matrices as plain ones inside the block; gives the config to load with.

    Up to 5.23 transformers takes a matrix's size over the number of its scales for the block size.
    Where the last block is cut off (576 rows have 5 scales of 128) this fails or, where it divides
    (192 rows, 2 scales), spreads the scales wrongly. Such matrices are handed over padded.
    """
    settings = _settings(config)
    if settings is None or quantisation_of(config) != "fp8":
        yield config
        return
    block = cast("list[int] | None", settings.get("weight_block_size"))
    original = Fp8Dequantize._dequantize_one

    def dequantise_one(
        self: Fp8Dequantize, stored: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        rows, columns = stored.shape[-2:]
        if block is None or scales.shape[-2:] != (-(-rows // block[0]), -(-columns // block[1])):
            return original(self, stored, scales, output_dtype)  # packed otherwise
        padding = (0, -columns % block[1], 0, -rows % block[0])
        padded = torch.nn.functional.pad(stored.float(), padding)
        dtype = scales.dtype if output_dtype is None else output_dtype
        return original(self, padded, scales, dtype)[..., :rows, :columns].contiguous()

    Fp8Dequantize._dequantize_one = dequantise_one
    try:
        config.quantization_config = {**settings, "dequantize": True}
        yield config
    finally:
        Fp8Dequantize._dequantize_one = original


def require_scales(folder: Path) -> None:
    """Refuse (`IntegrityError`) FP8 tensors without a scale, which would be read as plain numbers.

    Only the headers of the files in `folder` are read.
    """
    names: set[str] = set()
    stored: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118, it is no mapping
                names.add(name)
                if shard.get_slice(name).get_dtype() in _FP8_NAMES:
                    stored.add(name)
    lacking = sorted(
        name
        for name in stored
        if not {*(name + suffix for suffix in SCALES), f"{name.removesuffix('weight')}scale"}
        & names
    )
    if lacking:
        raise IntegrityError(
            f"{folder} must hold a scale for each tensor stored as FP8; {len(lacking)} have "
            f"no scale {lacking[:_NUM_LISTED]}; fetch the model again."
        )


def _settings(config: PreTrainedConfig) -> dict[str, object] | None:
    for part in (config, config.get_text_config()):
        if settings := getattr(part, "quantization_config", None):
            return settings if isinstance(settings, dict) else settings.to_dict()
    return None


SCALES = ("_scale_inv", "_scale")  # behind the name of the tensor that they belong to
_BLOCK = (128, 128)
_MATRIX_DIMS = 2
_FP8_BITS = 8
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def block_size(config: PreTrainedConfig) -> tuple[int, int]:
    """Rows and columns of the blocks of a checkpoint."""
    settings = _settings(config) or {}
    stored = settings.get("weight_block_size") or _weights_of(settings).get("block_structure")
    rows, columns = cast("list[int]", stored or _BLOCK)
    return rows, columns


def scales_rows(config: PreTrainedConfig) -> bool:
    """Whether the checkpoint says of its scales that there is one per output row or tensor."""
    return _weights_of(_settings(config) or {}).get("strategy") in ("channel", "tensor")


def unquantised(config: PreTrainedConfig) -> list[str]:
    """Layers that are stored as plain numbers: names, parts of names or, behind `re:`, patterns."""
    settings = _settings(config) or {}
    found = (
        settings.get(field) for field in ("modules_to_not_convert", "ignored_layers", "ignore")
    )
    return cast("list[str]", next(filter(None, found), []))


def _weights_of(settings: Mapping[str, object]) -> Mapping[str, object]:
    """What compressed-tensors says of the weights of its one group; nothing for other methods."""
    groups = cast("Mapping[str, Mapping[str, Mapping]]", settings.get("config_groups") or {})
    found = [group.get("weights") or {} for group in groups.values()]
    is_fp8 = len(found) == 1 and found[0].get("num_bits") == _FP8_BITS
    return found[0] if is_fp8 else {}


def plain_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy that says nothing of quantisation, to load plain numbers with."""
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        vars(part).pop("quantization_config", None)
    return config


def without_scales(names: Iterable[str]) -> set[str]:
    """Names less those of scales whose tensor is among them."""
    names = set(names)
    return names - {name + suffix for name in names for suffix in SCALES}


def dequantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors without scales, quantised ones as float32; others are handed back as they are."""
    plain = {}
    for name in without_scales(tensors):
        tensor = tensors[name]
        scales = [tensors[name + suffix] for suffix in SCALES if name + suffix in tensors]
        if not scales and tensor.dtype in _FP8:
            raise IntegrityError(f"{name} is stored as {tensor.dtype} and has no scale beside it.")
        plain[name] = _scaled(name, tensor, scales[0]) if scales else tensor
    return plain


def _scaled(name: str, stored: Tensor, scale: Tensor) -> Tensor:
    """`[O, C]` weights times a scale per tensor, per row or per block."""
    require_fitting(name, stored.shape, scale, block=_BLOCK)
    if scale.numel() == 1 or scale.shape == (stored.shape[0], 1):
        return stored.float() * scale.float()
    rows, columns = stored.shape
    full = scale.float().repeat_interleave(_BLOCK[0], dim=0)[:rows]
    return stored.float() * full.repeat_interleave(_BLOCK[1], dim=1)[:, :columns]


def require_fitting(
    name: str, shape: Sequence[int], scale: Tensor, *, block: tuple[int, int]
) -> None:
    """Refuse (`IntegrityError`) scales that are none per tensor, per row or per block."""
    if scale.numel() == 1 or scale.shape == (shape[0], 1):
        return
    num_blocks = [-(-size // edge) for size, edge in zip(shape, block, strict=False)]
    if len(shape) != _MATRIX_DIMS or list(scale.shape) != num_blocks:
        raise IntegrityError(
            f"{name} {list(shape)} needs a scale per tensor, row or {block[0]} x {block[1]} "
            f"block {num_blocks}, got {list(scale.shape)}."
        )
