"""How many pages the pool gets: enough for every request, as far as the device's memory goes.

Decoders that live side by side are planned once, so that they get equal pools.

Letters: L cache layers.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.draft.drafter import Drafter
from mtp_research.models.family import LayerGeometry
from mtp_research.models.rank_parts import whole_of
from mtp_research.models.target import Target
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError

NUM_SPARE_BLOCKS = 1  # the last block belongs to the padding of captured batches

_GIB = 1 << 30
_MEMORY_FILE = Path("/proc/meminfo")

logger = logging.getLogger(__name__)


class PoolNeeds(NamedTuple):
    """What a decoder wants of its pool."""

    block_bytes: int  # bytes of a block over all layers
    num_enough: int  # blocks that all requests together can own, the spare one included
    num_least: int  # blocks that the longest request can own, likewise


def pool_needs(
    target: Target,
    drafter: Drafter | None,
    *,
    plan: DraftPlan,
    engine: EngineConfig,
    max_model_len: int,
) -> PoolNeeds:
    """What a decoder with these settings wants of its pool."""
    num_least = blocks_per_request(drafter, plan=plan, engine=engine, max_model_len=max_model_len)
    layers = pool_layers(target, drafter)
    return PoolNeeds(
        block_bytes=bytes_per_block(layers, block_size=engine.block_size, dtype=target.dtype),
        num_enough=engine.max_num_requests * num_least + NUM_SPARE_BLOCKS,
        num_least=num_least + NUM_SPARE_BLOCKS,
    )


def pool_layers(target: Target, drafter: Drafter | None) -> list[LayerGeometry]:
    """The L layers of a pool: the target's, then the drafter's."""
    num_draft_layers = drafter.num_kv_layers if drafter is not None else 0
    drafted = [target.draft_kv_layer] * num_draft_layers if num_draft_layers else []
    return [*target.kv_layers, *drafted]


def blocks_per_request(
    drafter: Drafter | None, *, plan: DraftPlan, engine: EngineConfig, max_model_len: int
) -> int:
    """Blocks that the longest request can own."""
    num_slots = plan.num_slots_needed(max_model_len, int(engine.deferred_output))
    num_slots += drafter.num_extra_slots if drafter is not None else 0
    return -(-num_slots // engine.block_size)


def bytes_per_block(layers: Sequence[LayerGeometry], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page of all L layers; latent layers store keys and values once."""
    widths = [
        layer.num_kv_heads * (layer.key_dim + (layer.value_dim if layer.kind == "heads" else 0))
        for layer in layers
    ]
    return sum(widths) * block_size * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Memory of the device that is not in use, PyTorch's own cache included; None if unknown.

    On a CPU half of what Linux could give without swapping: the machine is not ours alone.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMORY_FILE.read_text(), re.MULTILINE)
    except OSError:  # another system
        return None
    return None if found is None else int(found[1]) * 1024 // 2


def free_for_pool(target: Target) -> int | None:
    """As `free_bytes`; of ranks that split the target the least, so that they schedule alike."""
    free = free_bytes(target.device)
    if target.parts is None or free is None or target.device.type == "meta":
        return free
    own = torch.tensor([free], device=target.device)
    return int(whole_of(own, target.parts).min())


def plan_side_by_side(
    needs: Sequence[PoolNeeds], *, free: int | None, memory_fraction: float
) -> int | None:
    """Blocks that each of several decoders gets if all live at once; None where memory is no limit.

    Planned one after the other, each would take its fraction of what the ones before it left.
    Before any of them is built `free` bytes are free.
    """
    if free is None:
        return None
    together = PoolNeeds(
        block_bytes=sum(one.block_bytes for one in needs),
        num_enough=max(one.num_enough for one in needs),
        num_least=max(one.num_least for one in needs),
    )
    return plan_num_blocks(together, asked=None, free=free, memory_fraction=memory_fraction)


def plan_num_blocks(
    needs: PoolNeeds, *, asked: int | None, free: int | None, memory_fraction: float
) -> int:
    """Blocks of the pool.

    For example 1000 blocks of 1 MiB would be enough, 800 MiB are free and a fraction of 0.5 may be
    taken: the pool gets 400 blocks, and requests that do not fit wait.

    `asked` is `engine.num_blocks`, taken as it is if there is room; None means what is enough.
    `free` are bytes of device memory, None where that is no limit; the pool may take
    `memory_fraction` of them, the rest is left to activations, graphs and compilation.
    """
    block_bytes = needs.block_bytes
    wanted = needs.num_enough if asked is None else asked
    if free is None:
        return wanted
    num_fitting = int(free * memory_fraction) // max(block_bytes, 1)
    least = needs.num_least if asked is None else asked
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
