"""Ends of a command that are nobody's fault."""

import os
import subprocess
import sys

import pytest

from mtp_research import __main__ as door
from mtp_research.runtime.errors import CLOSED_OUTPUT_EXIT_CODE, CTRL_C_EXIT_CODE

_PRINTS = """
import sys
from mtp_research import __main__ as door
class Module:
    def main():
        print("a line", flush=sys.argv[-1] == "flush")
        return 0
door.importlib.import_module = lambda name: Module
sys.argv = ["mtp", "doctor", sys.argv[-1]]
sys.exit(door.main())
"""


@pytest.mark.parametrize("when", ["flush", "later"])
@pytest.mark.parametrize(("is_read", "code"), [(True, 0), (False, CLOSED_OUTPUT_EXIT_CODE)])
def test_output_that_nobody_reads_ends_a_command_silently(
    monkeypatch: pytest.MonkeyPatch, is_read: bool, code: int, when: str
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reader, writer = os.pipe()
    if not is_read:
        os.close(reader)
    argv = [sys.executable, "-c", _PRINTS, when]
    done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (code, b"")
    os.close(writer)
    if is_read:
        assert os.read(reader, 99) == b"a line\n"
        os.close(reader)


def test_ctrl_c_is_one_line_of_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(door.importlib, "import_module", stopped)
    monkeypatch.setattr(sys, "argv", ["mtp", "regenerate"])
    assert door.main() == CTRL_C_EXIT_CODE
    assert capsys.readouterr().err == "error: stopped by Ctrl-C.\n"
