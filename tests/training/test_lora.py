"""Low-rank updates: only they move, runs resume, the exported head is plain."""

import builtins
import copy

import pytest
import torch
from safetensors.torch import load_file

from mtp_research.config.schema import TrainConfig
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import EnvironmentFault, Interrupted
from mtp_research.training import loop
from mtp_research.training.loop import train_heads
from mtp_research.training.optim import SCALE, merged_tensors
from mtp_research.training.setup import build_run, make_accelerator
from mtp_research.training.walk.replay import measure_held_out
from tests.training.tiny import save_lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> TrainConfig:
    config = save_lab(tmp_path_factory.mktemp("lab"), recipe="glm4_moe")
    config.head.lora_rank, config.head.num_mtp_modules = 4, 2
    config.trainer.max_steps, config.trainer.eval_every = 30, 30
    config.trainer.learning_rate = 2e-2
    return config


def test_lora_trains_updates_only_and_its_export_is_as_good(lab, tmp_path):
    pytest.importorskip("peft")
    start = build_run(lab, accelerator=make_accelerator(lab)).heads.state_dict()
    before = {name: tensor.clone() for name, tensor in start.items()}
    result = train_heads(lab, tmp_path)
    after = load_file(tmp_path / "step_000030" / "head.safetensors")
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {name for name in after if ".lora_" in name}
    optimizer = load_file(tmp_path / "step_000030" / "optimizer.safetensors")
    assert all(".lora_" in name for name in optimizer)
    assert result["acceptance_length"] > result["acceptance_length_before"] + 0.02

    plain = copy.deepcopy(lab)
    plain.head.lora_rank = 0
    parts = build_run(plain, accelerator=make_accelerator(plain))
    heads = load_heads(tmp_path / "head", load_target(lab.model.path, device="cpu"))
    parts.heads.load_state_dict(heads.state_dict())
    report = measure_held_out(parts, ranks=make_accelerator(plain), batch_size=4)
    assert report.acceptance_length == result["acceptance_length"]
    assert report.num_rounds == result["num_rounds"]


def test_lora_run_resumes_to_the_same_bits(lab, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    config = copy.deepcopy(lab)
    config.trainer.max_steps, config.trainer.save_every = 6, 2
    train_heads(config, tmp_path / "straight")
    plain = loop.accumulate_gradients

    def stopped(parts, *, step, stop, **arguments):
        if step == 2:
            stop.name = "SIGTERM"
        return plain(parts, step=step, stop=stop, **arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate_gradients", stopped)
        with pytest.raises(Interrupted):
            train_heads(config, tmp_path / "resumed")
    train_heads(config, tmp_path / "resumed")
    files = [
        tmp_path / name / "step_000006" / "head.safetensors" for name in ("straight", "resumed")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_merged_tensors_add_the_update_and_leave_plain_heads_alone():
    base, up, down = (torch.randn(shape).double() for shape in ((3, 5), (3, 2), (2, 5)))
    tensors = {
        "m.proj.base_layer.weight": base,
        "m.proj.base_layer.bias": up[:, 0],
        "m.proj.lora_A.default.weight": down,
        "m.proj.lora_B.default.weight": up,
        "m.norm.weight": down[0],
    }
    merged = merged_tensors(tensors)
    assert merged.keys() == {"m.proj.weight", "m.proj.bias", "m.norm.weight"}
    torch.testing.assert_close(merged["m.proj.weight"], base + SCALE * up @ down)
    assert merged_tensors(merged).keys() == merged.keys()


def test_lora_without_peft_names_the_extra(lab, monkeypatch):
    plain = builtins.__import__

    def without_peft(name, *arguments, **keys):
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return plain(name, *arguments, **keys)

    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(EnvironmentFault, match=r"mtp-research\[lora\]") as fault:
        build_run(lab, accelerator=make_accelerator(lab))
    assert fault.value.exit_code == 4
