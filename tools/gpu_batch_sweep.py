"""Acceptance and speed of one head at batch 1, 8, 32 and 64, K = 0 to 5, as parts of a sweep.

    python tools/gpu_batch_sweep.py --out OUT --workers 12 engine=h200 model=lab_base \
        model.path=TARGET spec.head=HEAD                                        one GPU
    python tools/gpu_batch_sweep.py --out /tmp/x --tiny                         a CPU, to try it

Every part is `eval.py experiment=batch_sweep` at one batch size with one value of K and K = 0, in a
process of its own, and a whole result. Compiling a condition takes up to two minutes of one core
and leaves the GPU idle, so parts compile side by side and decode in turns (`timing.turns`); sweeps
that are given the same `--turns` do so too. Only the batch size itself is captured: as requests
end, smaller batches are padded to it.

`--compile-only` times nothing: it fills Inductor's disk cache, with the weights of
tools/untrained.py before trained ones exist. For that the pool has a fixed number of blocks, since
its size is part of what is compiled.

Small batches take few prompts, because their seconds grow with the tokens and not with the steps;
the acceptance to quote is that of batch 64, which has most prompts.

What ends early leaves the results of its finished parts, and the same command goes on. The exit
code is the largest of a part, so 3 where texts of two passes differ.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPTS = {64: 128, 1: 16, 8: 32, 32: 64}  # by batch size, in the order that they are started
NUM_PASSES = {64: 8, 1: 4, 8: 8, 32: 8}  # one of a large batch takes less than half a second
DRAFTS = (3, 1, 5, 2, 4)  # one after the other, each at every size
MAX_MODEL_LEN = 1024
BLOCK_SIZE = 16
NUM_SPARE_BLOCKS = 2  # of a request, for drafts and what is in flight
CAPTURED_ENGINE = "engine=h200"
POLL_S = 0.2
GRACE_S = 10


class Part(NamedTuple):
    """One evaluation: K = 0 and K = `num_drafts`."""

    batch: int
    num_drafts: int

    @property
    def name(self) -> str:
        """Of its folder, such as `batch_8_k5`."""
        return f"batch_{self.batch}_k{self.num_drafts}"

    @property
    def words(self) -> list[str]:
        """Its overrides."""
        return [
            f"grid.max_num_requests=[{self.batch}]",
            f"spec.k=[{self.num_drafts}]",
            f"prompts.max_prompts={NUM_PROMPTS[self.batch]}",
        ]


PARTS = [Part(batch, num_drafts) for num_drafts in DRAFTS for batch in NUM_PROMPTS]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are not done; the exit code is the largest of them."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    wanted = {part: words_of(part, options) for part in PARTS}
    return max(run_parts(wanted, options.out, num_workers=options.workers))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; `turns` lies in the output folder if it is not given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1, help="parts that run at a time")
    parser.add_argument("--turns", type=Path, help="lock file of sweeps that are timed one by one")
    parser.add_argument("--tiny", action="store_true", help="few prompts and tokens")
    parser.add_argument("--compile-only", action="store_true", help="fill the cache, time nothing")
    parser.add_argument("words", nargs="*", help="overrides of every part")
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.turns = (options.turns or options.out / "turns").resolve()
    return options


def words_of(part: Part, options: argparse.Namespace) -> list[str]:
    """Overrides of a part; the last one of a key counts."""
    num_blocks = part.batch * (MAX_MODEL_LEN // BLOCK_SIZE + NUM_SPARE_BLOCKS)
    words = ["experiment=batch_sweep", f"engine.max_model_len={MAX_MODEL_LEN}"]
    words += [f"engine.block_size={BLOCK_SIZE}", f"engine.num_blocks={num_blocks}"]
    words += [
        f"timing.passes={NUM_PASSES[part.batch]}",
        "sampling.max_new_tokens=128",
        f"timing.turns={options.turns}",
        *options.words,
    ]
    if CAPTURED_ENGINE in words:
        words.append(f"engine.graph_batch_sizes=[{max(NUM_PROMPTS)}]")  # the batch size itself
    words += [*part.words, f"output_dir={options.out / part.name}"]
    if options.tiny:
        words += ["prompts.max_prompts=4", "sampling.max_new_tokens=6", "timing.passes=4"]
    if options.compile_only:
        words += ["prompts.max_prompts=1", "sampling.max_new_tokens=2"]
        words += ["timing.passes=1", "timing.turns=null"]
        words += [f"baseline={str(part.num_drafts == DRAFTS[0]).lower()}"]  # once a batch size
    return words


def run_parts(wanted: Mapping[Part, Sequence[str]], folder: Path, *, num_workers: int) -> list[int]:
    """Evaluate the parts whose results are not there, so many at a time; returns all exit codes.

    Args:
        wanted: overrides of every part.
        folder: of their folders.
        num_workers: parts at a time.
    """
    codes = {part.name: known for part in wanted if (known := known_code(folder / part.name)) >= 0}
    waiting = [part for part in wanted if part.name not in codes]
    running: dict[Part, subprocess.Popen[bytes]] = {}
    started = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                part = waiting.pop(0)
                log = folder / f"{part.name}.log"
                running[part] = start(wanted[part], log, num_workers=num_workers)
            time.sleep(POLL_S)
            for part in [part for part, process in running.items() if process.poll() is not None]:
                code = running.pop(part).returncode
                code = codes[part.name] = code if code >= 0 else 128 - code  # as a shell counts
                if (folder / part.name / "results.json").is_file():
                    (folder / part.name / "exit_code").write_text(f"{code}\n")
                seconds = time.perf_counter() - started
                print(f"{part.name}: exit {code} after {seconds:.1f} s", flush=True)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            wait_or_kill(process)
    return list(codes.values())


def known_code(folder: Path) -> int:
    """Exit code of a part that has its results; -1 for one that has to run."""
    ended = folder / "exit_code"
    is_done = ended.is_file() and (folder / "results.json").is_file()
    return int(ended.read_text()) if is_done else -1


def wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end."""
    try:
        process.wait(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def start(words: Sequence[str], log_file: Path, *, num_workers: int) -> subprocess.Popen[bytes]:
    """A process that evaluates a part with its share of the cores."""
    command = [sys.executable, str(ROOT / "eval.py"), *words]
    num_threads = max((os.cpu_count() or 1) // num_workers, 1)
    # Parts trace for seconds in one thread, in which the kernels of others can use the cores.
    compiling = {"TORCHINDUCTOR_COMPILE_THREADS": str(2 * num_threads)}
    env = {**os.environ, "OMP_NUM_THREADS": str(num_threads), **compiling}
    with log_file.open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log)


if __name__ == "__main__":
    sys.exit(main())
