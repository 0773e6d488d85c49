"""Command line of `bench_decode`.

Letters: K drafts per step.
"""

import argparse
from pathlib import Path

from mtp_research.models.shapes import SHAPES


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
    parser.add_argument("--kernels", type=int, default=0, help="print the slowest so many kernels")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--strict-sync", action="store_true", help="fail on any device sync")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, to try the command")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)
