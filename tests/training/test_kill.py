"""A run that is killed with -9 goes on and ends bit-identical; twenty kills: tools/kill_test.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_killed_run_resumes_and_ends_bit_identical() -> None:
    command = [sys.executable, "tools/kill_test.py", "--kills", "2", "--steps", "14"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bit_identical"]
    assert result["kills"] == 2
