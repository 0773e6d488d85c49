"""The study tool: commands that compose, results that are not made twice, codes handed on."""

import sys
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
from tools import gpu_study

WORDS = ["--model", "lab_tiny", "--corpus", "CORPUS"]


def record(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list:
    """Commands that a call would run, and its exit code at the end."""
    ran: list = []

    class Done:
        returncode = code

    monkeypatch.setattr(
        gpu_study.subprocess, "run", lambda command, **_: ran.append(command) or Done()
    )
    ran.append(gpu_study.main([*WORDS, "--out", str(folder), *words]))
    return ran


@pytest.mark.parametrize("flags", [[], ["--tiny"]])
def test_every_stage_is_a_command_that_composes(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = record(tmp_path, flags, monkeypatch)[:-1]
    assert len(commands) == 8
    for executable, entry, *words in commands:
        assert executable == sys.executable
        if entry == "-m":
            assert words[:2] == ["mtp_research", "regenerate"]
        else:
            compose_config(TrainConfig if entry.endswith("train.py") else EvalConfig, words)


def test_stage_with_a_result_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "target" / "target").mkdir(parents=True)
    (tmp_path / "target" / "target" / "config.json").write_text("{}")
    ran = record(tmp_path, ["--stages", "target", "matrix"], monkeypatch)
    assert [command[2] for command in ran[:-1]] == ["experiment=policy_matrix"]


def test_first_failing_stage_ends_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = record(tmp_path, [], monkeypatch, code=-9)
    assert ran[-1] == 137
    assert len(ran) == 2
