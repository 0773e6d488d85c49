"""The rows of every kernel benchmark, one after the other, for `bench --all`.

A module that fails leaves a row that says so, and the others go on; with `--json` the rows are
written after each module, so that a run that is cut off leaves what it has measured.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import torch
from mtp_research.kernels.bench_entry import Rows, write_report
from mtp_research.kernels.bench_timing import describe_machine
from triton.errors import TritonError

# Options by module. Few rows: every program shape of every product takes minutes to compile.
MODULES: dict[str, list[str]] = {
    "bench": [],
    "bench_append": [],
    "bench_latent": [],
    "bench_invariant": [],
    "bench_experts": [],
    "bench_few_rows": ["--quick"],
    "bench_distill": ["--depths", "3"],
}
_FAILURES = (AssertionError, RuntimeError, TypeError, ValueError, TritonError)


def measure_all(ceilings: dict[str, float], path: Path | None, *, names: list[str]) -> Rows:
    """Rows of the named modules, each with its module's name."""
    if unknown := sorted(set(names) - set(MODULES)):
        known = ", ".join(MODULES)
        raise SystemExit(f"--all must name modules among {known}, got {', '.join(unknown)}.")
    rows: Rows = []
    for name in names:
        print(f"\n{name} {' '.join(MODULES[name])}", flush=True)
        started_s = time.perf_counter()
        module = importlib.import_module(f"mtp_research.kernels.{name}")
        try:
            found = module.measure(ceilings, module.make_parser().parse_args(MODULES[name]))
        except _FAILURES as fault:
            found = [{"failed": f"{type(fault).__name__}: {str(fault)[:300]}"}]
            print(f"failed: {found[0]['failed']}", flush=True)
        rows += [{"module": name, **row} for row in found]
        print(f"{name}: {time.perf_counter() - started_s:.0f} s", flush=True)
        write_report(path, {"machine": describe_machine(), "ceilings": ceilings, "rows": rows})
        torch.cuda.empty_cache()
    return rows
