"""Whether a training of heads fits its GPUs: the plan's figures, asked before anything is loaded.

`mtp plan` prints them for GPUs that are not at hand; `train.py` refuses a run whose target,
modules and optimizer alone are larger than the GPU that it runs on, and names what would fit.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mtp_research.bench.planned import TrainMemory, training_memory
from mtp_research.bench.shapes import sizes_only
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import HeadConfig, TrainerConfig
from mtp_research.heads.init import freeze_parts
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.loading.placement import num_ranks, resolve_device, resolve_dtype
from mtp_research.models.loading.quantised import FP8_METHODS, quantisation_of
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.optim import add_lora
from mtp_research.training.setup import depths_of, needs_layers

logger = logging.getLogger(__name__)
GIB = 1 << 30
NUM_GPUS = (1, 2, 4, 8)


class Way(NamedTuple):
    """Another way to run a training, and what it takes of each GPU."""

    words: str
    num_gpus: int
    needed: float  # bytes


def require_memory(config: TrainConfig) -> None:
    """Refuse (`ConfigError`) a training of heads that this rank's GPU cannot hold; reads no weight.

    On a CPU, and for targets that `model.device_map` spreads, there is nothing to compare with.
    """
    device = resolve_device(config.model.device)
    if device.type == "cuda" and config.model.device_map == "none":
        memory = torch.cuda.get_device_properties(device).total_memory
        check_memory(config, num_gpus=num_ranks(), memory=memory)


def check_memory(config: TrainConfig, *, num_gpus: int, memory: int) -> None:
    """As `require_memory`, for `num_gpus` GPUs of `memory` bytes each."""
    precision = config.trainer.precision
    name = config.model.dtype if precision == "auto" else precision
    sizes = sizes_only(config.model, dtype=resolve_dtype(name, torch.device("cuda")))
    if quantisation_of(sizes.target.model.config) not in (None, *FP8_METHODS):
        return  # packed numbers, whose bytes are not known here
    heads = planned_heads(sizes.target, head=config.head)
    own = memory_of(config, heads, num_gpus=num_gpus)
    place = f"{num_gpus} GPU{'s' * (num_gpus > 1)} of {memory / GIB:.1f} GiB"
    shown = [f"{part} {size / GIB:.1f}" for part, size in own._asdict().items()]
    if own.at_rest > memory:
        ways = list(other_ways(config, heads, num_gpus=num_gpus, memory=memory))
        raise ConfigError(
            f"trainer.parallel={config.trainer.parallel} must fit {place}, got "
            f"{own.at_rest / GIB:.1f} GiB on each between two passes ({', '.join(shown[:4])}); "
            f"{_advice(ways, num_gpus=num_gpus)}."
        )
    if own.needed > memory:
        logger.warning(
            "the training may not fit %s: about %.1f GiB on each (%s); lower trainer.batch_size, "
            "or see mtp plan",
            *(place, own.needed / GIB, ", ".join(shown)),
        )


def _advice(ways: Sequence[Way], *, num_gpus: int) -> str:
    here = [way for way in ways if way.num_gpus == num_gpus]
    for way in here[-1:] or ways[:1]:  # the last one needs no cache
        more = "" if here else f" and start it on {way.num_gpus} GPUs"
        return f"set {way.words}{more} ({way.needed / GIB:.1f} GiB)"
    return f"no number of GPUs up to {NUM_GPUS[-1]} would do, see mtp plan"


def planned_heads(target: Target, *, head: HeadConfig) -> MTPHeads:
    """The modules of a training on a target without weights, frozen as `head` says."""
    with torch.device("meta"):
        heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=head.num_mtp_modules))
    if head.lora_rank:
        add_lora(heads, rank=head.lora_rank)
    freeze_parts(heads, patterns=head.freeze)
    return heads


def memory_of(
    config: TrainConfig,
    heads: MTPHeads,
    *,
    num_gpus: int,
    trainer: TrainerConfig | None = None,
    is_cached: bool | None = None,
) -> TrainMemory:
    """What each of `num_gpus` GPUs holds; with another trainer or a cache where these are given."""
    trainer, head = trainer or config.trainer, config.head
    return training_memory(
        heads,
        trainer,
        num_gpus=num_gpus,
        num_rows=trainer.batch_size * config.data.seq_len * depths_of(config),
        is_cached=needs_layers(config) is None if is_cached is None else is_cached,
        starts_from_layer=head.path is None and head.init in ("auto", "target_last_layer"),
    )


def other_ways(
    config: TrainConfig, heads: MTPHeads, *, num_gpus: int, memory: int
) -> Iterator[Way]:
    """Ways that would fit, each on the fewest GPUs of `memory` bytes that do."""
    trainer = config.trainer
    parallel = dataclasses.replace(trainer, parallel="fsdp2")
    spread = dataclasses.replace(parallel, shard_target=True)
    cache = "data.hidden_cache=FOLDER, written by task=cache model.device_map=auto"
    more = [count for count in NUM_GPUS if count >= max(num_gpus, 2)]
    small = dataclasses.replace(trainer, batch_size=1)
    ways = [
        [("trainer.batch_size=1", num_gpus, small, False)],
        [(cache, num_gpus, trainer, True)],
        [(f"trainer.parallel=fsdp2 {cache}", count, parallel, True) for count in more],
        [("trainer.shard_target=true trainer.parallel=fsdp2", n, spread, False) for n in more],
    ]
    for way in ways:
        for words, count, changed, is_cached in way:
            taken = memory_of(
                config, heads, num_gpus=count, trainer=changed, is_cached=is_cached
            ).needed
            if taken <= memory:
                yield Way(words, count, taken)
                break
