"""Measure the kernels against the ceilings of the device and against PyTorch, in one run.

    python -m mtp_research.kernels.bench [NAME] [options of NAME] [--json PATH]
    python -m mtp_research.kernels.bench --all [NAME ...] [--json PATH]

Prints the ceilings (copy, read, bf16 matmul), then a line per kernel and shape: median time, share
of the copy bandwidth, the same work in compiled PyTorch, and in FlashInfer, vLLM and Liger where
they are installed; last one JSON line with all of it. `NAME --help` names the options. A benchmark
that fails under `--all` leaves a row that says so, and the others go on. Exits with 4 without a
CUDA device, with 1 if a benchmark failed.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from mtp_research.kernels.bench import (
    bench_append,
    bench_attention,
    bench_experts,
    bench_fp8,
    bench_losses,
    bench_products,
)
from mtp_research.kernels.bench import bench_runner as runner
from triton.errors import TritonError

EXIT_NO_DEVICE = 4
BENCHES: dict[str, runner.Bench] = {
    "attention": bench_attention.ATTENTION,
    "append": bench_append.APPEND,
    "latent": bench_attention.LATENT,
    "invariant": bench_products.INVARIANT,
    "experts": bench_experts.EXPERTS,
    "fp8": bench_fp8.FP8_WEIGHTS,
    "few_rows": bench_products.FEW_ROWS,
    "distill": bench_losses.DISTILL,
    "mask": bench_losses.MASK,
}
_FAILURES = (AssertionError, RuntimeError, TypeError, ValueError, TritonError)


def main(arguments: list[str] | None = None) -> int:
    """Print machine and ceilings, measure and write; returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    has_name = bool(words) and words[0] in BENCHES
    name = words[0] if has_name else "attention"
    options = make_parser(name).parse_args(words[has_name:])
    on_gpu = torch.cuda.is_available()
    if not on_gpu and (BENCHES[name].needs_gpu or options.all is not None):
        print("error: the kernel benchmark needs a CUDA device; none is visible.", file=sys.stderr)
        return EXIT_NO_DEVICE
    machine, ceilings = runner.describe_machine(), runner.measure_ceilings() if on_gpu else {}
    torch.cuda.empty_cache()
    for key, value in [*machine.items(), *ceilings.items()]:
        print(f"{key:<18}{value}", flush=True)
    if options.all is None:
        rows = BENCHES[name].measure(ceilings, options)
    else:
        rows = measure_all(ceilings, options.json, names=options.all or list(BENCHES))
    report = {"machine": machine, "ceilings": ceilings, "arguments": words, "rows": rows}
    runner.write_report(options.json, report)
    print(json.dumps(report, default=str))
    return int(any("failed" in row for row in rows))


def make_parser(name: str) -> argparse.ArgumentParser:
    """What every benchmark takes, and the options of `name`."""
    parser = argparse.ArgumentParser(
        prog=f"python -m mtp_research.kernels.bench {name}",
        epilog=f"Benchmarks: {', '.join(BENCHES)}; the default is attention.",
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--all", nargs="*", metavar="NAME", help="every benchmark, or these")
    BENCHES[name].add_options(parser)
    return parser


def measure_all(ceilings: dict[str, float], path: Path | None, *, names: list[str]) -> runner.Rows:
    """Rows of the named benchmarks, each with its name; written after each, for a run cut off."""
    if unknown := sorted(set(names) - set(BENCHES)):
        known = ", ".join(BENCHES)
        raise SystemExit(f"--all must name benchmarks among {known}, got {', '.join(unknown)}.")
    rows: runner.Rows = []
    for name in names:
        bench = BENCHES[name]
        print(f"\n{name} {' '.join(bench.words)}", flush=True)
        started_s = time.perf_counter()
        try:
            found = bench.measure(ceilings, make_parser(name).parse_args(bench.words))
        except _FAILURES as fault:
            found = [{"failed": f"{type(fault).__name__}: {str(fault)[:300]}"}]
            print(f"failed: {found[0]['failed']}", flush=True)
        rows += [{"module": name, **row} for row in found]
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", flush=True)
        runner.write_report(
            path, {"machine": runner.describe_machine(), "ceilings": ceilings, "rows": rows}
        )
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    sys.exit(main())
