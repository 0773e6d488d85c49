"""Which models are taken, which are refused and why, and what a family's settings change."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.init import init_heads
from mtp_research.heads.native import read_index
from mtp_research.heads.weights import load_heads
from mtp_research.models.block import build_block
from mtp_research.models.loading.load_weights import read_config
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny
from tests.heads.release import write_release


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v4", r"DeepSeek-V4\.1 calls mtp\.\* are DSpark stages"),
        ("gemma2", r"caps scores \(attn_logit_softcapping\)"),
        ("gemma3", "model of images and text; .* gemma3_text"),
        ("step3p7", "model of images and text; Step-3.5 is supported"),
        ("hy_v4", "several residual streams"),
        ("gpt2", "add an entry to mtp_research/models/families.py"),
    ],
)
def test_unsupported_model_type_is_refused_with_the_reason(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError, match=rf"one of \['deepseek_v3'.*{model_type!r}.*{reason}"):
        load_target(tmp_path, device="cpu")


@pytest.mark.parametrize(
    "setting", [{"final_logit_softcapping": 30.0}, {"use_bidirectional_attention": True}], ids=str
)
def test_settings_that_are_not_computed_are_refused_by_name(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"a model without {next(iter(setting))}"):
        tiny.tiny_target("gemma3", dtype=torch.float32, **setting)


@pytest.mark.parametrize("family", ["gemma", "gemma3"])
def test_gemma_heads_from_scratch_leave_the_text_as_it_is(family: str) -> None:
    target = tiny.tiny_target(family, dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=2)
    init_heads(heads, init="target_last_layer")
    prompt = [5, 9, 77, 31, 2, 64]
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy="training", num_speculative_tokens=2),
        engine=EngineConfig(),
    )
    (record,) = decoder.generate([prompt], max_new_tokens=8)
    output = list(record.output_token_ids)
    assert output == oracle.greedy_text(target, prompt, 8)[: len(output)]


def test_gemma_embeddings_are_scaled_for_the_modules_too() -> None:
    target = tiny.tiny_target("gemma3", dtype=torch.float32)
    token = torch.tensor([7])
    expected = target.embed_tokens.weight[token] * target.config.hidden_size**0.5
    torch.testing.assert_close(target.embed_tokens(token), expected)


@pytest.mark.parametrize(
    ("changes", "is_sliding", "window"),
    [
        ({}, False, 4),
        ({"mtp_layer_types": ["sliding_attention"], "mtp_sliding_windows": [6]}, True, 6),
        ({"mtp_layer_types": ["full_attention"], "mtp_sliding_windows": [0]}, False, 4),
    ],
    ids=["without fields", "window", "no window"],
)
def test_exaone_block_follows_the_fields_for_its_modules(
    changes: dict[str, object], is_sliding: bool, window: int
) -> None:
    target = tiny.tiny_target("exaone_moe", dtype=torch.float32, **changes)
    attention = build_block(target.model, target.family).get_submodule("self_attn")
    assert (attention.is_sliding, attention.sliding_window) == (is_sliding, window)


def test_step_block_has_the_heads_of_sliding_layers() -> None:
    target = tiny.tiny_target("step3p5", dtype=torch.float32)
    attention = build_block(target.model, target.family).get_submodule("self_attn")
    assert [attention.num_heads, attention.sliding_window] == [6, 4]
    full, sliding, _ = target.model.base_model.layers
    assert [full.self_attn.num_heads, sliding.self_attn.num_heads] == [4, 6]


def test_step_settings_are_read_as_the_release_writes_them(tmp_path: Path) -> None:
    """Lists of the release have entries for the modules too, and names of its own."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    published = {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_step3p5.Step3p5Config"},
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 3,
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 16,
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_layers_enum": "1,2,3",
        "layer_types": kinds + ["sliding_attention"] * 3,
        "attention_other_setting": {"num_attention_heads": 6},
        "rope_theta": [5e6, *[1e4] * 6],
        "partial_rotary_factors": [0.5, *[1.0] * 6],
        "swiglu_limits": [0.0, 0.0, 7.0, 7.0, 0.0, 0.0, 0.0],
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    config, family = read_config(str(tmp_path))
    assert family == "step3p5"
    assert config.layer_types == kinds
    assert config.mlp_layer_types == ["dense", "sparse", "sparse", "sparse"]
    assert [layer.num_attention_heads for layer in config.per_layer_config] == [4, 6, 6, 6]
    assert (config.num_key_value_heads, config.n_routed_experts) == (2, 8)
    rope = config.rope_parameters
    assert (
        rope["full_attention"]["partial_rotary_factor"],
        rope["full_attention"]["rope_theta"],
    ) == (0.5, 5e6)
    assert rope["sliding_attention"]["rope_theta"] == 1e4
    assert config.swiglu_limits == [0.0, 0.0, 7.0, 7.0]


def test_step_is_loaded_and_saved_in_the_names_of_its_release(tmp_path: Path) -> None:
    target = tiny.tiny_target("step3p5", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    expected = target.model.state_dict()
    assert all(torch.equal(tensor, expected[n]) for n, tensor in loaded.state_dict().items())
    experts = [name for name in read_index(tmp_path).files if ".2.moe." in name]
    parts = ("down_proj.weight", "gate.weight", "gate_proj.weight", "router_bias", "up_proj.weight")
    assert sorted(experts) == [f"model.layers.2.moe.{part}" for part in parts]


def test_modules_that_are_not_chained_run_under_target_roll(tmp_path: Path) -> None:
    """MiMo-V2 in one serving engine: each module reads the target's own hidden state."""
    target = tiny.tiny_target("mimo_v2", dtype=torch.float32)
    write_release(target, tmp_path)
    heads = load_heads(tmp_path, target)
    assert heads.spec.num_mtp_modules == 3
    prompt = [5, 9, 77, 31, 2, 64]
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy="target_roll", num_speculative_tokens=3)
    )
    (record,) = decoder.generate([prompt], max_new_tokens=8)
    output = list(record.output_token_ids)
    assert output == oracle.greedy_text(target, prompt, 8)[: len(output)]
