"""Host values onto the device without waiting for it; the way back is `pending`."""

import torch
from torch import Tensor


def to_device(values: list, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values, copied without waiting for the device to finish its work."""
    return copy_to_device(torch.tensor(values, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, copied likewise: only from pinned memory does a copy not wait."""
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)
