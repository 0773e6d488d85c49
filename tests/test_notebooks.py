"""The notebooks of `examples/` run from a clean folder, on the CPU, at a size of seconds."""

import json

import pytest

from mtp_research.runtime.provenance import REPOSITORY_ROOT

SMALL = {
    "tutorial": {"TUTORIAL_STEPS": "6", "TUTORIAL_PROMPTS": "3"},
    "released_model": {
        "MODEL": "assets/lab_tiny/target",
        "NUM_QUESTIONS": "24",
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
def test_notebook_runs(name, tmp_path, monkeypatch, capsys):
    for key, value in (SMALL[name] | {"FOLDER": "released"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    exec(compile("\n\n".join(cells(name)), name, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "TrainedHeads(" in printed
    assert "'training'" in printed
    assert "identical" in printed
