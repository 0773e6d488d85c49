"""The heads a run starts from: fresh, read from a folder, or copies of one trained module."""

import dataclasses
from pathlib import Path
from typing import cast

import torch

from mtp_research.config import TrainConfig
from mtp_research.errors import ConfigError
from mtp_research.heads.init import Init, freeze_parts, init_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.weights import load_head_state, read_head_record
from mtp_research.models.family import ConcatOrder, NormPoint
from mtp_research.models.target import Target
from mtp_research.training.lora import add_lora


def build_heads(config: TrainConfig, *, target: Target) -> MTPHeads:
    """Heads to start from, with `head.lora_rank` and the parts of `head.freeze` frozen.

    Raises:
        ConfigError: settings that do not fit the head folder or the target.
        EnvironmentFault: `head.lora_rank` without peft.
        IntegrityError: a damaged head file.
    """
    head = config.head
    torch.manual_seed(config.seed)
    heads = MTPHeads(
        target,
        spec=HeadSpec(
            num_mtp_modules=head.num_mtp_modules,
            hidden_source=cast(NormPoint, head.hidden_source),
            recycle_norm=cast(NormPoint, head.recycle_norm),
            concat_order=cast(ConcatOrder, head.concat_order),
            zero_position_0=head.zero_position_0,
            unroll=config.objective.unroll,
        ),
    )
    path = None if head.path is None else Path(head.path)
    if path is not None:
        _check_conventions(heads.spec, path=path, is_copied=head.init == "replicate")
    if path is not None and head.init != "replicate":
        load_head_state(heads, path / "model.safetensors")
    else:
        init_heads(heads, init=cast(Init, head.init), path=path)
    if head.lora_rank:
        add_lora(heads, rank=head.lora_rank)
    freeze_parts(heads, patterns=head.freeze)
    return heads.train()


def _check_conventions(spec: HeadSpec, *, path: Path, is_copied: bool) -> None:
    """A head read under other conventions trains on, and nothing but acceptance shows it."""
    saved = dataclasses.asdict(HeadSpec(**read_head_record(path)["spec"]))
    if saved["owns_lm_head"]:
        raise ConfigError(
            f"head.path {str(path)!r} has output projections of its own, which are decoded with "
            "and not trained; set head.path to heads that share the target's lm_head."
        )
    free = {"unroll", "num_mtp_modules"} if is_copied else {"unroll"}
    for name, new in dataclasses.asdict(spec).items():
        if name not in free and saved[name] != new:
            raise ConfigError(
                f"head.path {str(path)!r} has {name}={saved[name]!r}, the configuration {new!r}; "
                f"set head.{name}={saved[name]}."
            )
