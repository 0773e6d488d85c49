"""Step folders: whole or absent, verified on load, rotated; locks and settings."""

import hashlib
import json
import resource
import shutil

import pytest
import torch
from safetensors import SafetensorError

from mtp_research.runtime.errors import ConfigError, IntegrityError, NumericFault
from mtp_research.runtime.files import is_full_disk
from mtp_research.training.checkpoint import (
    check_same_run,
    clear_leftovers,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    step_folders,
)

FILES = ["manifest.json", "head.safetensors", "optimizer.safetensors", "state.json"]


def save(root, step, *, keep_last=2, value=None):
    tensors = {
        "head": {"weight": torch.full((4, 3), float(step if value is None else value))},
        "optimizer": {"step": torch.tensor(float(step))},
    }
    return save_checkpoint(
        root, step=step, tensors=tensors, state={"seen": [step, 0.1]}, keep_last=keep_last
    )


def test_save_checkpoint_roundtrip(tmp_path):
    folder = save(tmp_path, 7)
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.step == 7
    assert checkpoint.state == {"seen": [7, 0.1]}
    assert torch.equal(checkpoint.tensors("head")["weight"], torch.full((4, 3), 7.0))
    assert (tmp_path / "latest").read_text() == "step_000007\n"


def test_save_checkpoint_keeps_the_newest(tmp_path):
    for step in (5, 10, 1_000_000):
        save(tmp_path, step)
    assert [folder.name for folder in step_folders(tmp_path)] == ["step_000010", "step_1000000"]
    assert not list(tmp_path.glob(".*ing-*"))
    assert not list(tmp_path.glob(".retired-*"))


def test_save_checkpoint_replaces_a_damaged_folder_of_the_same_step(tmp_path):
    (save(tmp_path, 3) / "head.safetensors").write_bytes(b"")
    save(tmp_path, 3, value=8.0)
    assert load_checkpoint(tmp_path / "step_000003").tensors("head")["weight"][0, 0] == 8.0


def test_save_checkpoint_non_finite_tensor_is_refused(tmp_path):
    with pytest.raises(NumericFault, match="head"):
        save(tmp_path, 1, value=float("nan"))
    assert not step_folders(tmp_path)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_load_checkpoint_damaged_file_is_named(tmp_path, file, damage):
    path = save(tmp_path, 1) / file
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(content[:-5])
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises(IntegrityError, match=file):
        load_checkpoint(tmp_path / "step_000001")


def test_load_checkpoint_any_flipped_bit_of_the_manifest_is_refused(tmp_path):
    path = save(tmp_path, 1) / "manifest.json"
    content = path.read_bytes()
    for index, byte in enumerate(content):
        path.write_bytes(content[:index] + bytes([byte ^ 4]) + content[index + 1 :])
        if not chr(byte).isspace():
            with pytest.raises(IntegrityError, match="manifest"):
                load_checkpoint(path.parent)


def test_load_checkpoint_file_outside_the_folder_is_refused(tmp_path):
    folder = save(tmp_path, 1)
    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    body["files"]["../latest"] = {"bytes": 12, "sha256": "0"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"manifest": body, "sha256": digest}))
    with pytest.raises(IntegrityError, match="latest"):
        load_checkpoint(folder)


