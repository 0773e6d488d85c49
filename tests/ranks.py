"""Ranks over gloo: real processes, forked from one that has imported everything once.

That one is started with the first ranks of a pytest process and waits for the next ones.
"""

import atexit
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_LIMIT_S = 110  # below the limit of a test: ranks left behind would hold their GPUs
ROOT = Path(__file__).resolve().parent.parent
# A line in: what to run. Lines out: the process group of the ranks, then their worst exit code.
# A rank that fails takes the others with it: they would wait for it.
_START = """
import importlib, json, os, signal, sys, traceback


def run_rank(asked, rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    module = importlib.import_module(asked["module"])
    getattr(module, asked["function"])(*asked["words"])


def guarded(work, *words):
    code = 1
    try:
        code = work(*words) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(asked):
    ranks, worst = set(), 0
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if child == 0:
            guarded(run_rank, asked, rank)
        ranks.add(child)
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and not worst:
            worst = 1
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return worst


def lead(asked):
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((1, "out"), (2, "errors")):
        os.dup2(os.open(asked[name], os.O_WRONLY), stream)
    os.environ.clear()
    os.environ |= asked["environment"]
    importlib.import_module(asked["module"])
    return run_ranks(asked)


answers = os.fdopen(os.dup(1), "w", buffering=1)
for line in sys.stdin:
    asked = json.loads(line)
    try:
        importlib.import_module(asked["module"])  # once; a failure is shown by the leader
    except Exception:
        pass
    leader = os.fork()
    if leader == 0:
        guarded(lead, asked)
    print(leader, file=answers)
    print(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]), file=answers)
"""
_FIXED = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONFAULTHANDLER": "1"}


class _Parent:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START], cwd=ROOT, env=os.environ | _FIXED,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        atexit.register(self.end)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, asked: dict[str, object]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit_s: float | None = None) -> int:
        """Its next number; TimeoutError behind `limit_s`."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise TimeoutError
        line = b""  # unbuffered: what a buffer holds is not seen by the selector
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            assert byte, "the parent of the ranks has ended"
            line += byte
        return int(line)


_parents: list[_Parent] = []


def run_ranks(module: str, function: str, *words: str, num_ranks: int = 2) -> str:
    """What ranks print that each call `function` of `module` with `words`; none may fail."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not _parents:
        _parents.append(_Parent())
    (parent,) = _parents
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as errors:
        asked = {"module": module, "function": function, "words": words}
        asked |= {"environment": {**os.environ, **_FIXED, **place}}
        parent.ask(asked | {"out": out.name, "errors": errors.name})
        group = code = None
        try:
            group = parent.answer()
            try:
                code = parent.answer(_LIMIT_S)
            except TimeoutError:
                os.killpg(group, signal.SIGABRT)  # each rank says where it stands
                code = parent.answer(5)
        finally:  # Ctrl-C, or pytest's own limit, may end either wait
            if code is None:
                if group is not None:
                    os.killpg(group, signal.SIGKILL)
                _parents.clear()
                parent.end()
        assert code == 0, errors.read().decode(errors="replace")[-9000:]
        return out.read().decode()
