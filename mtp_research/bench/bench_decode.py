"""Speed of the decode loop on models by shape: random weights, synthetic acceptance, a real loop.

    python -m mtp_research.bench.bench_decode --shapes dense_1b mimo_7b --batch 1 32 --k 0 3
    python -m mtp_research.bench.bench_decode --steps 1000 --strict-sync         and no step waits
    python -m mtp_research.bench.bench_decode --split       target, verification, drafts, host
    python -m mtp_research.bench.bench_decode --extras none penalties logprobs grammar --batch 32

Acceptance is set (`--accept`, the chance of a draft given that it is reached) and speed is
measured: the bytes read do not depend on the drafts. Every row is printed beside the limit of the
same run: bytes that a step must read over the measured copy bandwidth, for the mean length of its
texts while they were timed. `--extras` compares requests with processors, log-probabilities or a
grammar (one that allows everything, so that no time of a matcher is in it) with those without:
`of_none` is the share of their tokens per second. `end_to_end` times requests.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch

from mtp_research.bench.bench_row import EXTRAS, Case, measure_row
from mtp_research.bench.bench_split import describe_split, model_costs
from mtp_research.bench.shapes import SHAPES, random_heads, random_target
from mtp_research.kernels.bench.bench_runner import describe_machine, measure_ceilings
from mtp_research.models.experts import EXPERTS
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, NumericFault
from mtp_research.runtime.provenance import write_error

COLUMNS = {
    **dict.fromkeys(("shape", "batch", "num_drafts", "policy", "num_modules", "context"), "{}"),
    **{"draft_vocab": "{}", "arithmetic": "{}", "extras": "{}", "tau": "{:.3f}"},
    **{"tok_per_s": "{:.0f}", "of_none": "{:.3f}"},
    **dict.fromkeys(("step_ms", "graph_ms", "limit_ms", "share", "host_ms"), "{:.3f}"),
    **{"launches": "{:g}", "syncs": "{}", "experts": "{:.1f}", "ready_s": "{:.0f}"},
}


def main(arguments: list[str] | None = None) -> int:
    """Print one row per case and write them as JSON; returns the exit status."""
    options = parse_options(arguments)
    try:
        return _run(options)
    except (ConfigError, EnvironmentFault, NumericFault) as fault:
        write_error(str(fault))
        return fault.exit_code


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options by their names; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.bench.bench_decode")
    add = parser.add_argument
    add("--shapes", nargs="+", default=["dense_1b", "mimo_7b"], choices=SHAPES)
    add("--batch", nargs="+", type=int, default=[1, 32])
    add("--k", nargs="+", type=int, default=[0, 3])
    add("--policy", nargs="+", default=["eagle"])
    add("--modules", type=int, default=1)
    add("--context", nargs="+", type=int, default=[1024], help="prompt tokens")
    add("--accept", type=float, default=0.8)
    add("--steps", type=int, default=100, help="timed steps")
    add("--block-size", type=int, default=16)
    add("--draft-vocab", type=int, help="draft from the first so many token ids; default all")
    add("--extras", nargs="+", default=["none"], choices=EXTRAS, help="of sampling, see above")
    add("--deterministic", action="store_true", help="batch-invariant arithmetic")
    add("--experts", choices=EXPERTS, default="auto", help="as model.experts")
    add("--library-products", action="store_true", help="engine.few_rows_kernel=false")
    add("--library-rotary", action="store_true", help="engine.rotary_in_attention=false")
    add("--serial-launches", action="store_true", help="engine.overlap_launches=false")
    add("--whole-steps", action="store_true", help="engine.layer_regions=false")
    add("--kernels", type=int, default=0, help="print the slowest so many kernels")
    add("--split", action="store_true", help="time parts of the step, cut at marks put into it")
    add("--no-compile", action="store_true")
    add("--no-graphs", action="store_true")
    add("--strict-sync", action="store_true", help="fail if a timed step waits for the device")
    add("--cpu", action="store_true", help="run without a GPU, to try the command")
    add("--json", type=Path)
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
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
        ceilings = measure_ceilings()
        report["ceilings"] = ceilings
        copy_tb_per_s = ceilings["copy_tb_per_s"]
        print(json.dumps(describe_machine() | ceilings))
        torch.cuda.empty_cache()
    print("  ".join(COLUMNS), flush=True)
    rows: list[dict[str, object]] = []
    for shape in options.shapes:
        target = random_target(shape, dtype=dtype, device=device, experts=options.experts)
        for row in _measure_shape(target, shape, options, copy_tb_per_s):
            row |= {"costs": model_costs(row, rows), "of_none": _share_of_none(row, rows)}
            rows.append(row)
            _print(row, options)
            if options.json is not None:
                options.json.write_text(json.dumps(report | {"rows": rows}, indent=1))
        del target
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _measure_shape(
    target: Target, shape: str, options: argparse.Namespace, copy_tb_per_s: float | None
) -> Iterator[dict[str, object]]:
    with target.device:  # a module of GLM-4.5-Air takes a minute to draw on a CPU
        heads = random_heads(target, num_mtp_modules=options.modules)
    for case in _cases_of(shape, options):
        yield measure_row(target, heads, case, options, copy_tb_per_s)
        gc.collect()
        torch.cuda.empty_cache()


def _cases_of(shape: str, options: argparse.Namespace) -> Iterator[Case]:
    """One case for each row of the table, in the order of the options."""
    arithmetic = "invariant" if options.deterministic else "usual"
    for context, batch, k in itertools.product(options.context, options.batch, options.k):
        # Without drafts there is no policy to choose.
        policies = options.policy if k else options.policy[:1]
        sizes = (options.modules, context, options.draft_vocab) if k else (0, context, None)
        for policy, extras in itertools.product(policies, options.extras):
            yield Case(shape, batch, k, policy, *sizes, arithmetic=arithmetic, extras=extras)


def _share_of_none(row: Mapping[str, object], rows: Sequence[Mapping[str, object]]) -> float | None:
    """Tokens per second over those of the row before it that differs in its extras alone."""
    same = [field.name for field in dataclasses.fields(Case) if field.name != "extras"]
    for other in reversed(rows):
        if other["extras"] == "none" and all(other[name] == row[name] for name in same):
            return cast(float, row["tok_per_s"]) / cast(float, other["tok_per_s"])
    return None


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


if __name__ == "__main__":
    raise SystemExit(main())