def rewrite(folder, **changes):
    """Change the manifest, with a valid hash of its own, as another version would."""
    body = json.loads((folder / "manifest.json").read_text())["manifest"] | changes
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({"manifest": body, "sha256": digest}))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"files": []}, "files must give bytes and sha256"),
        ({"files": {"state.json": {"bytes": 3}}}, "files must give bytes and sha256"),
        ({"files": {"state.json": None}}, "files must give bytes and sha256"),
        ({"step": -3}, "step must be an integer of at least 0, got -3"),
        ({"step": "1"}, "step must be an integer of at least 0, got '1'"),
        ({"step": True}, "step must be an integer of at least 0, got True"),
        ({"step": 4}, "step_000001: holds step 4, which is not that of its name"),
        ({"schema": 2}, "schema must be 1, got 2"),
    ],
    ids=str,
)
def test_load_checkpoint_odd_manifest_is_refused_by_name(tmp_path, changes, expected):
    folder = save(tmp_path, 1)
    load_checkpoint(folder)
    rewrite(folder, **changes)
    with pytest.raises(IntegrityError, match=expected) as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_load_checkpoint_odd_state_is_refused_by_name(tmp_path, content):
    folder = save(tmp_path, 1)
    (folder / "state.json").write_text(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    rewrite(folder, files={"state.json": facts})
    with pytest.raises(IntegrityError, match=r"state\.json"):
        load_checkpoint(folder)


def test_full_disk_leaves_older_steps_and_nothing_else(tmp_path):
    save(tmp_path, 1)
    before = sorted(tmp_path.rglob("*"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises((OSError, SafetensorError)) as caught:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert is_full_disk(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert newest_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)


def test_clear_leftovers_takes_files_and_links_and_keeps_what_they_point_to(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (tmp_path / ".writing-x").symlink_to(precious)
    (tmp_path / ".retired-x").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".writing-y").write_text("a file")
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    assert (precious / "file").read_text() == "kept"
    save(tmp_path, 1)
    (tmp_path / "step_000002").write_text("no folder")
    save(tmp_path, 2)
    assert not list(tmp_path.glob(".retired-*"))


def test_clear_leftovers_refuses_a_folder_in_place_of_latest(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="must leave the name latest to a file"):
        clear_leftovers(tmp_path)


def test_newest_checkpoint_skips_a_damaged_step(tmp_path, caplog):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "optimizer.safetensors").unlink()
    assert newest_checkpoint(tmp_path).step == 1
    assert "step_000002" in caplog.text
    assert "optimizer.safetensors" in caplog.text


@pytest.mark.parametrize(
    ("latest", "is_warned"), [("step_000099", True), ("", True), ("step_000001", False)]
)
def test_newest_checkpoint_warns_of_a_latest_that_names_no_step(
    latest, is_warned, tmp_path, caplog
):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "latest").write_text(latest)
    assert newest_checkpoint(tmp_path).step == 2
    assert ("goes on from step_000002" in caplog.text) == is_warned


def test_newest_checkpoint_without_steps_is_none(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    (tmp_path / ".writing-step_000001-99").mkdir()
    assert newest_checkpoint(tmp_path) is None


def test_newest_checkpoint_all_damaged_is_refused(tmp_path):
    (save(tmp_path, 1) / "state.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"state\.json"):
        newest_checkpoint(tmp_path)


def test_check_same_run_lists_every_changed_key():
    check_same_run({"seed": 0}, {"seed": 0})
    with pytest.raises(ConfigError) as fault:
        check_same_run({"seed": 0, "old": 1, "same": 2}, {"seed": 1, "new": 3, "same": 2})
    text = str(fault.value)
    assert "seed: checkpoint 0, now 1" in text
    assert "old: checkpoint 1, now None" in text
    assert "same" not in text


def test_check_same_run_knows_what_runs_did_before_a_key_was_there():
    check_same_run({"seed": 0}, {"seed": 0, "objective.half_logits": False})
    with pytest.raises(ConfigError, match="half_logits: checkpoint False, now True"):
        check_same_run({"seed": 0}, {"seed": 0, "objective.half_logits": True})


def test_check_same_run_reads_the_keys_of_older_runs():
    old = {"data (sha256)": "a", "model (sha256 of its final norm)": "b"}
    check_same_run(old, {"data_sha256": "a", "model_sha256": "c"})
    with pytest.raises(ConfigError, match="data_sha256: checkpoint 'a', now 'd'"):
        check_same_run(old, {"data_sha256": "d", "model_sha256": "c"})
    with pytest.raises(ConfigError, match="model_sha256: checkpoint 'b', now 'c'"):
        check_same_run({"model_sha256": "b"}, {"model_sha256": "c"})


def test_clear_leftovers_removes_what_a_crash_left(tmp_path):
    folder = save(tmp_path, 1)
    shutil.copytree(folder, tmp_path / ".writing-step_000002-1")
    clear_leftovers(tmp_path)
    assert not (tmp_path / ".writing-step_000002-1").exists()
    assert load_checkpoint(folder).step == 1


def test_check_same_run_allowed_drift_passes():
    check_same_run({"seed": 0, "k": 1}, {"seed": 1, "k": 1}, allow_drift=["seed"])
    with pytest.raises(ConfigError, match=r"trainer\.allow_drift=\[k\]"):
        check_same_run({"seed": 0, "k": 1}, {"seed": 1, "k": 2}, allow_drift=["seed"])
