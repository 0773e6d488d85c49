"""Acceptance and speed of one head at batch 1, 8, 32 and 64, as parts that are each whole results.

    python tools/gpu_batch_sweep.py --out OUT engine=h200 model=lab_base \
        model.path=TARGET spec.head=HEAD                                        one GPU
    python tools/gpu_batch_sweep.py --out /tmp/x --tiny                         a CPU, to try it

Every part is `eval.py experiment=batch_sweep` at one batch size, in this process, so that libraries
are imported once. Steps are captured and not compiled: compiling takes 10 to 20 s for each number
of drafts, policy and bucket, of which K = 1, 3, 5 at four sizes have 126. One part with K = 3 at
batch 1 is compiled. Small batches take few prompts, because their seconds grow with the tokens and
not with the steps; the acceptance to quote is that of batch 64, which has most prompts.

What ends early leaves the results of its finished parts, and the same command goes on. The exit
code is the largest of a part, so 3 where texts of two passes differ.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval as entry
from mtp_research.cli import run_entry
from mtp_research.config import EvalConfig

NUM_PROMPTS = {64: 128, 1: 16, 8: 32, 32: 64}  # by batch size, in the order that they are run
DRAFTS = ((3,), (1, 5), (2, 4))  # one set after the other, each at every size
MAX_MODEL_LEN = 1024
CAPTURED_ENGINE = "engine=h200"


class Part(NamedTuple):
    """One evaluation; `drafts` are the values of K beside K = 0."""

    batch: int
    drafts: tuple[int, ...]
    is_compiled: bool = False

    @property
    def name(self) -> str:
        """Of its folder, such as `batch_8_k135`."""
        digits = "".join(map(str, self.drafts))
        return f"batch_{self.batch}_k{digits}" + "_compiled" * self.is_compiled

    @property
    def words(self) -> list[str]:
        """Its overrides."""
        return [
            f"grid.max_num_requests=[{self.batch}]",
            f"spec.k=[{','.join(map(str, self.drafts))}]",
            f"prompts.max_prompts={NUM_PROMPTS[self.batch]}",
            f"engine.compile={str(self.is_compiled).lower()}",
        ]


def parts(*, can_compile: bool) -> Iterator[Part]:
    """All parts, those that matter most first."""
    first, *others = ([Part(batch, drafts) for batch in NUM_PROMPTS] for drafts in DRAFTS)
    yield from first
    if can_compile:
        yield Part(1, (3,), is_compiled=True)
    for later in others:
        yield from later


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that are not done; the exit code is the largest of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="few prompts and tokens")
    parser.add_argument("words", nargs="*", help="overrides of every part")
    options = parser.parse_args(argv)
    words = ["experiment=batch_sweep", f"engine.max_model_len={MAX_MODEL_LEN}", *options.words]
    tiny = ["prompts.max_prompts=4", "sampling.max_new_tokens=6"] if options.tiny else []
    made = parts(can_compile=CAPTURED_ENGINE in words)
    return max(run_part(part, [*words, *part.words, *tiny], options.out) for part in made)


def run_part(
    part: Part, words: Sequence[str], folder: Path, *, run: Callable[..., int] = run_entry
) -> int:
    """Evaluate a part unless its results are there; returns its exit code, then or now."""
    target, started = folder / part.name, time.perf_counter()
    ended = target / "exit_code"
    if ended.is_file() and (target / "results.json").is_file():
        return int(ended.read_text())
    code = run(EvalConfig, entry.run, argv=[*words, f"output_dir={target}"])
    gc.collect()  # pools and graphs of the part
    torch.cuda.empty_cache()
    if target.is_dir():
        ended.write_text(f"{code}\n")
    print(f"{part.name}: exit {code}, {time.perf_counter() - started:.1f} s", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
