"""Two GPUs against one: DDP, ZeRO-2, ZeRO-3 and FSDP2 on lab_base, same loss curves, what speed.

    python tools/gpu_scale.py --out $OUT                                 two GPUs, all modes
    python tools/gpu_scale.py --out /tmp/x --model lab_tiny --seq-len 64 --global-batch 4 \
        --rank-batch 2 --steps 4 --modes single ddp fsdp2                tiny, on a CPU

Each mode is a fresh set of processes that does two things. Curve: one global batch however many
ranks share it, so the losses of all modes should agree to rounding; `single_split` (one GPU, the
same batch in two micro-batches) shows what bf16 rounding alone does. Speed: one batch a rank, so
that tokens/s should grow with the ranks. Same step as `train.py`'s, random text, no checkpoints.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[n]) for n in (0, 1)]

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from accelerate import Accelerator
from train_bench import Shape, drain, make_parts, run_config

from mtp_research.config.training_schema import TrainerConfig
from mtp_research.training.loop import accumulate_gradients
from mtp_research.training.tracking import StopRequest

# name -> (ranks, trainer.parallel, micro-batches of the curve)
MODES = {
    "single": (1, "ddp", 1),
    "single_split": (1, "ddp", 2),
    "ddp": (2, "ddp", 1),
    "zero2": (2, "zero2", 1),
    "zero3": (2, "zero3", 1),
    "fsdp2": (2, "fsdp2", 1),
}
LEARNING_RATE = 2e-4
LIMIT_S = 150  # of a mode


def main() -> int:
    """Run the modes one after the other, then compare; the exit status counts the failed modes."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--model", default="lab_base", help="of conf/model, `large`, or a folder")
    add("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    add("--seq-len", type=int, default=256)
    add("--global-batch", type=int, default=64, help="rows of a step, curve")
    add("--rank-batch", type=int, default=128, help="rows a rank, speed")
    add("--steps", type=int, default=60)
    add("--worker", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        run_mode(args)
        return 0
    failed = [name for name in args.modes if not launch(name)]
    results = [json.loads(path.read_text()) for path in sorted(args.out.glob("mode_*.json"))]
    report(results, out=args.out)
    for name in failed:
        print(f"FAILED {name}; see the output above")
    return len(failed)


def launch(name: str) -> bool:
    """Run one mode in its own processes."""
    words = [__file__, *sys.argv[1:], "--worker", name]
    started = time.perf_counter()
    ranks = MODES[name][0]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-port", str(29600 + list(MODES).index(name))]
    process = subprocess.Popen([sys.executable, *launcher, *words], start_new_session=True)
    try:
        code: int | str = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too: they hold the devices
        code = f"killed after {LIMIT_S} s"
    print(f"{name}: exit {code}, {time.perf_counter() - started:.0f} s", flush=True)
    return code == 0


def run_mode(args: argparse.Namespace) -> None:
    """One rank of one mode; rank 0 writes `mode_NAME.json`."""
    num_ranks, parallel, num_micro = MODES[args.worker]
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    ranks = Accelerator(cpu=not torch.cuda.is_available())
    assert ranks.num_processes == num_ranks, f"{ranks.num_processes} ranks, not {num_ranks}"
    curve_batch = args.global_batch // (num_ranks * num_micro)
    losses, _ = train(args, ranks, parallel, batch_size=curve_batch, num_micro=num_micro)
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:  # forget the memory of the curve
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    _, seconds = train(args, ranks, parallel, batch_size=args.rank_batch, num_micro=1)
    if ranks.is_main_process:
        found = {
            "mode": args.worker,
            "ranks": num_ranks,
            "losses": losses,
            "rows_per_s": args.rank_batch * num_ranks / seconds,
            "tokens_per_s": args.rank_batch * num_ranks * args.seq_len / seconds,
            "step_ms": 1e3 * seconds,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
        }
        (args.out / f"mode_{args.worker}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def train(
    args: argparse.Namespace, ranks: Accelerator, parallel: str, *, batch_size: int, num_micro: int
) -> tuple[list[float], float]:
    """Losses of `args.steps` steps, and seconds a step over the second half."""
    sizes = {"batch_size": batch_size, "gradient_accumulation_steps": num_micro}
    trainer = TrainerConfig(parallel=parallel, learning_rate=LEARNING_RATE, **sizes)
    shape = Shape(args.model, args.seq_len, batch_size)
    config = run_config(shape, trainer, device=ranks.device.type)
    parts = make_parts(shape, config, ranks).run
    parts.heads.train()
    losses = []
    for index in range(args.steps):
        if index == args.steps // 2:
            drain()
            started = time.perf_counter()
        stop = StopRequest()
        stats = accumulate_gradients(parts, config=config, ranks=ranks, step=index, stop=stop)
        parts.engine.step(learning_rate=LEARNING_RATE)
        losses.append(stats.loss)
    drain()
    seconds = (time.perf_counter() - started) / (args.steps - args.steps // 2)
    return [float(loss) for loss in losses], seconds


def report(results: list[dict], *, out: Path) -> None:
    """A table of the modes beside one GPU, and everything as JSON."""
    by_mode = {result["mode"]: result for result in results}
    single = by_mode.get("single")
    rows = []
    for name in (name for name in MODES if name in by_mode):
        result = by_mode[name]
        row = {key: value for key, value in result.items() if key != "losses"}
        row |= {"loss_first": result["losses"][0], "loss_last": result["losses"][-1]}
        if single is not None:
            pairs = zip(result["losses"], single["losses"], strict=True)
            gaps = [abs(loss - other) / other for loss, other in pairs]
            row |= {"max_relative_gap": max(gaps), "mean_relative_gap": sum(gaps) / len(gaps)}
            row["speedup"] = result["tokens_per_s"] / single["tokens_per_s"]
        rows.append(row)
        print(
            f"{name:13s} ranks {row['ranks']}  loss {row['loss_first']:.4f} -> "
            f"{row['loss_last']:.4f}  gap to single max {row.get('max_relative_gap', 0):.2e} "
            f"mean {row.get('mean_relative_gap', 0):.2e}  {row['step_ms']:.1f} ms  "
            f"{row['tokens_per_s']:,.0f} tok/s  x{row.get('speedup', 1):.2f}  "
            f"peak {row['peak_gb'] or 0:.2f} GB a rank"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    record = {"device": device, "torch": torch.__version__, "rows": rows, "runs": results}
    (out / "scale.json").write_text(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
