"""How many pages the pool gets: enough for every request, as far as the device's memory goes.

Letters: L cache layers.
"""

import logging
from collections.abc import Sequence

import torch

from mtp_research.errors import ConfigError
from mtp_research.models.geometry import LayerGeometry

_GIB = 1 << 30

logger = logging.getLogger(__name__)


def bytes_per_block(layers: Sequence[LayerGeometry], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of all L layers; latent layers store keys and values once."""
    widths = [
        layer.num_kv_heads * (layer.key_dim + (layer.value_dim if layer.kind == "heads" else 0))
        for layer in layers
    ]
    return sum(widths) * block_size * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Device memory that is not in use, PyTorch's own cache included; None on a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def plan_num_blocks(
    *,
    asked: int | None,
    num_enough: int,
    num_least: int,
    block_bytes: int,
    free: int | None,
    memory_fraction: float,
) -> int:
    """Blocks of the pool.

    For example 1000 blocks of 1 MiB would be enough, 800 MiB are free and a fraction of 0.5 may be
    taken: the pool gets 400 blocks, and requests that do not fit wait.

    Args:
        asked: `engine.num_blocks`, taken as it is if there is room; None for what is enough.
        num_enough: blocks that all requests together can own.
        num_least: blocks that the longest request can own.
        block_bytes: bytes of a block over all layers.
        free: bytes of device memory that are free; None where that is no limit.
        memory_fraction: share of the free bytes that the pool may take; the rest is left to
            activations, graphs and compilation.

    Raises:
        ConfigError: there is no room for the blocks asked for, or not for one longest request;
            says what is needed and what there is.
    """
    wanted = num_enough if asked is None else asked
    if free is None:
        return wanted
    num_fitting = int(free * memory_fraction) // max(block_bytes, 1)
    least = num_least if asked is None else asked
    if least > num_fitting:
        fix = "lower engine.max_model_len" if asked is None else "lower engine.num_blocks"
        raise ConfigError(
            f"the KV pool needs at least {least} blocks = {least * block_bytes / _GIB:.2f} GiB, "
            f"got {num_fitting} = {num_fitting * block_bytes / _GIB:.2f} GiB available "
            f"({free / _GIB:.2f} GiB free x engine.memory_fraction={memory_fraction:g}); {fix}, or "
            "raise engine.memory_fraction."
        )
    num_blocks = min(wanted, num_fitting)
    level = logging.INFO if num_blocks == wanted else logging.WARNING
    logger.log(
        level,
        "KV pool: %d of %d blocks that would be enough, %.2f GiB; %.2f GiB of %.2f GiB stay free",
        num_blocks,
        wanted,
        num_blocks * block_bytes / _GIB,
        (free - num_blocks * block_bytes) / _GIB,
        free / _GIB,
    )
    return num_blocks
