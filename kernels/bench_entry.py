"""The entry that the kernel benchmarks share: options, device, ceilings, rows as JSON.

Where it sits: each `bench_*` module has `make_parser` and `measure`, and calls `run_bench`;
`bench --all` calls the same two of every module, with one measurement of the ceilings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from mtp_research.kernels.bench_timing import describe_machine, measure_ceilings

EXIT_NO_DEVICE = 4

Rows = list[dict[str, object]]
Measure = Callable[[dict[str, float], argparse.Namespace], Rows]


def make_bench_parser(module: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(prog=f"python -m mtp_research.kernels.{module}")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    return parser


def run_bench(
    measure: Measure, parser: argparse.ArgumentParser, arguments: list[str] | None
) -> int:
    """Print machine and ceilings, measure and write; returns the exit code."""
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("error: the kernel benchmark needs a CUDA device; none is visible.", file=sys.stderr)
        return EXIT_NO_DEVICE
    machine, ceilings = describe_machine(), measure_ceilings()
    torch.cuda.empty_cache()
    for name, value in [*machine.items(), *ceilings.items()]:
        print(f"{name:<18}{value}", flush=True)
    rows = measure(ceilings, options)
    write_report(options.json, {"machine": machine, "ceilings": ceilings, "rows": rows})
    return int(any("failed" in row for row in rows))


def write_report(path: Path | None, report: dict[str, object]) -> None:
    """Everything that was measured, where a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1, default=str))
