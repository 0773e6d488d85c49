"""MTP modules by hub id: what is asked for, and what the cache gives or lacks without a network."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from mtp_research.heads import weights as hub
from mtp_research.heads.init import init_heads
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.heads.release import write_release

NAME = "organisation/name"
TARGET_SHARD, MTP_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def target() -> Target:
    return tiny.tiny_target("glm4_moe", dtype=torch.float32)


@pytest.fixture
def snapshot(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with a release, of which the shard of the target was never fetched."""
    model = tmp_path / "cache" / "models--organisation--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    folder = model / "snapshots" / "abc"
    write_release(target, folder)
    (folder / TARGET_SHARD).unlink()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def test_cached_modules_load_by_hub_id(target: Target, snapshot: Path) -> None:
    by_name, by_folder = load_heads(NAME, target), load_heads(snapshot, target)
    for name, tensor in by_folder.state_dict().items():
        assert torch.equal(by_name.state_dict()[name], tensor), name


def test_training_starts_from_the_modules_of_a_hub_id(target: Target, snapshot: Path) -> None:
    expected = load_heads(snapshot, target)
    named = Target(target.model, target.family_name, path=NAME)
    heads = MTPHeads(named, spec=HeadSpec(num_mtp_modules=expected.spec.num_mtp_modules))
    init_heads(heads, init="native")
    assert torch.equal(heads.mtp_modules[0].eh_proj.weight, expected.mtp_modules[0].eh_proj.weight)


def test_modules_that_the_cache_lacks_are_refused(target: Target, snapshot: Path) -> None:
    (snapshot / MTP_SHARD).unlink()
    with pytest.raises(ConfigError, match=rf"{NAME}.* lacks \['{MTP_SHARD}'\].* offline"):
        load_heads(NAME, target)


def test_hub_id_that_is_not_cached_is_refused(target: Target, snapshot: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'organisation/other' .* cannot be fetched from the hub"
    ):
        load_heads("organisation/other", target)


def test_only_shards_with_modules_are_fetched(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_release(target, tmp_path / "hub")
    (tmp_path / "cache").mkdir()
    asked: list[str] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert (name, revision) == (NAME, "v1")
        asked.extend(allow_patterns)
        for file in allow_patterns:
            if (tmp_path / "hub" / file).is_file():
                shutil.copy(tmp_path / "hub" / file, tmp_path / "cache" / file)
        return str(tmp_path / "cache")

    monkeypatch.setattr(hub, "snapshot_download", download)
    load_heads(f"{NAME}@v1", target)
    assert asked == ["config.json", "model.safetensors.index.json", "head.json", MTP_SHARD]
