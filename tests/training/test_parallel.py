"""Two ranks give the weights of one: real processes over gloo, each mode in the same pair."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, HeadConfig, TrainerConfig
from mtp_research.models.loading.parts import cut_layers
from mtp_research.models.loading.placement import require_gpus
from mtp_research.models.rewrites.products import MergedLinear
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.training.loop import train_heads
from mtp_research.training.losses.losses import HeadObjective
from mtp_research.training.parallel.parallel import prepare_target
from tests.models.test_loading import quantise
from tests.ranks import run_ranks
from tests.tiny import tiny_target
from tests.training.tiny import save_lab, trainable_heads
from tools import gpu_split_target, train_bench

# AdamW divides by the root of the second moment, so a rounding difference in a gradient near zero
# is one of the size of the learning rate times that rounding: 2e-3 and float32. The largest gap of
# a mode was 1.2e-5 to 2.7e-5, by the processor; a step moves weights by up to 2e-3.
TOLERANCE = 5e-5
LOSS_TOLERANCE = 1e-5  # relative, of the loss of every step
# Resumed under another number of ranks: the global batch is the same, so the rows are too.
BENCHED = ("tiny_fp8_n3",)
DRIFT = ["world_size", "trainer.batch_size", "trainer.parallel"]


def read_config(folder: Path, *, model: Mapping[str, object], **trainer: object) -> TrainConfig:
    """The configuration that the fixture left, with keys of `model` and `trainer` changed.

    With another model there is one module, not three.
    """
    saved = json.loads((folder / "config.json").read_text())
    keys = saved["trainer"] | trainer
    return TrainConfig(
        model=ModelConfig(**saved["model"] | model),
        data=DataConfig(**saved["data"]),
        head=HeadConfig(num_mtp_modules=1 if model else 3),
        trainer=TrainerConfig(**keys),
    )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, its answers, and a run of one rank: two micro-batches of 4 rows.

    Beside them a target with experts that is stored as FP8, and a run of one rank on it: one module
    for three depths, so that it is gathered and reduced more than once.
    """
    folder = tmp_path_factory.mktemp("lab")
    config = save_lab(folder, num_documents=24)
    config.trainer = dataclasses.replace(
        config.trainer, gradient_accumulation_steps=2, save_every=3, keep_last=9
    )
    fields = dataclasses.asdict(config)
    fields["model"].pop("pretrain")
    (folder / "config.json").write_text(json.dumps(fields))
    train_heads(config, folder / "one")
    experts = tiny_target("glm4_moe", dtype=torch.float32, moe_intermediate_size=40)
    experts.model.save_pretrained(folder / "fp8")
    quantise(folder / "fp8")
    train_heads(read_config(folder, model=fp8(folder)), folder / "one_fp8")
    return folder


def fp8(folder: Path) -> dict[str, object]:
    """Keys of the target that stays FP8."""
    return {"path": str(folder / "fp8"), "family": "glm4_moe", "keep_fp8": True}


def work_of_rank(folder: str, runs: str) -> None:
    """All that a pair of processes is needed for."""
    train_rank(folder, runs)
    bench_rank(folder)


def train_rank(folder: str, runs: str) -> None:
    """Train each of `runs` (JSON, name -> trainer keys), one after the other."""
    for name, keys in json.loads(runs).items():
        sys.stderr.write(f"training {name}\n")
        model = fp8(Path(folder)) if "-fp8" in name else {}
        model |= {"device": "cuda"} if name.endswith("-gpu") else {}
        with pytest.MonkeyPatch.context() as patch:
            if keys["parallel"] == "fsdp2":
                watch_forward(patch)
            train_heads(read_config(Path(folder), model=model, **keys), Path(folder) / name)


def watch_forward(patch: pytest.MonkeyPatch) -> None:
    """Fail where a rank still holds whole weights of a module behind the forward pass."""
    forward = HeadObjective.forward

    def checked(objective: HeadObjective, *batch: object) -> object:
        found = forward(objective, *batch)
        assert all(isinstance(p, DTensor) for p in objective.heads.mtp_modules.parameters())
        return found

    patch.setattr(HeadObjective, "forward", checked)


