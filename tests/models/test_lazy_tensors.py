"""Tensors that are made when a part is asked for: the part of a whole one, however it is cut."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from mtp_research.models.loading import lazy_tensors, load_weights
from mtp_research.models.loading.lazy_tensors import (
    Form,
    RandomTensor,
    open_tensors,
    plain_tensors,
    random_tensors,
)
from mtp_research.models.loading.parts import own_device
from mtp_research.models.loading.placement import require_gpus
from mtp_research.models.loading.quantised import plain_config
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from tests.models.test_loading import BLOCK, quantise, save, set_quantisation
from tests.tiny import tiny_target

FORM = Form(torch.float32, torch.device("cpu"))
PARTS = [
    (slice(0, 3),),
    (slice(3, 6), slice(0, 5)),
    (slice(0, 6), slice(2, 5), slice(1, 4)),
    (slice(4, 4),),
]


@pytest.mark.parametrize("chunk", [1, 7, 1 << 18])
@pytest.mark.parametrize("part", PARTS, ids=["rows", "two_dims", "inner", "nothing"])
def test_part_of_random_tensor_is_that_of_whole_one(
    part: tuple[slice, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = RandomTensor("a.weight", (6, 5, 4), std=0.1, form=FORM)
    whole = tensor[...]
    monkeypatch.setattr(lazy_tensors, "_CHUNK", chunk)
    assert torch.equal(tensor[part], whole[part])


def test_random_tensors_have_the_spread_of_the_config_and_differ_by_name() -> None:
    one, other = (
        RandomTensor(name, (500, 400), std=0.05, form=FORM)[...]
        for name in ("a.weight", "b.weight")
    )
    assert one.std().item() == pytest.approx(0.05, rel=0.01)
    assert abs(one.mean().item()) < 5 * 0.05 / 200_000**0.5
    both = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))
    neighbours = torch.corrcoef(torch.stack([one[:-1].flatten(), one[1:].flatten()]))
    assert max(abs(both[0, 1]), abs(neighbours[0, 1])) < 0.012  # five deviations of chance


@pytest.mark.parametrize("recipe", ["glm4_moe", "qwen3_next", "mimo_v2"])
def test_random_target_needs_a_config_alone_and_keeps_family_rules(
    recipe: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_target(recipe, dtype=torch.float32).model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    one, other = (
        load_target(tmp_path, dtype="float32", device="cpu", weights="random") for _ in range(2)
    )
    assert "weights are random, so texts" in caplog.text
    weights = one.model.state_dict()
    assert all(torch.equal(weights[name], t) for name, t in other.model.state_dict().items())
    assert one.stop_token_ids == (2, 9)
    # Norms are ones, or zeros where the family adds one; matrices are as wide as the config says.
    for name, tensor in weights.items():
        if "norm" in name:
            assert tensor.unique().tolist() in ([0.0], [1.0]), name
        elif tensor.dim() > 1 and tensor.numel() > 1000:
            assert tensor.std().item() == pytest.approx(one.config.initializer_range, rel=0.1), name


def test_tied_weight_is_drawn_once() -> None:
    model = tiny_target("qwen3", dtype=torch.float32, tie_word_embeddings=True).model
    names = set(random_tensors(model.to("meta"), form=FORM))
    assert set(model.state_dict()) - names == {"lm_head.weight"}


def test_random_target_leaves_layers_out(tmp_path: Path) -> None:
    target = load_target(save(tmp_path), device="cpu", weights="random", layers="none")
    assert target.num_left_out == 2
    assert {p.device.type for p in target.model.base_model.layers.parameters()} == {"meta"}
    assert not target.lm_head_weight.is_meta


PLACES = [
    (slice(0, 48), slice(0, 80)),
    (slice(24, 48), slice(0, 80)),
    (slice(3, 40), slice(37, 71)),
]


@pytest.mark.parametrize("place", PLACES, ids=["whole", "half", "inside_blocks"])
def test_part_of_block_scaled_tensor_is_that_of_whole_one(
    place: tuple[slice, slice], tmp_path: Path
) -> None:
    meant = quantise(save(tmp_path, intermediate_size=48, hidden_size=80))
    tensors = plain_tensors(open_tensors(tmp_path), block=(BLOCK, BLOCK), form=FORM)
    assert tensors.keys() == meant.keys()
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(tensors[name][place], meant[name][place])


def test_scales_of_other_blocks_are_refused(tmp_path: Path) -> None:
    quantise(save(tmp_path))
    with pytest.raises(IntegrityError, match="needs a scale per tensor, row or 64 x 64"):
        plain_tensors(open_tensors(tmp_path), block=(64, 64), form=FORM)


def test_config_of_plain_numbers_says_nothing_of_quantisation(tmp_path: Path) -> None:
    quantise(save(tmp_path))
    config = load_target(save(tmp_path / "plain"), device="cpu").config
    config.quantization_config = {"quant_method": "fp8"}
    assert not hasattr(plain_config(config), "quantization_config")
    assert hasattr(config, "quantization_config")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"weights": "random", "device_map": "auto"},
            "model.weights=random does not go with model",
        ),
        ({"weights": "drawn"}, r"model\.weights must be one of \['random', 'stored'\]"),
        ({"layers": "sharded"}, "trainer.shard_target needs 2 or more ranks, got 1"),
    ],
    ids=["map", "unknown", "one_rank"],
)
def test_what_does_not_go_together_is_refused(how: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_target(save(tmp_path), device="cpu", **how)


def test_random_weights_of_packed_numbers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_quantisation(save(tmp_path), quant_method="bitsandbytes", load_in_8bit=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with pytest.raises(ConfigError, match="random does not go with a checkpoint stored as bits"):
        load_target(tmp_path, device="cpu", weights="random")


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EnvironmentFault, match=r"got 4 processes and 2 GPUs .* --nproc-per-node 2"):
        require_gpus(torch.device("cuda"))
    require_gpus(torch.device("cpu"))


def test_a_rank_s_gpu_has_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read weights know no current device: each begins with the first GPU."""
    any_gpu = torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert own_device(any_gpu, is_split=True) == torch.device("cuda", 1)
    assert own_device(any_gpu, is_split=False) == torch.device("cuda", 3)
    assert own_device(torch.device("cuda", 2), is_split=True) == torch.device("cuda", 1)
    assert own_device(torch.device("cuda", 2), is_split=False) == torch.device("cuda", 2)
    assert own_device(torch.device("cpu"), is_split=True) == torch.device("cpu")
    placing = load_weights.Placing(any_gpu, torch.float32)
    placed, arguments = load_weights._on_own_device(placing, {"device_map": {"": any_gpu}})
    assert (
        arguments
        == {"device_map": {"": placed.device}}
        == {"device_map": {"": torch.device("cuda:3")}}
    )
    spread = dataclasses.replace(placing, device_map="auto")
    assert load_weights._on_own_device(spread, {"device_map": {"a": 0}})[1] == {
        "device_map": {"a": 0}
    }


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_random_target_lies_on_the_current_gpu(tmp_path: Path) -> None:
    save(tmp_path, "glm4_moe")
    second = torch.device("cuda", 1)
    with torch.cuda.device(second):
        model = load_target(tmp_path, device="cuda", weights="random").model
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {second}
