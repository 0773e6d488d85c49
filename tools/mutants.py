"""Plant one-line bugs, one at a time, and see whether the tests that should catch them do.

    make mutants                                         all of tools/mutants.json: hours on 2 cores
    python tools/mutants.py --only 'DP' --shard 0/2      every second one whose name holds "DP"

Bugs are planted in a copy of the tree, never in the checkout. Each runs its own tests with `-x` in
a fork of a process that has imported torch, so that a bug costs its tests and not the imports. A
test file that does not exist leaves the bug unrun. `--out` goes on with the bugs it does not hold.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple, TypedDict

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "mutants.json"
TIMEOUT_S = 900
MIN_CAUGHT = 0.95
PRELOADED = ("torch", "numpy", "transformers.models.auto.modeling_auto", "hypothesis", "pytest")


class Mutant(TypedDict):
    """One planted bug: `old` occurs once in `file`; `tests` are files or ids of tests."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


class Outcome(NamedTuple):
    """What became of a bug: caught, survived, unrun or broken (the tests could not be run)."""

    state: str
    by: str  # first failing test
    seconds: float


def read_mutants() -> list[Mutant]:
    """The list; see `faults_of`."""
    return json.loads(LIST.read_text(encoding="utf8"))


def faults_of(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """One line for each mutant that cannot be planted."""
    names = [mutant["name"] for mutant in mutants]
    faults = [f"{name}: named twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for mutant in mutants:
        count = (root / mutant["file"]).read_text(encoding="utf8").count(mutant["old"])
        if count != 1 or mutant["old"] == mutant["new"]:
            found = f"old text must occur once in {mutant['file']} and differ from new"
            faults.append(f"{mutant['name']}: {found}, it occurs {count} times")
    return faults


def copy_tree(folder: Path) -> None:
    """What git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.check_output(command, text=True).strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def try_mutant(mutant: Mutant, tree: Path) -> Outcome:
    """Plant it in the copy, run its tests, take it out again."""
    if not all((tree / test.split("::")[0]).exists() for test in mutant["tests"]):
        return Outcome("unrun", "", 0.0)
    path, started = tree / mutant["file"], time.monotonic()
    text = path.read_text(encoding="utf8")
    path.write_text(text.replace(mutant["old"], mutant["new"]), encoding="utf8")
    try:
        code, log = run_tests(mutant["tests"], tree)
    finally:
        path.write_text(text, encoding="utf8")
    seconds = round(time.monotonic() - started, 1)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", log, re.MULTILINE)
    by = failed[1] if failed else "timeout" if code is None else ""
    if code == 0:
        return Outcome("survived", "", seconds)
    return Outcome("caught" if by else "broken", by, seconds)


def run_tests(tests: list[str], tree: Path) -> tuple[int | None, str]:
    """Exit code, None after the time is up, and output of pytest in a fork of this process."""
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.chdir(tree)
            sys.path[:0] = [str(tree)]
            sys.dont_write_bytecode = True
            os._exit(int(importlib.import_module("pytest").main(["-q", "-x", *tests])))
        code, deadline = None, time.monotonic() + TIMEOUT_S
        while code is None and time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else time.sleep(0.2)
        if code is None:
            os.kill(child, 9)
            os.waitpid(child, 0)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def summary(found: dict[str, Outcome]) -> str:
    """Counts, the parts of the suite that caught something, and what survived, as Markdown."""
    states = Counter(one.state for one in found.values())
    parts = Counter(one.by.split("::")[0] for one in found.values() if one.state == "caught")
    lines = ["| state | mutants |", "|---|---|"]
    lines += [f"| {state} | {count} |" for state, count in sorted(states.items())]
    lines += ["", "| caught first by | mutants |", "|---|---|"]
    lines += [f"| `{part}` | {count} |" for part, count in sorted(parts.items())]
    left = [f"- {one.state}: {name}" for name, one in found.items() if one.state != "caught"]
    return "\n".join([*lines, "", *left]) + "\n"


def main() -> int:
    """Run the chosen mutants; 1 below 95 % caught of those that ran."""
    parser = argparse.ArgumentParser(description="Plant bugs, see what catches them.")
    parser.add_argument("--only", default="", help="part of the name")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth mutant from the Ith on")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.json")
    args = parser.parse_args()
    mutants = read_mutants()
    if faults := faults_of(mutants):
        sys.exit("\n".join(faults))
    index, step = map(int, args.shard.split("/"))
    chosen = [mutant for mutant in mutants if args.only in mutant["name"]][index::step]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(args.out.read_text()) if args.out.is_file() else {}
    found = {name: Outcome(**fields) for name, fields in stored.items()}
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        for mutant in chosen:
            if mutant["name"] in found:
                continue
            found[mutant["name"]] = one = try_mutant(mutant, Path(folder))
            print(f"{one.state:9}{one.seconds:6.0f} s  {mutant['name']}", flush=True)
            kept = {name: outcome._asdict() for name, outcome in found.items()}
            args.out.write_text(json.dumps(kept, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(summary(found))
    ran = [outcome for outcome in found.values() if outcome.state != "unrun"]
    return int(sum(one.state == "caught" for one in ran) < MIN_CAUGHT * len(ran))


if __name__ == "__main__":
    sys.exit(main())
