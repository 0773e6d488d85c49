"""`launcher=slurm` without a cluster: what is submitted, and what a machine without it says."""

import json
import sys
import types
from pathlib import Path

import pytest

from mtp_research.app.cli import job_command, run_entry
from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import LauncherConfig


def never(config: TrainConfig, output_dir: Path) -> None:
    pytest.fail("the work must not start on this machine")


def test_slurm_without_submitit_exits_4_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    argv = ["launcher=slurm", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(TrainConfig, never, argv=argv) == 4
    message = capsys.readouterr().err
    assert "pip install submitit" in message
    assert message.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_slurm_submits_torchrun_with_the_same_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, object] = {}

    class Executor:
        def __init__(self, *, folder: str, cluster: str) -> None:
            seen.update(folder=folder, cluster=cluster)

        def update_parameters(self, **parameters: object) -> None:
            seen.update(parameters)

        def submit(self, command: list[str]) -> types.SimpleNamespace:
            seen["command"] = command
            return types.SimpleNamespace(job_id="77")

    fake = types.ModuleType("submitit")
    fake.AutoExecutor = Executor
    fake.helpers = types.SimpleNamespace(CommandFunction=list)
    monkeypatch.setitem(sys.modules, "submitit", fake)
    words = ["trainer=zero2", "launcher=slurm", "launcher.num_nodes=2", "launcher.partition=gpu"]
    assert run_entry(TrainConfig, never, argv=[*words, f"output_dir={tmp_path / 'run'}"]) == 0
    assert json.loads(capsys.readouterr().out)["job_id"] == "77"
    assert seen["nodes"] == 2
    assert seen["slurm_partition"] == "gpu"
    assert seen["slurm_additional_parameters"] == {"signal": "TERM@120"}
    assert "trainer=zero2" in seen["command"]
    assert not any(str(word).startswith("launcher") for word in seen["command"])


def test_job_command_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    launcher = LauncherConfig(kind="slurm", num_nodes=4, gpus_per_node=8)
    command = job_command(launcher, ["seed=1"], output_dir=tmp_path)
    assert command[:2] == ["bash", "-c"]
    assert "exec torchrun" in command[2]
    assert command[4:7] == ["4", "8", "29511"]
    assert command[-2:] == ["seed=1", f"output_dir={tmp_path}"]
