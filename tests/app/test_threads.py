"""Who sets OMP_WAIT_POLICY: every command before torch, no import of the library."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtp_research.runtime import threads
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.runtime.threads import one_thread_if_small, wait_passively_as_command

NAME = "OMP_WAIT_POLICY"
# Python runs a sitecustomize.py that it finds; this one tells at the end what was set.
AT_EXIT = f"""
import atexit, os, sys
def tell():
    print({NAME!r}, os.environ.get({NAME!r}), "torch" in sys.modules, file=sys.stderr)
atexit.register(tell)
"""
LIBRARY = f"""
import os
before = dict(os.environ)
import mtp_research, mtp_research.app.cli, mtp_research.__main__
import mtp_research.config.schema, mtp_research.runtime.threads
assert dict(os.environ) == before and {NAME!r} not in before
"""


@pytest.mark.parametrize(
    ("words", "chosen", "expected"),
    [
        (["train.py", "--help"], None, "passive"),
        (["eval.py", "--help"], None, "passive"),
        (["-m", "mtp_research", "--help"], "active", "active"),
        (["-um", "mtp_research.config.schema"], None, "passive"),
        (["-c", LIBRARY], None, "None"),
    ],
    ids=["train", "eval", "chosen", "module", "library"],
)
def test_commands_set_the_policy_and_the_library_sets_nothing(
    words: list[str], chosen: str | None, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT)
    environment = {key: value for key, value in os.environ.items() if key != NAME}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(REPOSITORY_ROOT)])
    if chosen is not None:
        environment[NAME] = chosen
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=REPOSITORY_ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == f"{NAME} {expected} False"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-m"], ["python", "-m", "pytest", "mtp_research"]),
        (["-m"], ["python", "-m", "mtp_research_of_somebody"]),
        (["mine.py", "-m", "mtp_research"], ["python", "mine.py", "-m", "mtp_research"]),
    ],
)
def test_other_commands_are_left_alone(
    argv: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    wait_passively_as_command(argv, words)
    assert NAME not in os.environ


@pytest.mark.parametrize(
    ("load", "spins"),
    [("0.00 0.00 0.00 1/99 7", "20000"), ("9.00 0.00 0.00 2/99 7", None), ("unknown", None)],
    ids=["quiet", "busy", "unknown"],
)
def test_threads_wait_before_they_sleep_where_nobody_else_runs(
    load: str, spins: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loadavg").write_text(load)
    monkeypatch.setattr(threads, "_LOAD", tmp_path / "loadavg")
    for name in (NAME, "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    threads.wait_passively()
    assert (os.environ[NAME], os.environ.get("GOMP_SPINCOUNT")) == ("passive", spins)


def test_a_process_at_work_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        try:
            assert any(threads.others_run() for _ in range(50))
        finally:
            other.kill()


def test_tests_wait_passively() -> None:
    assert os.environ[NAME]


@pytest.mark.parametrize("name", sorted(p.name for p in (REPOSITORY_ROOT / "tools").glob("*.py")))
def test_tools_set_the_policy_before_they_import_what_reads_it(name: str) -> None:
    body = ast.parse((REPOSITORY_ROOT / "tools" / name).read_text(encoding="utf8")).body
    imported: list[str] = []
    for node in body:
        if isinstance(node, ast.Expr) and ast.unparse(node) == "wait_passively()":
            break
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imported.append(node.module or "")
    foreign = {one for one in imported if one.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"mtp_research.runtime.threads"}


def test_the_name_is_written_in_one_module() -> None:
    sources = [
        path
        for folder in ("mtp_research", "kernels", "tools")
        for path in (REPOSITORY_ROOT / folder).rglob("*.py")
        if NAME in path.read_text(encoding="utf8")
    ]
    assert [path.name for path in sources] == ["threads.py"]


@pytest.mark.parametrize(
    ("num_parameters", "asked", "num_inside"),
    [(7_000_000, None, 1), (7_000_000, "2", 2), (135_000_000, None, 2)],
)
def test_small_targets_decode_on_one_thread_unless_told_otherwise(
    num_parameters: int, asked: str | None, num_inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    num_before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread_if_small(num_parameters):
            assert torch.get_num_threads() == num_inside
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_before)
