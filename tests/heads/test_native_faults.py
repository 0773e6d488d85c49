"""Checkpoints whose files and configuration do not agree, as targets and as MTP modules."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mtp_research.heads.export import export_heads
from mtp_research.heads.native import has_native_heads, load_native_heads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, warn_of_family
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests import tiny
from tests.heads.release import change_config, change_mtp_file, write_release

INDEX = "model.safetensors.index.json"
FIRST_SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def deepseek() -> Target:
    return tiny.tiny_target("deepseek_v3", dtype=torch.float32)


def test_other_number_of_experts_is_refused_by_name(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    fewer = tiny.tiny_target("deepseek_v3", dtype=torch.float32, n_routed_experts=4)
    first = r"12 are extra \['model\.layers\.2\.mlp\.experts\.4\.down_proj\.weight'"
    with pytest.raises(IntegrityError, match=first) as caught:
        load_native_heads(tmp_path, fewer)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("file", ["../outside.safetensors", "/tmp/outside.safetensors"])
def test_target_whose_index_leaves_its_folder_is_refused(
    file: str, deepseek: Target, tmp_path: Path
) -> None:
    write_release(deepseek, tmp_path / "model")
    (tmp_path / "model" / FIRST_SHARD).rename(tmp_path / "outside.safetensors")
    path = tmp_path / "model" / INDEX
    path.write_text(path.read_text().replace(FIRST_SHARD, file))
    with pytest.raises(IntegrityError, match=r"must name files of its own folder"):
        load_target(tmp_path / "model", device="cpu")


def test_target_without_a_shard_is_refused_by_name(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    (tmp_path / FIRST_SHARD).unlink()
    with pytest.raises(IntegrityError, match=FIRST_SHARD) as caught:
        load_target(tmp_path, device="cpu")
    assert caught.value.exit_code == 3


def test_truncated_file_is_named(deepseek: Target, tmp_path: Path) -> None:
    write_release(deepseek, tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=f"in {re.escape(shard.name)}"):
        load_target(tmp_path, device="cpu")


def test_run_recorded_as_another_family_is_warned_of(
    deepseek: Target, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_family(deepseek, family="deepseek_v3")
    assert not caplog.records
    warn_of_family(deepseek, family="glm4_moe")
    assert (
        "holds a deepseek_v3 model and the run is recorded as model.family=glm4_moe" in caplog.text
    )


def test_stages_that_are_no_modules_are_not_taken_for_modules(tmp_path: Path) -> None:
    """DSpark stages lie under `mtp.*` as well, without a projection of two halves."""
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    write_release(target, tmp_path)
    names = ("main_proj.weight", "markov_head.weight", "confidence_head.weight")
    change_mtp_file(tmp_path, {f"mtp.0.{name}": torch.zeros(2) for name in names})
    assert not has_native_heads(tmp_path, target)
    with pytest.raises(
        IntegrityError, match=r"must hold MTP modules, the first under mtp\.\*, got 0"
    ):
        load_native_heads(tmp_path, target)


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def test_modules_with_a_gap_between_them_are_refused(tmp_path: Path) -> None:
    target = tiny.tiny_target("mimo_v2", dtype=torch.float32)
    tensors = write_release(target, tmp_path)
    change_mtp_file(tmp_path, renamed(tensors, "mtp.layers.1.", "mtp.layers.3."))
    with pytest.raises(IntegrityError, match=r"model\.mtp\.layers\.1\..*model\.mtp\.layers\.3\."):
        load_heads(tmp_path, target)


def test_kimi_is_loaded_by_its_type_and_has_no_modules(tmp_path: Path) -> None:
    target = tiny.tiny_target("kimi_k2", dtype=torch.float32)
    target.model.save_pretrained(tmp_path)
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    change_config(tmp_path, {"model_type": "kimi_k2", "auto_map": code})
    loaded = load_target(tmp_path, dtype="float32", device="cpu")
    assert loaded.family_name == "kimi_k2"
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 0
    with pytest.raises(IntegrityError, match=r"got 0 .num_nextn_predict_layers promises 0"):
        load_native_heads(tmp_path, loaded)


def test_export_names_conventions_that_published_names_cannot_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.tiny_target("mimo", dtype=torch.float32)
    usual = {"hidden_source": "pre_norm", "concat_order": "hidden_first"}
    export_heads(tiny.tiny_heads(target, **usual), tmp_path / "usual")
    assert not caplog.records
    export_heads(tiny.tiny_heads(target, concat_order="hidden_first"), tmp_path / "other")
    assert r"hidden_source=post_norm (the family's: pre_norm)" in caplog.text
    assert "concat_order" not in caplog.text


def test_folder_of_a_model_without_a_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="got model_type 'None'"):
        load_target(tmp_path, device="cpu")
