"""docs/families.md says what the table and the tests say, and every family is checked somehow."""

from mtp_research.models.families import FAMILIES
from tools.family_table import PATH, family_table


def test_docs_are_what_the_tool_writes() -> None:
    command = "run python tools/family_table.py --write"
    assert PATH.read_text(encoding="utf8") == family_table(), command


def test_every_family_is_checked() -> None:
    unchecked = [line for line in family_table().splitlines() if line.endswith("| nothing |")]
    assert unchecked == []
    assert all(f"| {name} |" in family_table() for name in FAMILIES)
