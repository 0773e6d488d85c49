"""The heads of a policy matrix: which ones, their training, and how they are looked at in the loop.

A head that is there already is used again: a matrix that was killed goes on with the next one.
Letters: N MTP modules, k depths.
"""

import copy
import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.family import NormPoint
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import cache_hidden, depths_of

logger = logging.getLogger(__name__)
_MARK = "trained.json"  # written when a head's training has ended
_SECTIONS = ("model", "head", "data", "objective", "trainer", "seed")  # what a head depends on


class HeadRun(NamedTuple):
    """One training run: its folder, and its configuration."""

    folder: Path
    config: TrainConfig


def head_runs(config: TrainConfig, output_dir: Path, *, seed: int) -> list[HeadRun]:
    """The heads of one seed; all of equal depth share one cache of hidden states."""
    return [
        _run_of(config, output_dir, unroll, num_modules, norm, seed)
        for num_modules in config.matrix.num_mtp_modules
        for unroll in unrolls_of(num_modules, wanted=config.matrix.unrolls)
        for norm in config.matrix.recycle_norms or [config.head.recycle_norm]
    ]


def unrolls_of(num_mtp_modules: int, *, wanted: Sequence[str]) -> list[str]:
    """Unrolls that make sense for N modules: `ttt` is `shared_context` with one module."""
    left_out = "shared_context" if num_mtp_modules == 1 and "ttt" in wanted else ""
    left_out = "ttt" if num_mtp_modules > 1 else left_out
    return [unroll for unroll in wanted if unroll != left_out]


def decoding_config(config: TrainConfig) -> TrainConfig:
    """The configuration with the dtype that cells are decoded in, for loading the target."""
    if config.matrix.dtype == "auto":
        return config
    config = copy.deepcopy(config)
    config.model.dtype, config.trainer.precision = config.matrix.dtype, "auto"
    return config


def train_run(run: HeadRun) -> None:
    """Train one head, unless its folder says that this was done with this configuration."""
    mark, wanted = run.folder / _MARK, _facts(run.config)
    if mark.is_file() and same_settings(json.loads(mark.read_text())["config"], wanted):
        logger.info("%s is trained", run.folder.name)
        return
    if not Path(str(run.config.data.hidden_cache)).is_dir():
        cache_hidden(run.config)
    result = train_heads(run.config, run.folder)
    mark.write_text(json.dumps({"config": wanted, "result": result}) + "\n", encoding="utf8")


def same_settings(stored: object, wanted: object) -> bool:
    """Equal in every key that both have: another version of the schema may add or drop one."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return all(same_settings(stored[key], wanted[key]) for key in stored.keys() & wanted.keys())
    return stored == wanted


def decoded_as(heads: MTPHeads, recycle_norm: str) -> MTPHeads:
    """The same modules, their outputs fed on as if the head's record said `recycle_norm`.

    A wrong record is invisible in the text and costs acceptance; this is how its price is measured.
    The heads passed in are left as they are; both share their weights.
    """
    view = copy.copy(heads)
    view.spec = dataclasses.replace(heads.spec, recycle_norm=cast(NormPoint, recycle_norm))
    return view


def _run_of(
    config: TrainConfig, output_dir: Path, unroll: str, num_modules: int, norm: str, seed: int
) -> HeadRun:
    config = copy.deepcopy(config)
    config.task, config.seed = "heads", seed
    config.objective.unroll, config.head.num_mtp_modules = unroll, num_modules
    config.head.recycle_norm = norm
    if config.data.hidden_cache is None:
        config.data.hidden_cache = str(output_dir / f"hidden_k{depths_of(config)}")
    norms = [norm] if config.matrix.recycle_norms else []
    name = "_".join([unroll, f"n{num_modules}", *norms, f"s{seed}"])
    return HeadRun(output_dir / name, config)


def _facts(config: TrainConfig) -> dict[str, object]:
    """What the head depends on, as JSON gives it back."""
    fields: dict[str, object] = dataclasses.asdict(config)
    return json.loads(json.dumps({name: fields[name] for name in _SECTIONS}))
