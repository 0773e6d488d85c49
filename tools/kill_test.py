"""Kill a training run with -9 at random moments; it must resume each time and end bit-identical.

    python tools/kill_test.py                        20 kills, tiny target, CPU, about a minute
    python tools/kill_test.py --kills 2 --steps 14   what the test suite runs

One process imports everything and forks a child per attempt, before any thread exists. A child runs
the entry of `train.py`; the parent sends SIGKILL at a random moment, one in five while the child
still loads, else while it trains, evaluates or writes a checkpoint. The last attempt is left alone.
Compared: every file of the last step folder, and `head/model.safetensors`, with those of a run that
nobody killed. Exit status 0 when they are equal.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch

from mtp_research.__main__ import run_training
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import TrainConfig
from mtp_research.training import setup  # noqa: F401 - imported for the children
from mtp_research.training.checkpoint import newest_checkpoint
from tests.training.tiny import save_lab


def main() -> int:
    """Run, kill, compare; the last line is JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, help="keeps the runs; default: a temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return kill_test(args, folder=args.dir or Path(temporary))


def kill_test(args: argparse.Namespace, *, folder: Path) -> int:
    """Run once, then again with kills, and compare."""
    folder.mkdir(parents=True, exist_ok=True)
    compose_config(TrainConfig, [])  # imports what every child would import anew
    finish(fork(lambda: save_lab(folder)))
    words = [f"model.path={folder / 'target'}", f"data.path={folder / 'answers.jsonl'}"]
    words += ["model.family=qwen3", "model.device=cpu", f"trainer.max_steps={args.steps}"]
    words += ["data.seq_len=64", "data.eval_documents=15", "trainer.batch_size=4"]
    words += ["trainer.eval_every=5", "trainer.save_every=2", "head.num_mtp_modules=2"]
    started = time.perf_counter()
    code = finish(start(words, folder / "straight"))
    whole_s = time.perf_counter() - started
    assert code == 0, f"the uninterrupted run must end with 0, got {code}"
    dice = random.Random(args.seed)
    kills = []
    # Long enough that most kills find a checkpoint to resume from; halved if the run ends too soon.
    longest_s = 3 * whole_s / args.kills
    while len(kills) < args.kills:
        child = start(words, folder / "killed")
        if dice.random() < 0.8:
            await_step(folder / "killed", child)
        time.sleep(dice.uniform(0.0, longest_s))
        os.kill(child, signal.SIGKILL)
        code = finish(child)
        newest = newest_checkpoint(folder / "killed")  # raises if nothing whole is left
        kills.append(newest.step if newest else 0)
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"a resumed run must end with 0 or by the kill, got {code}")
        if code == 0:  # it had ended before: once more from the start, and earlier
            shutil.rmtree(folder / "killed")
            kills.clear()
            longest_s /= 2
    code = finish(start(words, folder / "killed"))
    same = fingerprint(folder / "straight") == fingerprint(folder / "killed")
    result = {
        "kills": len(kills),
        "exit_code": code,
        "bit_identical": same,
        "steps_at_kill": kills,
        "kills_after_a_checkpoint": sum(step > 0 for step in kills),
        "num_steps": args.steps,
        "straight_s": round(whole_s, 1),
    }
    print(json.dumps(result))
    return 0 if same and code == 0 else 1


def start(words: list[str], output_dir: Path) -> int:
    """Fork a child that runs `train.py` with these words; its process id."""
    argv = [*words, f"output_dir={output_dir}"]
    return fork(lambda: run_entry(TrainConfig, run_training, argv=argv))


def fork(work) -> int:
    """Run `work` in a child whose output goes nowhere; its process id."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    if not os.environ.get("KILL_TEST_VERBOSE"):
        os.dup2(nowhere, 2)
    code = 1
    try:
        result = work()
        code = result if isinstance(result, int) else 0
    finally:
        os._exit(code)


def await_step(run: Path, child: int) -> None:
    """Wait until the run has written a metric since now: it has loaded and trains."""
    metrics = run / "metrics.jsonl"
    before = metrics.stat().st_mtime_ns if metrics.exists() else 0
    while not metrics.exists() or metrics.stat().st_mtime_ns == before:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
        time.sleep(0.002)


def finish(child: int) -> int:
    """Wait; the exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fingerprint(run: Path) -> dict[str, str]:
    """sha256 of what a run leaves: the last step folder and the exported head."""
    last = run / (run / "latest").read_text().strip()
    files = [*sorted(last.iterdir()), run / "head" / "model.safetensors"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


if __name__ == "__main__":
    sys.exit(main())
