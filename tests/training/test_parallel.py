"""Two ranks give the weights of one: real processes over gloo, each mode in the same pair."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, TrainerConfig
from mtp_research.models.rewrites.products import MergedLinear
from mtp_research.runtime.errors import ConfigError
from mtp_research.training.loop import train_heads
from mtp_research.training.parallel.parallel import prepare_target
from tests.ranks import run_ranks
from tests.training.tiny import save_lab, trainable_heads

# AdamW divides by the root of the second moment, so a rounding difference in a gradient near zero
# is one of the size of the learning rate times that rounding: 2e-3 and float32. The largest gap of
# a mode was 1.2e-5 to 2.7e-5, by the processor; a step moves weights by up to 2e-3.
TOLERANCE = 5e-5
# Resumed under another number of ranks: the global batch is the same, so the rows are too.
DRIFT = ["world_size", "trainer.batch_size", "trainer.parallel"]


def read_config(folder: Path, **trainer: object) -> TrainConfig:
    """The configuration that `write_lab` left, with trainer keys changed."""
    saved = json.loads((folder / "config.json").read_text())
    keys = saved["trainer"] | trainer
    return TrainConfig(
        model=ModelConfig(**saved["model"]),
        data=DataConfig(**saved["data"]),
        trainer=TrainerConfig(**keys),
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its answers, and a run of one rank: two micro-batches of 4 rows."""
    folder = tmp_path_factory.mktemp("lab")
    config = save_lab(folder)
    config.trainer = dataclasses.replace(
        config.trainer, gradient_accumulation_steps=2, save_every=3, keep_last=9
    )
    fields = dataclasses.asdict(config)
    fields["model"].pop("pretrain")
    (folder / "config.json").write_text(json.dumps(fields))
    train_heads(config, folder / "one")
    return folder


def train_rank(folder: str, runs: str) -> None:
    """The work of one rank: each of `runs` (JSON, name -> trainer keys), one after the other."""
    for name, keys in json.loads(runs).items():
        sys.stderr.write(f"training {name}\n")
        train_heads(read_config(Path(folder), **keys), Path(folder) / name)


def largest_gap(folder: Path, other: Path) -> float:
    """Largest difference of any tensor of two step folders, which must hold the same names."""
    gaps = []
    for file in ("head.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(folder / file), load_file(other / file)
        assert ours.keys() == theirs.keys()
        gaps += [(ours[name] - theirs[name]).abs().max().item() for name in ours]
    return max(gaps)


def check(lab: Path, *names: str) -> None:
    for name in names:
        gap = largest_gap(lab / name / "step_000006", lab / "one" / "step_000006")
        assert gap < TOLERANCE, name
    moved = largest_gap(lab / "one" / "step_000003", lab / "one" / "step_000006")
    assert moved > 100 * TOLERANCE, "a step must move the weights by far more than the tolerance"


@pytest.mark.slow
def test_two_ranks_equal_one(lab: Path) -> None:
    step = str(lab / "one" / "step_000003")
    # One rank's checkpoint goes on as shards on two.
    resumed = {"resume": step, "allow_drift": DRIFT}
    runs: dict[str, dict] = {
        "ddp": {},
        "fsdp2": {"activation_checkpointing": True, "shard_target": True},
        "fsdp2-resumed": resumed,
    }
    if importlib.util.find_spec("deepspeed"):
        file = lab / "deepspeed.json"  # a user's own: many small buckets, the rest left to us
        zero = {"stage": "auto", "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
        file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero}))
        runs |= {"zero1": {}, "zero2": {"deepspeed_config": str(file)}, "zero3": {}}
        runs |= {"zero2-resumed": resumed, "zero3-resumed": resumed}
    modes = {name: name.removesuffix("-resumed") for name in runs}
    runs = {name: {"batch_size": 2, "parallel": modes[name]} | runs[name] for name in runs}
    run_ranks(__name__, "train_rank", str(lab), json.dumps(runs))
    check(lab, *runs)


@pytest.mark.parametrize(
    "keys",
    [{"parallel": "fsdp2"}, {"parallel": "zero2"}, {"shard_target": True}],
    ids=["fsdp2", "zero2", "shard_target"],
)
def test_sharding_over_one_rank_is_refused(lab: Path, tmp_path: Path, keys: dict) -> None:
    with pytest.raises(ConfigError, match="trainer"):
        train_heads(read_config(lab, **keys), tmp_path)


def test_resuming_on_another_number_of_ranks_is_refused_unless_allowed(lab: Path) -> None:
    record = lab / "one" / "step_000003" / "state.json"
    assert json.loads(record.read_text())["settings"]["world_size"] == 1
    with pytest.raises(ConfigError, match="allow_drift"):
        train_heads(read_config(lab, batch_size=2), lab / "one")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_target_reads_a_layer_input_once(is_compiled: bool) -> None:
    target = trainable_heads("glm4_moe").target
    trainer = TrainerConfig(compile=is_compiled)
    prepare_target(target, trainer=trainer)
    merged = [m for m in target.model.modules() if isinstance(m, MergedLinear)]
    # Queries, keys and values of two layers; gate and up of a dense and a shared MLP.
    assert len(merged) == (10 if is_compiled else 0)
