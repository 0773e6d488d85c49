"""Measure the multi-depth distillation against Liger and eager PyTorch, in one run.

    python -m mtp_research.kernels.bench_distill [--depths 1 3 5] [--json PATH]

Prints the matmul rate of the device, then a line per contender and number of depths: median time,
peak memory above the inputs, and the errors of loss and gradient against float64 on some rows. The
drafts are the teacher's rows with noise, scaled until a sampled draft is accepted with `--alpha`.
Contenders: `distill` (here), `liger` (a fused linear call per depth, where liger_kernel imports),
`liger_kl` (probabilities of all rows made once, then a call per depth) and `eager` (logits of all
rows, one depth after the other). Without a CUDA device the sizes default
to tiny ones, times are the host's and there is no memory figure: a test of the script.
Letters: T rows, k depths, D hidden, V vocabulary.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence

import torch
from mtp_research.kernels.bench_distill_cases import (
    CONTENDERS,
    Inputs,
    Outcome,
    make_inputs,
    num_flops,
    reference,
)
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, write_report
from mtp_research.kernels.bench_timing import describe_machine, measure_ceilings
from mtp_research.kernels.bench_wall import Wall, measure_wall
from mtp_research.kernels.losses.distill import _project, default_chunk_rows, summarise_rows
from mtp_research.kernels.losses.distill_rows import Mixture, distill_rows

GPU_SIZES = {"rows": 8192, "hidden": 4096, "vocab": 151552}
CPU_SIZES = {"rows": 48, "hidden": 32, "vocab": 1000}
HEADER = f"{'contender':<18}{'loss':<5}{'k':>2}{'ms':>10}{'spread':>8}{'GB':>7}{'TF/s':>7}" + (
    f"{'loss error':>12}{'grad error':>12}"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    options = make_parser().parse_args(arguments)
    ceilings = measure_ceilings() if torch.cuda.is_available() else {}
    report = {"machine": describe_machine(), "ceilings": ceilings, "alpha": options.alpha}
    print(json.dumps(report))
    *rows, parts = measure(ceilings, options)
    write_report(options.json, report | parts | {"rows": rows})
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    parser = make_bench_parser("bench_distill")
    for name in GPU_SIZES:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--losses", nargs="+", default=["kl"], choices=["ce", "kl", "lk"])
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--chunk-rows", type=int, nargs="+", default=[0], help="0: the default")
    parser.add_argument("--alpha", type=float, default=0.98, help="acceptance of sampled drafts")
    parser.add_argument("--repeats", type=int, default=5)
    return parser


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """A row a contender and number of depths, then sizes and the parts of a chunk."""
    defaults = GPU_SIZES if torch.cuda.is_available() else CPU_SIZES
    sizes = {name: getattr(options, name) or default for name, default in defaults.items()}
    inputs = make_inputs(**sizes, num_depths=max(options.depths), alpha=options.alpha, seed=0)
    print(f"{sizes}\nmeasured acceptance {inputs.alpha:.4f}\n{HEADER}")
    rows: Rows = []
    for num_depths in options.depths:
        for loss in options.losses:
            rows += _compare(inputs.depths(num_depths), loss=loss, options=options)
    parts = _parts(inputs, num_repeats=options.repeats)
    print(f"one chunk, ms: {parts}")
    return [*rows, {"sizes": sizes, "parts_ms": parts}]


def _compare(inputs: Inputs, *, loss: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row per contender, printed as it is measured."""
    expected, rows = reference(inputs, loss=loss), []
    for name in options.contenders:
        chunks = options.chunk_rows if name == "distill" else [0]
        for chunk_rows in chunks:
            call = functools.partial(CONTENDERS[name], inputs, loss=loss, chunk_rows=chunk_rows)
            label = name + (f" C={chunk_rows}" if chunk_rows else "")
            row: dict[str, object] = {"contender": label, "loss": loss, "k": len(inputs.rows)}
            row |= _measure(call, inputs, loss=loss, expected=expected, repeats=options.repeats)
            print(_line(row))
            rows.append(row)
    return rows


