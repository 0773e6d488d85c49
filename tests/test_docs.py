"""What the pages show is what the commands print; what they name exists and composes."""

import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from mtp_research.__main__ import COMMANDS
from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.policy import simulate

ROOT = Path(__file__).resolve().parent.parent
# The log names modules and flags of its own commits.
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    if path.name != "log.md"
)
SCHEMAS = {"train.py": TrainConfig, "eval.py": EvalConfig}
PRINTERS: dict[str, Callable[[Sequence[str] | None], int]] = {
    "trace": simulate.trace_main,
    "audit": simulate.main,
}
# A word that stands for another, or a flag that is Hydra's business.
PLACEHOLDER = re.compile(r"\.\.\.|[$<>*]|=[A-Z]|\bx,y\b| -")


def code_lines(page: Path) -> Iterator[str]:
    """Lines of fenced blocks and inline code, comments cut off."""
    text = page.read_text(encoding="utf8")
    fenced = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, flags=re.DOTALL | re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for block in [*fenced, *inline]:
        for line in block.replace("\\\n", " ").splitlines():
            yield re.sub(r"(^|\s)#.*", "", line).strip().removeprefix("$ ")


def commands(entry: str) -> list[str]:
    """Distinct command lines of an entry on all pages; those with placeholders are left out."""
    found = {
        line[line.index(f"{entry} ") :]
        for page in PAGES
        for line in code_lines(page)
        if line.startswith((f"python {entry} ", f"{entry} "))
    }
    return sorted(line for line in found if not PLACEHOLDER.search(line))


def printed_blocks() -> Iterator[tuple[str, str]]:
    """Command and output of every `console` block that begins with `$ mtp`."""
    for page in PAGES:
        text = page.read_text(encoding="utf8")
        for block in re.findall(r"^```console\n\$ mtp (.*?)^```", text, re.DOTALL | re.MULTILINE):
            command, _, output = block.partition("\n")
            yield command, output


@pytest.mark.parametrize(("command", "output"), list(printed_blocks()))
def test_shown_output_is_what_the_command_prints(
    command: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = shlex.split(command)
    PRINTERS[name](words)
    assert capsys.readouterr().out == output


@pytest.mark.parametrize("entry", sorted(SCHEMAS))
def test_shown_commands_compose(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    lines = commands(entry)
    assert len(lines) > 3
    for line in lines:
        compose_config(SCHEMAS[entry], shlex.split(line)[1:])


def test_named_commands_modules_scripts_and_pages_exist() -> None:
    missing = []
    for page in PAGES:
        for line in code_lines(page):
            for command in re.findall(r"^mtp ([a-z]+)", line):
                missing += [] if command in COMMANDS else [(page.name, command)]
            for module in re.findall(r"python -m (mtp_research[\w.]*|examples[\w.]*)", line):
                missing += [] if importlib.util.find_spec(module) else [(page.name, module)]
            for script in re.findall(r"python ((?:tools|examples)/\w+\.py)", line):
                missing += [] if (ROOT / script).is_file() else [(page.name, script)]
        links = re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf8"))
        missing += [(page.name, link) for link in links if not (page.parent / link).exists()]
    assert not missing
