"""One GPU: the head training step at the shapes of lab targets, with its time split and MFU.

    python tools/gpu_train_bench.py --out $OUT                   lab_small and lab_base, ce and kl
    python tools/gpu_train_bench.py --out $OUT --models runs/lab_base/target \
        --documents runs/lab_base/answers.jsonl                  trained weights and their own text
    python tools/gpu_train_bench.py --out $OUT --models lab_base --losses ce \
        --variants half_logits=false fused_rows=false --profile 20        what each lever brings
    python tools/gpu_train_bench.py --out /tmp/x --models lab_tiny --losses ce --seq-len 64 \
        --batch-size 2 --steps 3 --compile no                    tiny, on a CPU

Per model, batch size, loss and hidden state source: tokens/s and MFU of the whole step as
`train.py` runs it (target forward, unroll, loss, backward, AdamW), against a bf16 8192^3 product
measured in the same run; peak memory; the host's time a step; the split by stage, each stage
drained, so that its parts add up to more than the step. A table, and all as `train_bench.json`.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from mtp_research.kernels.bench_timing import describe_machine
from training_bench_parts import (
    Shape,
    flops_per_token,
    make_parts,
    matmul_tflops,
    run_config,
)
from training_stages import kernels_of, loss_fields, show_kernels, split, stages_of

from mtp_research.config.schema import TrainConfig
from mtp_research.config.training_schema import TrainerConfig
from mtp_research.training.loop import accumulate_gradients
from mtp_research.training.setup import RunParts
from mtp_research.training.tracking import StopRequest
from mtp_research.training.walk.training_figures import FigureQueue

WARM_UP_STEPS, NUM_ROUNDS = 3, 3
LEARNING_RATE = 1e-3
CHOICES = {"no": [False], "yes": [True], "both": [False, True]}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each shape; one table and one JSON file."""
    args = parse(argv)
    ranks = Accelerator(cpu=not torch.cuda.is_available())
    ceiling = matmul_tflops(ranks.device)
    machine = describe_machine()
    print(f"device {machine['device']}  bf16 product {ceiling:.1f} TFLOP/s")
    results = []
    for shape in shapes_of(args):
        for compiled in CHOICES[args.compile]:
            trainer = TrainerConfig(
                batch_size=shape.batch_size, learning_rate=LEARNING_RATE, compile=compiled
            )
            for result in measure(shape, trainer, ranks, args=args, ceiling=ceiling):
                results.append(result)
                show(result)
    report = {"machine": machine, "product_tflops": ceiling, "arguments": vars(args)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_bench.json").write_text(
        json.dumps(report | {"rows": results}, indent=1, default=str)
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description="The head training step on one GPU.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["lab_small", "lab_base"],
        help="names of conf/model or `large`, with random weights; or folders with trained ones",
    )
    parser.add_argument("--documents", help="what data.path takes; left out: made-up text")
    parser.add_argument("--losses", nargs="+", default=["ce", "kl"])
    parser.add_argument("--hidden", nargs="+", choices=["kept", "live"], default=["live"])
    parser.add_argument("--experts", nargs="+", default=["auto"], help="what model.experts takes")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256])
    parser.add_argument("--steps", type=int, default=20, help="of each of three rounds")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[],
        help="measure again with other fields of LossSpec: half_logits=true,chunk_rows=4864",
    )
    parser.add_argument("--profile", type=int, default=0, help="longest kernels a stage to print")
    parser.add_argument("--compile", choices=CHOICES, default="yes")
    return parser.parse_args(argv)


def shapes_of(args: argparse.Namespace) -> list[Shape]:
    """Every combination that was asked for."""
    return [
        Shape(
            model,
            args.seq_len,
            size,
            loss=loss,
            documents=args.documents,
            keeps_hidden=hidden == "kept",
            experts=experts,
        )
        for model in args.models
        for size in args.batch_size
        for loss in args.losses
        for hidden in args.hidden
        for experts in args.experts
    ]


