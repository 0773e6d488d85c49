"""The doctor: its own machine is fine, each fault becomes a finding, no secret is printed."""

import json
import urllib.error
from pathlib import Path

import pytest

from mtp_research import doctor


def test_versions_are_within_the_ranges_of_the_project() -> None:
    status, detail = doctor.check_versions()
    assert status == "ok", detail
    assert "torch 2." in detail


def test_package_outside_its_range_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1")
    status, detail = doctor.check_versions()
    assert status == "fail"
    assert "torch must be " in detail
    assert detail.endswith("got 0.1")


def test_kernel_agrees_with_its_reference_in_a_process_of_its_own() -> None:
    status, detail = doctor.check_triton()
    assert status == "ok"
    assert "bfloat16 is refused" in detail or "compiled for" in detail


@pytest.mark.slow
def test_open_interpreter_trap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = "checks.check_kernel_dtype = lambda *args, **kwargs: None\n"
    opened = "import mtp_research.kernels.checks as checks\n" + guard + doctor._TRITON_PROBE
    monkeypatch.setattr(doctor, "_TRITON_PROBE", opened)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    finding = doctor.run_check("triton", doctor.check_triton)
    assert finding.status == "fail"
    assert "bfloat16" in finding.detail


def test_two_processes_sum() -> None:
    status, detail = doctor.check_processes()
    assert (status, detail.split()[0]) == ("ok", "two")


def test_hub_out_of_reach_is_a_note_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(doctor.urllib.request, "urlopen", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert doctor.check_hub()[0] == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in doctor.check_hub()[1]


def test_disk_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, detail = doctor.check_disk()
    assert status in ("ok", "note")
    assert "MB/s synced" in detail
    assert list(tmp_path.iterdir()) == []


def test_wandb_key_is_noticed_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "swordfish-123456")
    monkeypatch.setenv("WANDB_MODE", "online")
    finding = doctor.run_check("wandb", doctor.check_wandb)
    assert finding.status == "ok"
    assert "key set" in finding.detail
    assert "swordfish" not in finding.detail


def test_wandb_without_a_key_is_said_to_warn_and_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(doctor, "_netrc_names", lambda host: False)
    status, detail = doctor.check_wandb()
    assert status == "note"
    assert "online would warn and go on" in detail


def test_fault_of_a_check_is_a_redacted_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-9876")

    def broken() -> tuple[doctor.Status, str]:
        raise OSError("cannot open swordfish-9876")

    finding = doctor.run_check("disk", broken)
    assert finding.status == "fail"
    assert finding.detail == "OSError: cannot open [redacted]"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("fail", 4)])
def test_exit_code_and_last_line_say_what_failed(
    status: doctor.Status,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: (status, "a detail")})
    assert doctor.main() == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [f"{status:5} one          a detail"]
    assert json.loads(last)["failed"] == ["one"] * (status == "fail")
