"""Modules exported beside a quantised target are marked as not quantised."""

import json
from pathlib import Path

import pytest
import torch
from transformers.quantizers.quantizers_utils import should_convert_module

from mtp_research.heads.export import export_heads, stitch_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.runtime.errors import ConfigError
from tests.heads.release import change_config, write_release
from tests.tiny import tiny_heads, tiny_target

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture
def heads() -> MTPHeads:
    return tiny_heads(tiny_target("deepseek_v3", dtype=torch.float32), num_mtp_modules=1)


def exported(heads: MTPHeads, folder: Path, *, alone: bool = False, **config: object) -> dict:
    """`config.json` of an export beside a source with these settings."""
    write_release(heads.target, folder / "release")
    change_config(folder / "release", config)
    write = export_heads if alone else stitch_heads
    write(heads, folder / "new", source=folder / "release")
    return json.loads((folder / "new" / "config.json").read_text())


@pytest.mark.parametrize("alone", [False, True])
def test_library_quantises_the_target_and_not_the_modules(
    alone: bool, heads: MTPHeads, tmp_path: Path
) -> None:
    kept = ["lm_head", "model.layers.1.mlp.gate"]
    quantisation = FP8 | {"modules_to_not_convert": kept}
    config = exported(heads, tmp_path, alone=alone, quantization_config=quantisation)
    listed = config["quantization_config"].pop("modules_to_not_convert")
    assert config["quantization_config"] == FP8
    assert listed[:2] == kept
    assert len(listed) == len(set(listed))
    modules = ("eh_proj", "self_attn.o_proj", "mlp.experts", "mlp.experts.7.up_proj", "mlp.gate")
    assert not any(should_convert_module(f"model.layers.2.{name}", listed) for name in modules)
    assert {f"model.layers.2.{name}" for name in modules} <= set(
        listed
    )  # engines compare whole names
    assert should_convert_module("model.layers.1.self_attn.o_proj", listed)
    assert should_convert_module("model.layers.1.mlp.experts.7.up_proj", listed)


@pytest.mark.parametrize(
    ("method", "key"),
    [
        ("compressed-tensors", "ignore"),
        ("modelopt", "ignore"),
        ("bitsandbytes", "llm_int8_skip_modules"),
    ],
)
def test_each_method_has_its_list(method: str, key: str, heads: MTPHeads, tmp_path: Path) -> None:
    config = exported(heads, tmp_path, quantization_config={"quant_method": method, key: None})
    assert "model.layers.2.eh_proj" in config["quantization_config"][key]
    assert config["quantization_config"].keys() == {"quant_method", key}


def test_list_that_vllm_prefers_is_completed_too(heads: MTPHeads, tmp_path: Path) -> None:
    quantisation = FP8 | {"ignored_layers": ["lm_head"]}
    config = exported(heads, tmp_path, quantization_config=quantisation)["quantization_config"]
    assert config["ignored_layers"] == ["lm_head", *config["modules_to_not_convert"]]


def test_unquantised_source_gets_no_list(heads: MTPHeads, tmp_path: Path) -> None:
    assert "quantization_config" not in exported(heads, tmp_path)


def test_method_without_a_known_list_is_refused_before_anything_is_written(
    heads: MTPHeads, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"got quant_method 'gptq'.*unquantised checkpoint"):
        exported(heads, tmp_path, quantization_config={"quant_method": "gptq"})
    assert not (tmp_path / "new").exists()


def test_quantisation_described_in_another_file_alone_is_refused(
    heads: MTPHeads, tmp_path: Path
) -> None:
    write_release(heads.target, tmp_path / "release")
    (tmp_path / "release" / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json alone"):
        stitch_heads(heads, tmp_path / "new", source=tmp_path / "release")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_keys_that_an_engine_wants_are_written_where_the_source_has_none(
    engine: str, heads: MTPHeads, tmp_path: Path
) -> None:
    write_release(heads.target, tmp_path / "release")
    for name, changes, expected in (
        ("saved", {}, "sigmoid"),  # by transformers
        ("released", {"scoring_func": "softmax"}, "softmax"),
    ):
        change_config(tmp_path / "release", changes)
        stitch_heads(heads, tmp_path / name, source=tmp_path / "release", engine=engine)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["scoring_func"], config["topk_method"]) == (expected, "noaux_tc")
