"""Device and dtype of a model, from the words of the configuration."""

import torch

from mtp_research.errors import ConfigError, EnvironmentFault

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU when there is one.

    Raises:
        EnvironmentFault: `cuda` was asked for and is not usable.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFault(
            "model.device=cuda needs a CUDA GPU, none is visible; set model.device=cpu."
        )
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ConfigError: `dtype` is neither `auto` nor a key of `DTYPES`.
    """
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(
            f"model.dtype must be one of {sorted(['auto', *DTYPES])}, got {dtype!r}; "
            "set model.dtype=auto."
        )
    return DTYPES[dtype]
