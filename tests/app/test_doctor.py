"""The doctor: its own machine is fine, each fault becomes a finding, no secret is printed."""

import json
import subprocess
import sys
import urllib.error

import pytest

from mtp_research.app import doctor, self_test
from mtp_research.runtime import provenance


def test_versions_are_within_the_ranges_of_the_project() -> None:
    status, detail = doctor.CHECKS["versions"]()
    assert status == "ok", detail
    assert "torch 2." in detail
    assert "hydra-core 1." in detail


def test_package_outside_its_range_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance.metadata, "version", lambda name: "0.1")
    status, detail = doctor.CHECKS["versions"]()
    assert status == "fail"
    assert "torch must be " in detail
    assert detail.endswith("got 0.1")


def test_busy_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (1e3, 0, 0))
    status, detail = doctor.CHECKS["gpu"]()
    assert status == "note"
    assert "busy: load 1000.0" in detail


def test_kernel_agrees_with_its_reference_in_a_process_of_its_own() -> None:
    status, detail = doctor.CHECKS["triton"]()
    assert status == "ok", detail
    assert "bfloat16 is refused" in detail or "compiled for" in detail


@pytest.mark.slow
def test_open_interpreter_trap_is_found() -> None:
    code = (
        "import mtp_research.kernels.checks as checks\n"
        "checks.check_kernel_dtype = lambda *args, **kwargs: None\n"
        "from mtp_research.app import self_test\n"
        "self_test.torch.cuda.is_available = lambda: False\n"
        "self_test.kernel()"
    )
    command = [sys.executable, "-c", code]
    env = {**doctor.os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": "."}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert "the interpreter took bfloat16" in done.stderr or "bfloat16" in done.stderr
    assert done.returncode == 1


def test_two_processes_sum() -> None:
    assert self_test.processes.__name__ == "processes"
    status, detail = doctor.CHECKS["processes"]()
    assert (status, detail.split()[0]) == ("ok", "two"), detail


def test_hub_out_of_reach_is_a_note_and_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(doctor.urllib.request, "urlopen", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert doctor.CHECKS["hub"]()[0] == "note"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in doctor.CHECKS["hub"]()[1]


def test_wandb_key_is_noticed_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "swordfish-123456")
    monkeypatch.setenv("WANDB_MODE", "online")
    finding = doctor.run_check("wandb")
    assert finding["status"] == "ok"
    assert "key set" in str(finding["detail"])
    assert "swordfish" not in str(finding)


def test_wandb_without_a_key_is_said_to_be_kept_offline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(doctor.Path, "home", lambda: tmp_path)
    status, detail = doctor.CHECKS["wandb"]()
    assert status == "note"
    assert "keeps runs offline" in detail


def test_fault_of_a_check_is_a_redacted_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-9876")

    def broken() -> tuple[str, str]:
        raise OSError("cannot open swordfish-9876")

    monkeypatch.setitem(doctor.CHECKS, "disk", broken)
    finding = doctor.run_check("disk")
    assert finding["status"] == "fail"
    assert finding["detail"] == "OSError: cannot open [redacted]"


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("note", 0), ("fail", 4)])
def test_exit_code_and_last_line_say_what_failed(
    status: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"one": lambda: (status, "a detail")})
    assert doctor.main([]) == code
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines == [f"{status:5} one          a detail"]
    assert json.loads(last)["failed"] == ["one"] * (status == "fail")
