"""One GPU: the head training step at the shapes of a lab target, with its time split and MFU.

    python tools/gpu_train_bench.py --out $OUT                       lab_base and a larger shape
    python tools/gpu_train_bench.py --out /tmp/x --model lab_tiny --seq-len 64 --batch-size 2 \
        --steps 3 --no-compile --no-large                            tiny, on a CPU

Per shape: tokens/s and MFU of the whole step as `train.py` runs it (target forward, unroll, loss,
backward, AdamW), against a bf16 8192^3 product measured in the same run; peak memory; the split by
stage, each stage drained, so that its parts add up to more than the step.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parent))

from training_bench_parts import (  # puts the repository on the path
    Shape,
    flops_per_token,
    make_parts,
    matmul_tflops,
    run_config,
    time_of,
)

from mtp_research.config import TrainerConfig
from mtp_research.training.figures import FigureQueue
from mtp_research.training.losses import depth_labels, label_counts
from mtp_research.training.objective import run_heads
from mtp_research.training.signals import StopRequest
from mtp_research.training.step import accumulate_gradients


def main() -> None:
    """Measure each shape; one table and one JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="lab_base", help="of conf/model, or a folder")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[256])
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-large", action="store_true", help="leave the larger shape out")
    args = parser.parse_args()
    ranks = Accelerator(cpu=not torch.cuda.is_available())
    ceiling = matmul_tflops(ranks.device)
    print(f"device {device_name()}  bf16 product {ceiling:.0f} TFLOP/s")
    shapes = [Shape(args.model, args.seq_len, size, loss=args.loss) for size in args.batch_size]
    if not args.no_large:
        shapes.append(Shape("large", 512, 64, loss=args.loss))
    results = []
    for shape in shapes:
        eager_too = args.no_compile or shape is shapes[0]
        for compiled in [False] * eager_too + [True] * (not args.no_compile):
            result = measure(shape, ranks, compiled=compiled, steps=args.steps, ceiling=ceiling)
            results.append(result)
            show(result)
    report = {"device": device_name(), "product_tflops": ceiling, "torch": torch.__version__}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train_bench.json").write_text(json.dumps(report | {"rows": results}, indent=1))


def measure(
    shape: Shape, ranks: Accelerator, *, compiled: bool, steps: int, ceiling: float
) -> dict[str, object]:
    """Median step, split by stage and peak memory of one shape."""
    trainer = TrainerConfig(batch_size=shape.batch_size, learning_rate=1e-3, compile=compiled)
    config = run_config(shape, trainer, device=ranks.device.type)
    parts = make_parts(shape, config, ranks)
    parts.heads.train()
    losses, stop, queue = [], StopRequest(), FigureQueue()

    def step(index: int) -> None:
        stats = accumulate_gradients(parts, config=config, ranks=ranks, step=index, stop=stop)
        norm = parts.engine.step(learning_rate=1e-3)
        queue.push(stats, step=index, learning_rate=1e-3, grad_norm=norm)
        losses.extend(figures.loss for figures in queue.ready())

    started = time.perf_counter()
    for index in range(3):
        step(index)
    drain()
    warm_s = time.perf_counter() - started
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for first in range(3, 3 + 3 * steps, steps):  # three rounds: median and spread
        started = time.perf_counter()
        for index in range(first, first + steps):
            step(index)
        drain()
        rounds.append((time.perf_counter() - started) / steps)
    seconds = statistics.median(rounds)
    tokens = shape.batch_size * shape.seq_len
    flops = flops_per_token(parts, shape)
    achieved = sum(flops.values()) * tokens / seconds / 1e12
    return {
        **vars(shape),
        "compiled": compiled,
        "warm_up_s": round(warm_s, 1),
        "step_ms": 1e3 * seconds,
        "step_ms_spread": 1e3 * (max(rounds) - min(rounds)),
        "tokens_per_s": tokens / seconds,
        "mflop_per_token": {name: value / 1e6 for name, value in flops.items()},
        "tflops": achieved,
        "mfu": achieved / ceiling,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "split_ms": split(parts, config, ranks),
    }


def split(parts, config, ranks: Accelerator) -> dict[str, float]:
    """Milliseconds of each stage, drained before and after; median of five."""
    engine, spec = parts.engine, parts.unroll_spec
    batch = parts.rows.batch(list(range(config.trainer.batch_size)))
    labels = depth_labels(
        batch.input_ids,
        document_index=batch.document_index,
        loss_mask=batch.loss_mask,
        num_depths=spec.num_depths,
    )
    counts = label_counts(labels)
    indices = list(range(config.trainer.batch_size))
    state: dict[str, object] = {}
    stages = {
        "target_forward": lambda: state.update(hidden=parts.rows.hidden(indices)),
        "modules_forward": lambda: state.update(
            outputs=run_heads(parts.heads, batch, hidden=state["hidden"], spec=spec)
        ),
        "modules_and_loss_forward": lambda: state.update(
            loss=engine.objective(batch, state["hidden"], labels, counts).loss
        ),
        "backward": lambda: engine.backward(state["loss"]),
        "optimizer": lambda: engine.step(learning_rate=1e-3),
    }
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(5):
        for name, call in stages.items():
            times[name].append(1e3 * time_of(call, ranks.device))
            state.pop("outputs", None)
    found = {name: statistics.median(values) for name, values in times.items()}
    found["loss"] = found.pop("modules_and_loss_forward") - found["modules_forward"]
    return found


def show(result: dict) -> None:
    """One line a shape."""
    parts = "  ".join(f"{name} {ms:.2f}" for name, ms in result["split_ms"].items())
    peak = "" if result["peak_gb"] is None else f"  peak {result['peak_gb']:.1f} GB"
    print(
        f"{result['model']} S={result['seq_len']} B={result['batch_size']} "
        f"compiled={result['compiled']}  {result['step_ms']:.2f} ms "
        f"(+-{result['step_ms_spread']:.2f})  {result['tokens_per_s']:,.0f} tok/s  "
        f"{result['tflops']:.1f} TFLOP/s  MFU {100 * result['mfu']:.1f} %{peak}\n    {parts} ms",
        flush=True,
    )


def drain() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_name() -> str:
    """Name of the accelerator."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