def measure(
    shape: Shape,
    trainer: TrainerConfig,
    ranks: Accelerator,
    *,
    args: argparse.Namespace,
    ceiling: float,
) -> Iterator[dict[str, object]]:
    """One shape: median step, split by stage, longest kernels, peak memory; a result a variant."""
    config = run_config(shape, trainer, device=ranks.device.type)
    parts = make_parts(shape, config, ranks)
    parts.heads.train()
    run = StepRunner(parts, config, ranks)
    warm_s = run.seconds(WARM_UP_STEPS)
    stages = stages_of(parts, config, learning_rate=LEARNING_RATE)
    flops = flops_per_token(parts, shape)
    tokens = shape.batch_size * shape.seq_len
    for variant in ("", *args.variants):
        with loss_fields(parts, variant):
            run.seconds(1)
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            rounds = [run.seconds(args.steps) / args.steps for _ in range(NUM_ROUNDS)]
            peak_gb = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None
            seconds = statistics.median(rounds)
            achieved = sum(flops.values()) * tokens / seconds / 1e12
            yield {
                **vars(shape),
                "compiled": trainer.compile,
                "variant": variant,
                "warm_up_s": round(warm_s, 1),
                "step_ms": 1e3 * seconds,
                "step_ms_spread": 1e3 * (max(rounds) - min(rounds)),
                "tokens_per_s": tokens / seconds,
                "mflop_per_token": {name: value / 1e6 for name, value in flops.items()},
                "tflops": achieved,
                "mfu": achieved / ceiling,
                "host_ms": run.host_ms,
                "peak_gb": peak_gb,
                "loss_first": run.losses[0],
                "loss_last": run.losses[-1],
                "split_ms": split(stages, ranks),
                "kernels": kernels_of(stages, limit=args.profile) if args.profile else {},
            }


class StepRunner:
    """Runs optimizer steps one after the other, as the training loop does.

    Attributes:
        losses: of every finished step.
        host_ms: mean time of the last round in which the host prepared and queued a step, the wait
            for the figures of the step before left out; near the step's own it means a wait inside.
    """

    def __init__(self, parts: RunParts, config: TrainConfig, ranks: Accelerator) -> None:
        """Nothing has run."""
        self._parts, self._config, self._ranks = parts, config, ranks
        self._queue, self._stop, self._step = FigureQueue(), StopRequest(), 0
        self.losses: list[float] = []
        self.host_ms = 0.0

    def seconds(self, count: int) -> float:
        """Wall time of `count` more steps, the device drained before and after."""
        drain()
        started, waited = time.perf_counter(), 0.0
        for _ in range(count):
            stats = accumulate_gradients(
                self._parts,
                config=self._config,
                ranks=self._ranks,
                step=self._step,
                stop=self._stop,
            )
            norm = self._parts.engine.step(learning_rate=LEARNING_RATE)
            self._queue.push(stats, step=self._step, learning_rate=LEARNING_RATE, grad_norm=norm)
            self._step += 1
            queued = time.perf_counter()
            self.losses += [figures.loss for figures in self._queue.ready()]
            waited += time.perf_counter() - queued
        self.host_ms = 1e3 * (time.perf_counter() - started - waited) / count
        drain()
        return time.perf_counter() - started


def show(result: dict) -> None:
    """Two lines a shape."""
    parts = "  ".join(f"{name} {ms:.2f}" for name, ms in result["split_ms"].items())
    peak = "" if result["peak_gb"] is None else f"  peak {result['peak_gb']:.1f} GB"
    hidden = "kept" if result["keeps_hidden"] else "live"
    print(
        f"{result['model']} S={result['seq_len']} B={result['batch_size']} {result['loss']} "
        f"hidden {hidden} experts {result['experts']} compiled={result['compiled']} "
        f"[{result['variant']}]  {result['step_ms']:.2f} ms "
        f"(+-{result['step_ms_spread']:.2f})  {result['tokens_per_s']:,.0f} tok/s  "
        f"{result['tflops']:.2f} TFLOP/s  MFU {100 * result['mfu']:.1f} %{peak}  "
        f"host {result['host_ms']:.1f} ms\n    {parts} ms",
        flush=True,
    )
    show_kernels(result["kernels"])


def drain() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