def _measure(
    call: Callable[[], Outcome], inputs: Inputs, *, loss: str, expected: Outcome, repeats: int
) -> dict[str, object]:
    """Figures of one contender, or why there are none."""
    try:
        outcome, wall = measure_wall(call, device=inputs.lm_head.device, num_repeats=repeats)
    except (ImportError, NotImplementedError, RuntimeError) as fault:  # out of memory is one
        return {"skipped": f"{type(fault).__name__}: {str(fault).splitlines()[0]}"}
    got = torch.stack([grad[: expected.num_rows].double() for grad in outcome.grads])
    wanted = torch.stack(list(expected.grads))
    return {
        "median_ms": round(wall.median_ms, 3),
        "spread_ms": round(wall.spread_ms, 3),
        "peak_bytes": wall.peak_bytes,
        "gradient_bytes": sum(grad.nbytes for grad in outcome.grads),
        "tflop_per_s": round(num_flops(inputs, loss=loss) / wall.median_ms / 1e9, 1),
        "loss_error": float((outcome.losses.double() - expected.losses).abs().max()),
        "loss": float(expected.losses.mean()),
        "grad_error": float((got - wanted).norm() / wanted.norm()),
    } | {"loss_name": loss}


def _line(row: dict[str, object]) -> str:
    head = f"{row['contender']:<18}{row.get('loss_name', row['loss']):<5}{row['k']:>2}"
    if "skipped" in row:
        return f"{head}  skipped: {row['skipped']}"
    peak = row["peak_bytes"]
    memory = f"{'-':>7}" if peak is None else f"{peak / 1e9:>7.2f}"
    times = f"{row['median_ms']:>10.2f}{row['spread_ms']:>8.2f}"
    return (
        f"{head}{times}{memory}{row['tflop_per_s']:>7.0f}"
        f"{row['loss_error']:>12.1e}{row['grad_error']:>12.1e}"
    )


def _parts(inputs: Inputs, *, num_repeats: int) -> dict[str, float]:
    """Milliseconds of each piece of one chunk, to see where the time goes."""
    chunk = min(default_chunk_rows(inputs.lm_head), len(inputs.teacher))
    rows, labels, head = inputs.rows[0][:chunk], inputs.labels[:chunk], inputs.lm_head
    logits, teacher_logits = (_project(x[:chunk], weight=head) for x in (rows, inputs.teacher))
    lse, teacher_lse = (summarise_rows(x, labels=labels).lse for x in (logits, teacher_logits))
    valid = torch.ones_like(labels, dtype=torch.bool)
    grad, outputs = torch.empty(logits.shape, dtype=head.dtype, device=head.device), rows.clone()

    def divergence(mixture: Mixture) -> object:
        return distill_rows(
            logits,
            lse=lse,
            labels=labels,
            valid=valid,
            mixture=mixture,
            eta=3.0,
            grad=grad,
            teacher_logits=teacher_logits,
            teacher_lse=teacher_lse,
        )

    pieces: dict[str, Callable[[], object]] = {
        "project": lambda: _project(rows, weight=head),
        "summarise": lambda: summarise_rows(logits, labels=labels),
        "divergence_kl": lambda: divergence(Mixture(kl=1.0)),
        "divergence_lk": lambda: divergence(Mixture(lk=1.0)),
        "back_project": lambda: torch.mm(grad, head, out=outputs),
    }
    walls: dict[str, Wall] = {
        name: measure_wall(piece, device=head.device, num_repeats=num_repeats)[1]
        for name, piece in pieces.items()
    }
    return {"chunk_rows": chunk} | {name: round(wall.median_ms, 3) for name, wall in walls.items()}


if __name__ == "__main__":
    raise SystemExit(main())
