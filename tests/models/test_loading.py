"""Targets that do not lie on one device as they are stored: maps, offloaded layers, FP8 files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target, load_target, target_hashes
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from tests.decode.loops import run, small_pool, texts_of
from tests.tiny import tiny_heads, tiny_target

IDS = torch.arange(5, 25)[None]
# 48 rows are one block and half of one, where 48 / 2 would be taken for the size of a block.
BLOCK = 32


@torch.inference_mode()
def logits_of(target: Target) -> Tensor:
    hidden = target.forward(
        IDS, position_ids=torch.arange(IDS.shape[1])[None], context=DenseContext()
    )
    return target.logits(hidden.post_norm)


def save(folder: Path, recipe: str = "qwen3", **changes: object) -> Path:
    """A tiny checkpoint in float32."""
    tiny_target(recipe, dtype=torch.float32, **changes).model.save_pretrained(folder)
    return folder


def read(path: Path) -> dict[str, Tensor]:
    """Copies, because the file is written again."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


ROWS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
        }
    },
    "ignore": ["lm_head", "model.layers.0.mlp.gate"],
}
LAYOUTS = {"blocks": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, "rows": ROWS}


def quantise(
    folder: Path, *, is_quantised: str = "proj", layout: str = "blocks"
) -> dict[str, Tensor]:
    """Store the matrices of a checkpoint as FP8, in place; gives what these stand for."""
    path = folder / "model.safetensors"
    stored, meant = {}, read(path)
    for name, tensor in read(path).items():
        if is_quantised not in name or tensor.dim() != 2:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        height, width = (BLOCK, BLOCK) if layout == "blocks" else (1, columns)
        scales = (torch.rand(-(-rows // height), -(-columns // width)) + 0.5) / 64
        full = scales.repeat_interleave(height, 0)[:rows]
        full = full.repeat_interleave(width, 1)[:, :columns]
        stored[name] = (tensor / full).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv" if layout == "blocks" else f"{name}_scale"] = scales
        meant[name] = stored[name].float() * full
    save_file(stored, path, metadata={"format": "pt"})
    set_quantisation(folder, **LAYOUTS[layout])
    return meant


def set_quantisation(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [("qwen3", {"intermediate_size": 48}), ("glm4_moe", {"moe_intermediate_size": 40})],
    ids=["cut_off_blocks", "experts"],
)
def test_fp8_checkpoint_loads_as_the_weights_it_stands_for(
    recipe: str, changes: dict, layout: str, tmp_path: Path
) -> None:
    plain, fp8 = (
        save(tmp_path / "plain", recipe, **changes),
        save(tmp_path / "fp8", recipe, **changes),
    )
    before = load_target(plain, dtype="float32", device="cpu")
    meant = quantise(fp8, layout=layout)
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    loaded, expected = (load_target(p, dtype="float32", device="cpu") for p in (fp8, plain))
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert torch.equal(logits_of(loaded), logits_of(expected))
    assert (logits_of(loaded) - logits_of(before)).abs().max() > 1e-3, "FP8 rounds"
    assert target_hashes(loaded) == target_hashes(before)


def test_fp8_checkpoint_without_a_scale_is_refused(tmp_path: Path) -> None:
    quantise(save(tmp_path))
    path = tmp_path / "model.safetensors"
    tensors = read(path)
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"1 have no scale .*up_proj\.weight"):
        load_target(tmp_path, dtype="float32", device="cpu")


def test_other_quantisation_is_refused_by_name(tmp_path: Path) -> None:
    set_quantisation(save(tmp_path), quant_method="gptq", bits=4)
    with pytest.raises(
        ConfigError, match=r"one of \['bitsandbytes', 'compressed-tensors', 'fp8'\], got gptq"
    ):
        load_target(tmp_path, device="cpu")


def test_integers_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    groups = {"config_groups": {"group_0": {"weights": weights}}}
    set_quantisation(save(tmp_path), **ROWS | groups | {"format": "pack-quantized"})
    with pytest.raises(ConfigError, match=r"or FP8 where compressed-tensors .* pack-quantized"):
        load_target(tmp_path, device="cpu")


def test_missing_package_of_a_quantised_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_quantisation(save(tmp_path), quant_method="bitsandbytes", load_in_8bit=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EnvironmentFault, match="pip install bitsandbytes"):
        load_target(tmp_path, device="cpu")


MAPS = {
    "one_device": {"": "cpu"},
    "auto": "auto",
    "offloaded": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
}


@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_target_spread_by_a_map_is_the_same_target(
    device_map: str | dict[str, str], tmp_path: Path
) -> None:
    path = save(tmp_path)
    plain = load_target(path, dtype="float32", device="cpu")
    spread = load_target(path, dtype="float32", device="cpu", device_map=device_map)
    is_offloaded = any(p.is_meta for p in spread.model.parameters())
    assert is_offloaded == ("lm_head" in device_map)
    assert torch.equal(logits_of(spread), logits_of(plain))
    assert target_hashes(spread) == target_hashes(plain)
    assert_same_texts(plain, spread)


@pytest.mark.gpu
@pytest.mark.parametrize("device_map", MAPS.values(), ids=MAPS)
def test_map_on_a_gpu_decodes_the_texts_of_the_whole_target(
    device_map: str | dict[str, str], tmp_path: Path
) -> None:
    """Layers in memory and on the disk come to the GPU as they run."""
    path = save(tmp_path)
    plain = load_target(path, dtype="float32", device="cuda")
    spread = load_target(path, dtype="float32", device="cuda", device_map=on_gpu(device_map))
    assert any(p.is_meta for p in spread.model.parameters()) == ("lm_head" in device_map)
    assert_same_texts(plain, spread)


def on_gpu(device_map: str | dict[str, str]) -> str | dict[str, int | str]:
    """The map with the GPU for the CPU; beside a layer on the disk another one in memory."""
    if isinstance(device_map, str):
        return device_map
    places = {name: 0 if place == "cpu" else place for name, place in device_map.items()}
    return places | ({"model.layers.0": "cpu"} if "disk" in places.values() else {})


def assert_same_texts(plain: Target, spread: Target) -> None:
    """Both decode the same, each with heads of its own."""
    engine = replace(small_pool(64), block_size=16)  # the least on a GPU
    texts = [
        texts_of(run(SpecDecoder(target, tiny_heads(target), engine=engine)))
        for target in (plain, spread)
    ]
    assert texts[0] == texts[1]


def test_map_that_offloads_what_heads_read_is_refused(tmp_path: Path) -> None:
    device_map = {**MAPS["offloaded"], "lm_head": "disk"}
    with pytest.raises(ConfigError, match=r"model\.device_map must place .* 'lm_head': 'meta'"):
        load_target(save(tmp_path), dtype="float32", device="cpu", device_map=device_map)


def test_decoding_over_several_gpus_of_a_map_is_refused(tmp_path: Path) -> None:
    target = load_target(save(tmp_path), dtype="float32", device="cpu", device_map={"": "cpu"})
    target.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    with pytest.raises(ConfigError, match=r"\['0', '1'\]; set model\.tp_plan=tensor"):
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))


