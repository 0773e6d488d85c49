"""The time boxes of tools/gpu_study.py: a stage that is late is stopped, a finished one kept."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import gpu_study as tool

SLEEPS = ["-c", "import time; time.sleep(60)"]


def study(folder: Path, *, limit_s: float) -> tool.Study:
    (folder / "out").mkdir(exist_ok=True)
    args = argparse.Namespace(
        work=folder, out=folder / "out", limit_s=limit_s, tiny=False, model="lab_tiny"
    )
    return tool.Study(args)


def test_late_stage_is_stopped_and_runs_again(tmp_path: Path) -> None:
    late = study(tmp_path, limit_s=1)
    late.run("prices", SLEEPS)
    assert late.stages["prices"]["code"] == -15
    again = study(tmp_path, limit_s=60)
    again.run("prices", ["-c", "print('priced')"])
    assert again.stages["prices"]["code"] == 0
    assert "priced" in (tmp_path / "log.txt").read_text()
    third = study(tmp_path, limit_s=60)
    third.run("prices", SLEEPS)
    assert third.stages["prices"]["note"] == "done before"
    tool.collect(third)
    assert json.loads((tmp_path / "out" / "study.json").read_text())["stages"] == third.stages


def test_stage_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "GRACE_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    assert tool.wait(process, seconds=1.0) == -9


def test_time_left_over_by_a_stage_goes_to_the_next(tmp_path: Path) -> None:
    kept = study(tmp_path, limit_s=sum(tool.BOXES.values()))
    kept.run("target", ["-c", ""])
    kept.run("answers", ["-c", ""])
    (left,) = re.findall(r"== answers, (\d+) s", (tmp_path / "log.txt").read_text())
    both = tool.BOXES["target"] + tool.BOXES["answers"]
    assert tool.BOXES["answers"] < int(left) <= both
