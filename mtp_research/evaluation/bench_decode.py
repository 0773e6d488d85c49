"""Speed of the decode loop on models by shape: random weights, synthetic acceptance, a real loop.

    python -m mtp_research.evaluation.bench_decode --shapes dense_1b mimo_7b --batch 1 32 --k 0 3
    python -m mtp_research.evaluation.bench_decode --steps 1000 --strict-sync    and no step waits
    python -m mtp_research.evaluation.bench_decode --split       target, verification, drafts, host

Both sides of a comparison read the same bytes whatever the drafts are, so acceptance is set
(`--accept`, the chance of a draft given that it is reached) and speed is measured. Every row is
printed beside the limit of the same run: bytes that a step must read over the measured copy
bandwidth, for the mean length of its texts while they were timed.

Letters: B requests, K drafts per step.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing

import torch

from mtp_research.evaluation.bench_options import cases_of, parse_options
from mtp_research.evaluation.bench_row import measure_row
from mtp_research.evaluation.bench_split import describe_split, model_costs
from mtp_research.evaluation.turns import Turns
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.kernels.bench_timing import describe_machine, measure_ceilings
from mtp_research.models.shapes import random_target
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, NumericFault

COLUMNS = {
    "shape": "{}",
    "batch": "{}",
    "num_drafts": "{}",
    "policy": "{}",
    "num_modules": "{}",
    "context": "{}",
    "draft_vocab": "{}",
    "arithmetic": "{}",
    "tau": "{:.3f}",
    "tok_per_s": "{:.0f}",
    "step_ms": "{:.3f}",
    "graph_ms": "{:.3f}",
    "limit_ms": "{:.3f}",
    "share": "{:.3f}",
    "host_ms": "{:.3f}",
    "launches": "{:g}",
    "syncs": "{}",
    "experts": "{:.1f}",
    "ready_s": "{:.0f}",
}


def main(arguments: list[str] | None = None) -> int:
    """Print one row per case and write them as JSON; returns the exit status."""
    options = parse_options(arguments)
    try:
        with closing(Turns(options.turns, name="--turns")) as turns:
            return _run(options, turns)
    except (ConfigError, EnvironmentFault, NumericFault) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code


def _run(options: argparse.Namespace, turns: Turns) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.cpu:
        print("error: bench_decode needs a CUDA GPU; --cpu tries the commands.", file=sys.stderr)
        return 4
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report: dict[str, object] = {
        "arguments": vars(options) | {"json": str(options.json)},
        "dtype": str(dtype).removeprefix("torch."),
        "machine": describe_machine(),
    }
    copy_tb_per_s = None
    if device.type == "cuda":
        turns.decode()
        ceilings = measure_ceilings()
        report["ceilings"] = ceilings
        copy_tb_per_s = ceilings["copy_tb_per_s"]
        print(json.dumps(describe_machine() | ceilings))
        torch.cuda.empty_cache()
    print("  ".join(COLUMNS), flush=True)
    rows: list[dict[str, object]] = []
    for shape in options.shapes:
        turns.prepare()
        target = random_target(
            shape,
            dtype=dtype,
            device=device,
            experts=options.experts,
        )
        for row in _measure_shape(target, shape, options, turns, copy_tb_per_s):
            row["costs"] = model_costs(row, rows)
            rows.append(row)
            _print(row, options)
            if options.json is not None:
                options.json.write_text(json.dumps(report | {"rows": rows}, indent=1))
        del target
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _print(row: Mapping[str, object], options: argparse.Namespace) -> None:
    print("  ".join(_cell(row.get(name), form) for name, form in COLUMNS.items()))
    if options.strict_sync:
        print(f"    {_strict_line(row)}")
    if row["split"] is not None:
        print(f"    {describe_split(row)}")
    for name, count, us in (row["kernels"] or [])[: options.kernels]:
        print(f"    {us:9.1f} us {count:5d}  {name[:110]}")
    sys.stdout.flush()


def _strict_line(row: Mapping[str, object]) -> str:
    """What `--strict-sync` found, in words."""
    if row["syncs"] is None:
        return f"syncs are not counted without a GPU; {row['num_steps']} steps were made"
    launches = f"{row['launches']:g} launches and {row['replays']:g} graph replays a step, "
    return f"{launches}{row['syncs']} syncs in {row['num_steps']} steps"


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


def _measure_shape(
    target: Target,
    shape: str,
    options: argparse.Namespace,
    turns: Turns,
    copy_tb_per_s: float | None,
) -> Iterator[dict[str, object]]:
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=options.modules)).requires_grad_(False)
    for case in cases_of(shape, options):
        turns.prepare()
        yield measure_row(target, heads, case, options, turns, copy_tb_per_s)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    raise SystemExit(main())
