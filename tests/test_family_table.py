"""The docs say what the family table and the tests say; every family is checked somehow."""

import pytest

from mtp_research.models.families import FAMILIES
from tools import family_table
from tools.family_table import PATH

COMMAND = "run python tools/family_table.py --write"


def test_docs_are_what_the_tool_writes() -> None:
    assert PATH.read_text(encoding="utf8") == family_table.family_table(), COMMAND


def test_check_of_a_family_comes_from_what_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert family_table.checks_of("glm4_moe") == ["paged", "exact", "names", "reference", "library"]
    others = family_table.FAMILIES_REFERENCED - {"glm4_moe"}
    monkeypatch.setattr(family_table, "FAMILIES_REFERENCED", others)
    assert family_table.checks_of("glm4_moe") == ["paged", "exact", "names", "library"]


def test_every_family_is_checked() -> None:
    table = family_table.family_table()
    unchecked = [line for line in table.splitlines() if line.endswith("| nothing |")]
    assert unchecked == []
    assert all(f"| {name} |" in table for name in FAMILIES)
