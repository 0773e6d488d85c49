"""Heads as a folder for others: written, read again, described, and sent to a faked hub."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from mtp_research.heads import publish
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.provenance import project_version
from tests import tiny

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
SHIPPED = LAB_TINY / "heads" / "chain_n3"


@pytest.fixture(scope="module")
def target():
    return load_target(LAB_TINY / "target", dtype="float32", device="cpu")


def _record(folder: Path) -> dict:
    return json.loads((folder / "head.json").read_text())


class Hub:
    """Keeps what is asked of it; the files are read while they are there."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.files: dict[str, bytes] = {}
        self.fault: Exception | None = None

    def create_repo(self, repo_id: str, **options: object) -> str:
        if self.fault is not None:
            raise self.fault
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        return f"https://hub/{repo_id}"

    def create_branch(self, repo_id: str, **options: object) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def upload_folder(self, *, folder_path: Path, **options: object) -> None:
        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        self.calls.append(("upload_folder", options))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub()
    monkeypatch.setattr(publish, "HfApi", lambda: hub)
    return hub


def test_saved_heads_load_with_weights_spec_provenance_and_ranking(target, tmp_path: Path) -> None:
    heads = load_heads(SHIPPED, target)
    folder = heads.save_pretrained(tmp_path / "new")
    again = load_heads(folder, target)
    assert again.spec == heads.spec
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    shipped = _record(SHIPPED)
    assert again.provenance == shipped["provenance"] != {}
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "head.json",
        "model.safetensors",
        "token_ranking.json",
    }
    heads.save_pretrained(folder)  # into a folder that is there, and from it
    load_heads(folder, target).save_pretrained(folder)
    assert (folder / "token_ranking.json").read_bytes() == (
        SHIPPED / "token_ranking.json"
    ).read_bytes()


def test_card_says_what_head_json_says(target, tmp_path: Path) -> None:
    folder = load_heads(SHIPPED, target).save_pretrained(tmp_path)
    card, record = (folder / "README.md").read_text(), _record(folder)
    walk = record["provenance"]["held_out"]["acceptance_length"]
    assert f"| acceptance length on held-out text | {walk:.3f}" in card
    for fact in (
        "| modules (N) | 3 |",
        "| unroll | chain |",
        "| family | glm4_moe |",
        "| hidden size, vocabulary | 256, 4096 |",
        "| conventions | 3 modules, reads post_norm, recycles post_norm, embedding_first",
        f"| sha256 of the weights | {record['weights_sha256']} |",
        f"| written by | mtp-research {project_version()} |",
    ):
        assert fact in card
    assert card.startswith("---\nlibrary_name: mtp-research\n")
    assert "base_model" not in card
    assert "None" not in card
    assert str(LAB_TINY) not in card


def test_card_of_heads_without_a_past_leaves_out_what_nobody_knows(tmp_path: Path) -> None:
    heads = tiny.tiny_heads(tiny.tiny_target("qwen3"), num_mtp_modules=1)
    card = (heads.save_pretrained(tmp_path) / "README.md").read_text()
    assert "# MTP heads: 1 module\n" in card
    assert "acceptance" not in card
    assert "None" not in card


def test_card_names_the_hub_model_that_the_heads_are_for() -> None:
    record = _record(SHIPPED)
    record["provenance"] |= {"hub_id": "organisation/model@abc", "hub_commit": "abc"}
    card = publish.model_card(record)
    assert "\nbase_model: organisation/model\n" in card
    assert 'load_target("organisation/model")' in card
    assert "| hub commit | abc |" in card


def test_push_makes_the_repository_and_sends_what_save_writes(target, hub: Hub) -> None:
    heads = load_heads(SHIPPED, target)
    assert heads.push_to_hub("me/heads", private=True, revision="dev") == "https://hub/me/heads"
    assert [name for name, _ in hub.calls] == ["create_repo", "create_branch", "upload_folder"]
    assert hub.calls[0][1] == {"repo_id": "me/heads", "private": True, "exist_ok": True}
    assert hub.calls[2][1]["revision"] == "dev"
    assert set(hub.files) == {
        "README.md",
        "head.json",
        "model.safetensors",
        "token_ranking.json",
    }


def test_pushed_heads_load_by_their_hub_id(
    target, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = load_heads(SHIPPED, target)
    heads.push_to_hub("me/heads")
    model = tmp_path / "models--me--heads"
    folder = model / "snapshots" / "abc"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    folder.mkdir(parents=True)
    for name, content in hub.files.items():
        (folder / name).write_bytes(content)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = load_heads("me/heads", target)
    assert again.spec == heads.spec
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"me/heads.* lacks \['model.safetensors'\]"):
        load_heads("me/heads", target)


def test_hub_that_refuses_is_one_line_that_says_how_to_log_in(target, hub: Hub) -> None:
    heads = load_heads(SHIPPED, target)
    hub.fault = HfHubHTTPError.__new__(HfHubHTTPError)
    hub.fault.args = ("401 Unauthorized\nmore",)
    with pytest.raises(EnvironmentFault, match="401 Unauthorized; log in with `hf auth login`"):
        heads.push_to_hub("me/heads")
    hub.fault = HFValidationError("no such name")
    with pytest.raises(ConfigError, match="repo_id must be"):
        heads.push_to_hub("a/b/c")
    assert hub.files == {}