def test_map_with_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"model\.device_map .* got 2 processes"):
        load_target(save(tmp_path), device="cpu", device_map="auto")


@pytest.mark.parametrize(
    ("schema", "words", "key"),
    [
        (EvalConfig, "model.device_map=auto model.tp_plan=tensor", "model.device_map"),
        (EvalConfig, "model.device_map=auto engine=h200", "engine.cuda_graphs"),
        (EvalConfig, "model.tp_plan=tensor spec.draft_length=expected_gain", "draft_cost_ratio"),
        (EvalConfig, "model.device_map=auto model.weights=random", "model.device_map"),
        (TrainConfig, "model.tp_plan=tensor", "model.tp_plan"),
        (TrainConfig, "model.device_map=auto trainer.compile=true", "trainer.compile"),
        (TrainConfig, "model.device_map=auto trainer.shard_target=true", "trainer.shard_target"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else value.__name__,
)
def test_keys_that_do_not_go_with_the_placing_are_refused(
    schema: type, words: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key} must be .* for model|must be none for train"):
        compose_config(schema, words.split())


def test_ranks_with_requests_of_their_own_may_follow_their_own_clocks() -> None:
    compose_config(EvalConfig, ["model.tp_plan=data", "spec.draft_length=expected_gain"])


def test_dtype_of_torch_stands_for_its_name(tmp_path: Path) -> None:
    save(tmp_path)
    for dtype in (torch.bfloat16, "bfloat16"):
        assert load_target(tmp_path, dtype=dtype, device="cpu").dtype == torch.bfloat16
    with pytest.raises(ConfigError, match=r"model\.dtype must be one of .*, got torch\.int8; "):
        load_target(tmp_path, dtype=torch.int8, device="cpu")


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    config = json.loads((save(tmp_path) / "config.json").read_text())
    classes = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": classes}))
    load_target(tmp_path, dtype="float32", device="cpu")  # the library's own class
    foreign = {"auto_map": classes, "model_type": "evil"}
    (tmp_path / "config.json").write_text(json.dumps(config | foreign))
    with pytest.raises(ConfigError, match="'evil'"):
        load_target(tmp_path, device="cpu")
    assert not (tmp_path / "ran").exists()