def largest_gap(folder: Path, other: Path) -> float:
    """Largest difference of any tensor of two step folders, which must hold the same names."""
    gaps = []
    for file in ("head.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(folder / file), load_file(other / file)
        assert ours.keys() == theirs.keys()
        gaps += [(ours[name] - theirs[name]).abs().max().item() for name in ours]
    return max(gaps)


def loss_curve(folder: Path) -> dict[int, float]:
    """Training loss by step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def check(lab: Path, *names: str) -> None:
    for name in names:
        alone = lab / ("one_fp8" if name.endswith("-fp8") else "one")
        gap = largest_gap(lab / name / "step_000006", alone / "step_000006")
        assert gap < TOLERANCE, name
        losses = loss_curve(lab / name)
        expected = {step: loss for step, loss in loss_curve(alone).items() if step in losses}
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE), name
        assert max(losses) == 6
    moved = largest_gap(lab / "one" / "step_000003", lab / "one" / "step_000006")
    assert moved > 100 * TOLERANCE, "a step must move the weights by far more than the tolerance"


def bench_rank(folder: str) -> None:
    """The work of one rank: the tiny cases of the tool that measures a target of 106 B."""
    for name in BENCHED:
        words = gpu_split_target.words_of(name, bench_arguments(Path(folder)))
        train_bench.main(words)


def bench_arguments(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(out=folder / "bench", seq_len=64, steps=1)


@pytest.fixture(scope="module")
def trained(lab: Path) -> list[str]:
    """Names of the runs of two ranks, each in its folder, and the tool's files."""
    step = str(lab / "one" / "step_000003")
    # One rank's checkpoint goes on as shards on two.
    resumed = {"resume": step, "allow_drift": DRIFT}
    runs: dict[str, dict] = {
        "ddp": {"shard_target": True},
        "fsdp2": {"activation_checkpointing": True, "shard_target": True},
        "fsdp2-resumed": resumed,
        "fsdp2-fp8": {"shard_target": True},
    }
    if importlib.util.find_spec("deepspeed"):
        file = lab / "deepspeed.json"  # a user's own: many small buckets, the rest left to us
        zero = {"stage": "auto", "reduce_bucket_size": 4096, "allgather_bucket_size": 4096}
        file.write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": zero}))
        runs |= {"zero1": {}, "zero2": {"deepspeed_config": str(file), "shard_target": True}}
        runs |= {"zero3": {}, "zero3-resumed": resumed}
    modes = {name: name.partition("-")[0] for name in runs}
    runs = {name: {"batch_size": 2, "parallel": modes[name]} | runs[name] for name in runs}
    run_ranks(__name__, "work_of_rank", str(lab), json.dumps(runs))
    return list(runs)


@pytest.mark.slow
def test_two_ranks_equal_one(lab: Path, trained: list[str]) -> None:
    check(lab, *trained)


@pytest.mark.slow
@pytest.mark.usefixtures("trained")
@pytest.mark.parametrize("name", BENCHED)
def test_bench_of_a_split_target_counts_both_ranks(lab: Path, name: str) -> None:
    case = gpu_split_target.CASES[name]
    report = json.loads((lab / "bench" / name / "train_bench.json").read_text())
    (row,) = report["rows"]
    assert (row["parallel"], row["ranks"], row["is_sharded"]) == (case.parallel, 2, True)
    assert row["tokens_per_s"] == pytest.approx(2 * 1e3 * 2 * 64 / row["step_ms"])
    flops = sum(row["mflop_per_token"].values())
    assert row["mflop_per_token"]["target"] > 0
    rate = flops * row["tokens_per_s"] / 2 / 1e6 / report["product_tflops"]
    assert row["mfu"] == pytest.approx(rate)
    assert row["loss_last"] < row["loss_first"]
    assert row["memory_gib"] == {}, "a CPU has no allocator to ask"
    planned = gpu_split_target.planned(name, bench_arguments(lab))
    gpu_split_target.show({"case": name, "seconds": 1, "planned_gib": planned} | row)
    gpu_split_target.show({"case": name, "seconds": 1, "planned_gib": planned})


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_share_a_target_in_fp8(lab: Path) -> None:
    """Over NCCL, in float32; one GPU takes both micro-batches."""
    on_gpu: dict[str, object] = {"device": "cuda", "dtype": "float32"}
    train_heads(read_config(lab, model=fp8(lab) | on_gpu), lab / "one_gpu")
    run = {"batch_size": 2, "parallel": "fsdp2", "shard_target": True, "precision": "float32"}
    run_ranks(__name__, "train_rank", str(lab), json.dumps({"fsdp2-fp8-gpu": run}))
    expected = loss_curve(lab / "one_gpu")
    assert loss_curve(lab / "fsdp2-fp8-gpu") == pytest.approx(expected, rel=1e-3)


def test_cases_of_two_large_gpus_are_planned_to_fit(tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path, seq_len=256, steps=4)
    for name in gpu_split_target.SHIPPED:
        needed = sum(gpu_split_target.planned(name, arguments).values())
        assert 40 < needed < 139, name


@pytest.mark.parametrize(
    "keys",
    [{"parallel": "fsdp2"}, {"parallel": "zero2"}, {"shard_target": True}],
    ids=["fsdp2", "zero2", "shard_target"],
)
def test_sharding_over_one_rank_is_refused(lab: Path, tmp_path: Path, keys: dict) -> None:
    with pytest.raises(ConfigError, match="trainer"):
        train_heads(read_config(lab, model={}, **keys), tmp_path)


def test_more_ranks_than_experts_are_refused() -> None:
    mesh = cast(DeviceMesh, SimpleNamespace(size=lambda: 9))
    with pytest.raises(ConfigError, match="needs no more ranks than experts, got 9 for 8; launch"):
        cut_layers(tiny_target("glm4_moe").model, mesh=mesh)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(EnvironmentFault, match=r"2 processes and 1 GPUs .*--nproc-per-node 1"):
        require_gpus(torch.device("cuda"))


def test_resuming_on_another_number_of_ranks_is_refused_unless_allowed(lab: Path) -> None:
    record = lab / "one" / "step_000003" / "state.json"
    assert json.loads(record.read_text())["settings"]["world_size"] == 1
    with pytest.raises(ConfigError, match="allow_drift"):
        train_heads(read_config(lab, model={}, batch_size=2), lab / "one")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_compiled_target_reads_a_layer_input_once(is_compiled: bool) -> None:
    target = trainable_heads("glm4_moe").target
    trainer = TrainerConfig(compile=is_compiled)
    prepare_target(target, trainer=trainer)
    merged = [m for m in target.model.modules() if isinstance(m, MergedLinear)]
    # Queries, keys and values of two layers; gate and up of a dense and a shared MLP.
    assert len(merged) == (10 if is_compiled else 0)
