"""Docs and README say what the family table and the tests say; every family is checked somehow."""

import pytest

from mtp_research.models.families import FAMILIES
from tools import family_table
from tools.family_table import PATH, README, README_END, README_START, readme_section, with_section

COMMAND = "run python tools/family_table.py --write"


def test_docs_are_what_the_tool_writes() -> None:
    assert PATH.read_text(encoding="utf8") == family_table.family_table(), COMMAND


def test_readme_table_is_what_the_tool_writes() -> None:
    readme = README.read_text(encoding="utf8")
    assert readme == with_section(readme), COMMAND


def test_only_the_section_between_the_markers_is_replaced() -> None:
    readme = f"before\n{README_START}old\n{README_END}after\n"
    assert with_section(readme) == f"before\n{README_START}{readme_section()}{README_END}after\n"
    with pytest.raises(ValueError, match="not enough values"):
        with_section("no markers")


def test_check_of_a_family_comes_from_what_the_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "| glm4_moe | glm4_moe | `model.layers.{layer}.*` | paged, exact, names, reference," in (
        readme_section()
    )
    others = family_table.FAMILIES_REFERENCED - {"glm4_moe"}
    monkeypatch.setattr(family_table, "FAMILIES_REFERENCED", others)
    assert "| glm4_moe | glm4_moe | `model.layers.{layer}.*` | paged, exact, names, library" in (
        readme_section()
    )


def test_every_family_is_checked() -> None:
    table = family_table.family_table()
    unchecked = [line for line in table.splitlines() if line.endswith("| nothing |")]
    assert unchecked == []
    assert all(f"| {name} |" in table for name in FAMILIES)
