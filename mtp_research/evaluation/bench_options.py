"""Command line of `bench_decode`, and the rows that it asks for.

Letters: K drafts per step.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtp_research.models.experts import EXPERTS
from mtp_research.models.shapes import SHAPES


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    shape: str
    batch: int
    num_drafts: int
    policy: str
    num_modules: int
    context: int
    draft_vocab: int | None = None  # None: all tokens may be drafted
    arithmetic: str = "usual"


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options by their names; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.evaluation.bench_decode")
    parser.add_argument("--shapes", nargs="+", default=["dense_1b", "mimo_7b"], choices=SHAPES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--k", nargs="+", type=int, default=[0, 3])
    parser.add_argument("--policy", nargs="+", default=["eagle"])
    parser.add_argument("--modules", type=int, default=1)
    parser.add_argument("--context", nargs="+", type=int, default=[1024], help="prompt tokens")
    parser.add_argument("--accept", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=100, help="timed steps")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument(
        "--draft-vocab", type=int, help="draft from the first so many token ids; default all"
    )
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant arithmetic")
    parser.add_argument("--experts", choices=EXPERTS, default="auto", help="as model.experts")
    parser.add_argument(
        "--library-products", action="store_true", help="engine.few_rows_kernel=false"
    )
    parser.add_argument(
        "--library-rotary", action="store_true", help="engine.rotary_in_attention=false"
    )
    parser.add_argument(
        "--serial-launches", action="store_true", help="engine.overlap_launches=false"
    )
    parser.add_argument("--kernels", type=int, default=0, help="print the slowest so many kernels")
    parser.add_argument(
        "--split", action="store_true", help="time parts of the step, cut at marks put into it"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument(
        "--strict-sync", action="store_true", help="fail if a timed step waits for the device"
    )
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, to try the command")
    parser.add_argument(
        "--turns", help="lock file: benchmarks that share it compile side by side, time in turns"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def cases_of(shape: str, options: argparse.Namespace) -> Iterator[Case]:
    """One case for each row of the table, in the order of the options."""
    for context in options.context:
        for batch in options.batch:
            for num_drafts in options.k:
                # Without drafts there is no policy to choose.
                for policy in options.policy if num_drafts else options.policy[:1]:
                    modules = options.modules if num_drafts else 0
                    yield Case(
                        shape,
                        batch,
                        num_drafts,
                        policy,
                        modules,
                        context,
                        draft_vocab=options.draft_vocab if num_drafts else None,
                        arithmetic="invariant" if options.deterministic else "usual",
                    )
