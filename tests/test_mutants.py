"""The list of planted bugs still fits the code; `make mutants` plants them."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_mutant_can_still_be_planted() -> None:
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    listed = mutants.read_mutants()
    assert mutants.faults_of(listed) == []
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf8")
    assert f"The list has {len(listed)} bugs." in page
    changed = [{**listed[0], "old": "no such line"}, listed[1], listed[1]]
    assert len(mutants.faults_of(changed)) == 2
