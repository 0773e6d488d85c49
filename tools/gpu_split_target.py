"""Two GPUs: heads of GLM-4.5-Air's shape, 106 B parameters, beside a target that they share.

    python tools/gpu_split_target.py --out $OUT                        two GPUs of 141 GB, all cases
    python tools/gpu_split_target.py --out /tmp/x --cases tiny_n1 tiny_fp8_n3     tiny, on a CPU

Per case a fresh set of processes under torchrun runs `train_bench.py`: random weights that each
rank draws for its own part of the target, steps as `train.py` runs them on random text; tokens/s of
both GPUs, MFU of one, memory by part, the split of a step by stage. A table, and all rows as
`split_target.json`. What the plan expects is printed beside it. A case that fails, for want of
memory too, leaves the others alone; the exit status counts the failed ones.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch

from mtp_research.app.training_fit import GIB, memory_of, planned_heads
from mtp_research.bench.shapes import SHAPES, sizes_only
from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, HeadConfig, TrainerConfig

NUM_RANKS, PORT = 2, 29650
LIMIT_S = 240  # of a case


class Case(NamedTuple):
    """What is trained beside what."""

    shape: str  # key of `bench/shapes.py`
    num_mtp_modules: int
    parallel: str
    batch_size: int  # rows of a GPU
    hidden: str = "live"  # or random: as from a cache, without the target's layers


CASES = {
    "n1_zero2": Case("glm45_air", 1, "zero2", 4),
    "n1_fsdp2": Case("glm45_air", 1, "fsdp2", 4),
    "n3_fp8": Case("glm45_air_fp8_rows", 3, "fsdp2", 16),
    "n3_cached": Case("glm45_air", 3, "fsdp2", 32, "random"),
    "tiny_n1": Case("tiny_experts", 1, "zero2", 2),
    "tiny_fp8_n3": Case("tiny_experts_fp8", 3, "fsdp2", 2),
}
SHIPPED = [name for name in CASES if not name.startswith("tiny")]


def main() -> int:
    """Run the cases one after the other; the exit status counts the failed ones."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--cases", nargs="+", choices=list(CASES), default=SHIPPED)
    add("--seq-len", type=int, default=256)
    add("--steps", type=int, default=4, help="of each of three rounds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, name in enumerate(args.cases):
        seconds = launch(name, args, port=PORT + number)
        file = args.out / name / "train_bench.json"
        row = json.loads(file.read_text())["rows"][0] if file.is_file() else {}
        rows.append({"case": name, "seconds": seconds, "planned_gib": planned(name, args)} | row)
        show(rows[-1])
    (args.out / "split_target.json").write_text(json.dumps(rows, indent=1))
    return sum("step_ms" not in row for row in rows)


def words_of(name: str, args: argparse.Namespace) -> list[str]:
    """Words of `train_bench.py` for a case."""
    case = CASES[name]
    words = ["--out", str(args.out / name), "--models", case.shape, "--losses", "ce"]
    words += ["--modules", str(case.num_mtp_modules), "--parallel", case.parallel]
    words += ["--batch-size", str(case.batch_size), "--seq-len", str(args.seq_len)]
    words += ["--steps", str(args.steps), "--compile", "no", "--hidden", case.hidden]
    return [*words, "--shard-target"] if case.hidden == "live" else words


def launch(name: str, args: argparse.Namespace, *, port: int) -> float:
    """Run one case in its own processes; gives its seconds."""
    started = time.perf_counter()
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
    words += ["--master-port", str(port), str(ROOT / "tools" / "train_bench.py")]
    words += words_of(name, args)
    # Layers and modules are gathered in turn: without this each keeps what it once had.
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    process = subprocess.Popen([sys.executable, *words], start_new_session=True, env=environment)
    try:
        code: int | str = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks too: they hold the devices
        process.wait()
        code = f"killed after {LIMIT_S} s"
    seconds = time.perf_counter() - started
    print(f"{name}: exit {code}, {seconds:.0f} s", flush=True)
    return seconds


def planned(name: str, args: argparse.Namespace) -> dict[str, float]:
    """What the plan says of a case, by part."""
    case = CASES[name]
    shape = SHAPES[case.shape]
    is_fp8 = "quantization_config" in shape.arguments
    model = ModelConfig(case.shape, shape.model_type, f"random:{case.shape}", keep_fp8=is_fp8)
    model.architecture = dict(shape.arguments)
    spread = {"parallel": case.parallel, "shard_target": case.hidden == "live"}
    config = TrainConfig(
        model=model,
        data=DataConfig("", seq_len=args.seq_len),
        head=HeadConfig(num_mtp_modules=case.num_mtp_modules),
        trainer=TrainerConfig(batch_size=case.batch_size, **spread),
    )
    target = sizes_only(model, dtype=torch.bfloat16).target
    heads = planned_heads(target, head=config.head)
    is_cached = case.hidden == "random"
    parts = memory_of(config, heads, num_gpus=NUM_RANKS, is_cached=is_cached)
    return {part: size / GIB for part, size in parts._asdict().items()}


def show(row: dict) -> None:
    """Figures of a case, and its memory beside the plan's."""
    shares = " ".join(f"{part} {gib:.2f}" for part, gib in row["planned_gib"].items())
    print(f"{row['case']}: planned {sum(row['planned_gib'].values()):.2f} GiB: {shares}")
    if "step_ms" not in row:
        print(f"{row['case']}: FAILED, see the output above", flush=True)
        return
    found = row["memory_gib"]
    shares = " ".join(f"{part} {gib:.2f}" for part, gib in found.items())
    print(
        f"{row['case']}: {row['tokens_per_s']:,.0f} tok/s  MFU {row['mfu']:.1%}  "
        f"{row['step_ms']:.1f} ms  {sum(found.values()):.2f} GiB: {shares}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
