"""The notebooks of `examples/` run from a clean folder, on the CPU, at a size of seconds."""

import json
import os
import subprocess
import sys

import pytest

from mtp_research.runtime.provenance import REPOSITORY_ROOT

SMALL = {
    "tutorial": {"TUTORIAL_STEPS": "6", "TUTORIAL_PROMPTS": "3"},
    "released_model": {
        "MODEL": "assets/lab_tiny/target",
        "NUM_QUESTIONS": "48",
        "NUM_STEPS": "2",
    },
}


def cells(name: str) -> list[str]:
    notebook = json.loads((REPOSITORY_ROOT / "examples" / f"{name}.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "stored outputs grow stale"
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def test_every_notebook_is_run():
    found = {path.stem for path in (REPOSITORY_ROOT / "examples").glob("*.ipynb")}
    assert found == set(SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_notebook_runs(name, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text("\n\n".join(cells(name)))
    finished = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | SMALL[name] | {"PYTHONPATH": str(REPOSITORY_ROOT), "FOLDER": "released"},
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "TrainedHeads(" in finished.stdout
    assert "'training'" in finished.stdout
    assert "identical" in finished.stdout
