"""Runs the interpreter suites in a process of their own: see interpreter_suite.py for why."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("interpreter_suite", "distill_interpreter_suite")


@pytest.mark.timeout(240)
def test_kernels_in_triton_interpreter_match_slow_references():
    triton = pytest.importorskip("triton")
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        pytest.skip("the interpreter of triton < 3.7 needs numpy < 2.4")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    suites = (f"tests/kernels/{name}.py" for name in SUITES)
    command = [sys.executable, "-m", "pytest", *suites, "-q"]
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=100"]
    run = subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{run.stdout[-6000:]}\n{run.stderr[-2000:]}"


def _release(package: ModuleType) -> tuple[int, int]:
    major, minor = package.__version__.split(".")[:2]
    return int(major), int(minor)
