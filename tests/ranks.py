"""Ranks over gloo: real processes, forked from one that has imported everything once."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 110  # below the limit of a test: ranks left behind would hold their GPUs
ROOT = Path(__file__).resolve().parent.parent
# A rank that fails takes the others with it: they would wait for it.
_START = """
import importlib, os, signal, sys, traceback
module, function, *words = sys.argv[1:]
work, ranks = getattr(importlib.import_module(module), function), {}
for rank in range(int(os.environ["WORLD_SIZE"])):
    child = os.fork()
    if child == 0:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        code = 1
        try:
            work(*words)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ranks[child] = rank
worst = 0
while ranks:
    child, status = os.wait()
    del ranks[child]
    if status and not worst:
        worst = 1
        for other in ranks:
            os.kill(other, signal.SIGKILL)
sys.exit(worst)
"""


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
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }
    command = [sys.executable, "-c", _START, module, function, *words]
    ranks = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = ranks.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(ranks.pid, signal.SIGABRT)  # each rank says where it stands
        out, errors = ranks.communicate()
    finally:  # Ctrl-C, or pytest's own limit, may end either wait
        if ranks.poll() is None:
            os.killpg(ranks.pid, signal.SIGKILL)
    assert ranks.returncode == 0, errors[-9000:]
    return out
