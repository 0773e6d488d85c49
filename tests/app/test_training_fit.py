"""A training that its GPUs cannot hold is refused with its figures; the ways that fit are not."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtp_research.__main__ import run_training
from mtp_research.app import api, training_fit
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.app.training_fit import GIB, check_memory, require_memory
from mtp_research.bench.shapes import Sizes, sizes_only
from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.runtime.errors import ConfigError

H200 = 139 * GIB
_SIZES: dict[tuple[object, ...], Sizes] = {}  # each takes a third of a second


@pytest.fixture(autouse=True)
def sizes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def kept(model: ModelConfig, *, dtype: torch.dtype) -> Sizes:
        key = (model.path, model.keep_fp8, dtype)
        return _SIZES.setdefault(key, _SIZES.get(key) or sizes_only(model, dtype=dtype))

    monkeypatch.setattr(training_fit, "sizes_only", kept)


AIR = ["model=glm45_air", "head.init=target_last_layer"]
SPLIT = "trainer.shard_target=true"


def test_full_size_target_whole_on_each_card_is_refused_with_its_parts() -> None:
    config = compose_config(TrainConfig, [*AIR, "trainer=ddp", "head=shared_n1"])
    with pytest.raises(ConfigError) as fault:
        check_memory(config, num_gpus=2, memory=H200)
    assert str(fault.value) == (
        "trainer.parallel=ddp must fit 2 GPUs of 139.0 GiB, got 243.3 GiB on each between two "
        "passes (target 199.0, weights 4.4, gradients 13.3, optimizer 26.5); set "
        "trainer.shard_target=true trainer.parallel=fsdp2 (138.1 GiB)."
    )


@pytest.mark.parametrize(
    ("words", "num_gpus", "advice"),
    [
        (["model.keep_fp8=true"], 2, f"; set {SPLIT} trainer.parallel=fsdp2 ("),
        ([SPLIT, "trainer=fsdp2"], 2, "; set trainer.parallel=fsdp2 data.hidden_cache=FOLDER"),
        ([SPLIT], 1, "task=cache model.device_map=auto and start it on 2 GPUs ("),
        (["head.num_mtp_modules=64"], 8, "; no number of GPUs up to 8 would do, see mtp plan."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_three_modules_need_more_than_two_cards_whatever_is_split(
    words: list[str], num_gpus: int, advice: str
) -> None:
    config = compose_config(TrainConfig, [*AIR, *words])
    with pytest.raises(ConfigError) as fault:
        check_memory(config, num_gpus=num_gpus, memory=H200)
    assert advice in str(fault.value)
    assert "\n" not in str(fault.value)


@pytest.mark.parametrize(
    ("words", "num_gpus", "warns"),
    [
        (["head=shared_n1", SPLIT, "trainer=fsdp2", "trainer.batch_size=4"], 2, False),
        (["head=shared_n1", SPLIT, "trainer=fsdp2", "trainer.batch_size=16"], 2, True),
        (["head=shared_n1", SPLIT, "trainer=zero2", "trainer.batch_size=16"], 2, False),
        (["model.keep_fp8=true", SPLIT, "trainer=fsdp2"], 2, False),
        (["data.hidden_cache=x", "trainer=fsdp2"], 2, False),
        (["head=shared_n1", "data.hidden_cache=x", "trainer=ddp"], 1, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_ways_that_fit_are_taken(
    words: list[str], num_gpus: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose_config(TrainConfig, [*AIR, *words])
    with caplog.at_level(logging.WARNING):
        check_memory(config, num_gpus=num_gpus, memory=H200)
    assert ("may not fit 2 GPUs of 139.0 GiB: about" in caplog.text) == warns


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["head=shared_n1", SPLIT, "trainer=zero2"], "| N = 1 | bfloat16, split |"),
        (["head=shared_n1", SPLIT, "trainer=fsdp2"], "| N = 1 | the same |"),
        (["model.keep_fp8=true", SPLIT, "trainer=fsdp2"], "| N = 3 | FP8, split |"),
        (["data.hidden_cache=x", "trainer=fsdp2"], "| N = 3 | states from"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_page_shows_what_is_planned(words: list[str], row: str) -> None:
    config = compose_config(TrainConfig, [*AIR, "trainer.batch_size=4", *words])
    target = training_fit.sizes_only(config.model, dtype=torch.bfloat16).target
    heads = training_fit.planned_heads(target, head=config.head)
    needed = training_fit.memory_of(config, heads, num_gpus=2).needed / GIB
    page = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf8")
    (line,) = (line for line in page.splitlines() if line.startswith(row))
    assert line.endswith(f"| {needed:.0f} |")


def test_packed_checkpoint_is_not_judged_by_the_size_of_its_plain_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose_config(TrainConfig, ["model=lab_tiny"])
    with pytest.raises(ConfigError, match=r"must fit 1 GPU of 0\.0 GiB"):
        check_memory(config, num_gpus=1, memory=1 << 20)
    monkeypatch.setattr(training_fit, "quantisation_of", lambda config: "bitsandbytes")
    check_memory(config, num_gpus=1, memory=1 << 20)


def test_training_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("nothing may be loaded")

    monkeypatch.setattr("mtp_research.training.loop.train_heads", never)
    monkeypatch.setattr(training_fit, "resolve_device", lambda device: torch.device("cuda"))
    gpu = SimpleNamespace(total_memory=16 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with pytest.raises(ConfigError, match="must fit 1 GPU"):
        api.train_heads(output_dir=tmp_path / "called")
    assert not (tmp_path / "called").exists()
    argv = ["model.device=cpu", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(TrainConfig, run_training, argv=argv) == ConfigError.exit_code
    message = capsys.readouterr().err
    assert message.startswith("error: trainer.parallel=ddp must fit 1 GPU of 0.0 GiB, got ")
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_cpus_and_mapped_targets_have_nothing_to_compare_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_fit, "check_memory", lambda *_, **__: pytest.fail("compared"))
    require_memory(compose_config(TrainConfig, ["model.device=cpu"]))
    monkeypatch.setattr(training_fit, "resolve_device", lambda device: torch.device("cuda"))
    require_memory(compose_config(TrainConfig, ["model.device_map=auto"]))
