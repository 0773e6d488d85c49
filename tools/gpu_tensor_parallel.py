"""Two GPUs against one: the same tokens, and what speed, with the target split by its tp_plan.

    python tools/gpu_tensor_parallel.py --out $OUT --shape dense_1b --graphs        two GPUs
    python tools/gpu_tensor_parallel.py --out /tmp/x --shape tiny --device cpu \
        --steps 8 --batches 2                                                       on a CPU
    python tools/gpu_tensor_parallel.py --out /tmp/x --shape tiny_experts --plan experts \
        --device cpu --steps 8 --batches 2                              whole experts a rank

Writes random weights of a shape once, to `--work`, then decodes the same prompts in one process and
in torchrun's, greedily, with K = 0 and K drafts of random modules. In bfloat16 a sum over ranks
rounds differently, so texts may part where two logits are all but equal: the share of equal texts
and the first difference are printed. `--dtype float32` should keep them equal. With `--graphs` the
step is captured, NCCL's sums included. A world that fails or takes too long leaves the rows that it
has measured. Without the devices it exits with 4.
"""

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from mtp_research.kernels.bench.bench_runner import describe_machine

from mtp_research.bench.shapes import SHAPES, random_target
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.models.target import Target, load_target

EXIT_NO_DEVICE = 4
PROMPT_TOKENS = 32
PORT = "29631"
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
# NVLink multicast can put GPUs that others share out of service.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
MULTICAST_OFF |= {"NVSHMEM_DISABLE_NVLS": "1"}


def main() -> int:
    """Run both worlds and compare; exit status 1 when a run failed."""
    args = _parse_options()
    args.dtype = args.dtype or DTYPES[args.device]
    model = args.work / f"{args.shape}_{args.dtype}"
    if args.device == "cuda" and torch.cuda.device_count() < (args.world or args.ranks):
        fault = f"{args.ranks} CUDA devices are needed, {torch.cuda.device_count()} are visible"
        hint = "set --device cpu with --shape tiny or tiny_experts."
        print(f"error: {fault}; {hint}", file=sys.stderr)
        return EXIT_NO_DEVICE
    if args.world:
        decode(args, model)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if not (model / "config.json").is_file():
        dtype, device = getattr(torch, args.dtype), torch.device(args.device)
        random_target(args.shape, dtype=dtype, device=device).model.save_pretrained(model)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    commands = {1: [sys.executable], args.ranks: [*launcher, "--master-port", PORT]}
    failed = [world for world, words in commands.items() if not run_world(args, world, words)]
    for world in failed:
        print(f"FAILED with {world} processes; see the output above")
    options = {name: str(value) for name, value in vars(args).items()}
    report(args.out, ranks=args.ranks, options=options)
    return int(bool(failed))


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, required=True, help="small results")
    add("--work", type=Path, default=Path("/tmp/gpu_tensor_parallel"), help="weights, gigabytes")
    add("--shape", default="dense_1b", choices=sorted(SHAPES))
    add("--device", default="cuda", choices=sorted(DTYPES))
    add("--dtype", choices=sorted(set(DTYPES.values())), help="default bfloat16 on a GPU")
    add("--ranks", type=int, default=2)
    add("--plan", default="tensor", choices=("experts", "tensor"))
    add("--batches", type=int, nargs="+", default=[1, 8, 32])
    add("--k", type=int, nargs="+", default=[0, 3])
    add("--steps", type=int, default=64, help="tokens of a request")
    add("--graphs", action="store_true")
    add("--limit-s", type=int, default=100, help="of one world")
    add("--world", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_world(args: argparse.Namespace, world: int, launcher: list[str]) -> bool:
    """Whether the processes of one world ended well; timeout's signal reaches torchrun's ranks."""
    path = args.out / f"world_{world}.json"
    path.unlink(missing_ok=True)
    limit = ["timeout", "--kill-after", "10", str(args.limit_s)]
    words = [*limit, *launcher, __file__, *sys.argv[1:], "--world", str(world)]
    code = subprocess.run(words, check=False, env=os.environ | MULTICAST_OFF).returncode
    return code == 0 and path.is_file()


def decode(args: argparse.Namespace, model: Path) -> None:
    """One process of one world; rank 0 writes `world_N.json` after every row."""
    plan = "none" if args.world == 1 else args.plan
    target = load_target(model, dtype=args.dtype, device=args.device, tp_plan=plan)
    torch.manual_seed(1)
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=1)).eval().requires_grad_(False)
    rows: list[dict[str, object]] = []
    for k, batch in itertools.product(args.k, args.batches):
        rows.append(measure(args, target, heads, k=k, batch=batch))
        if os.environ.get("RANK", "0") == "0":
            (args.out / f"world_{args.world}.json").write_text(json.dumps(rows))
    if torch.distributed.is_initialized():
        gc.collect()  # graphs that hold NCCL calls keep their communicator from being taken down
        torch.distributed.destroy_process_group()


def measure(
    args: argparse.Namespace, target: Target, heads: MTPHeads, *, k: int, batch: int
) -> dict[str, object]:
    """Texts and tokens per second of one batch size and number of drafts, second pass of two."""
    engine = EngineConfig(
        **{"max_num_requests": batch, "max_num_batched_tokens": max(512, batch * (k + 1))},
        max_model_len=PROMPT_TOKENS + args.steps + k + 2,
        **{"deferred_output": args.graphs, "cuda_graphs": args.graphs, "audit": False},
    )
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=k), engine=engine)
    generator = torch.Generator().manual_seed(batch)
    shape = (batch, PROMPT_TOKENS)
    prompts = torch.randint(5, target.config.vocab_size, shape, generator=generator).tolist()
    sampling = SamplingParams(max_new_tokens=args.steps)
    for _ in range(2):
        started = time.perf_counter()
        done = list(decoder.generate(prompts, sampling=sampling))
        seconds = time.perf_counter() - started
    texts = {record.request_id: record.output_token_ids for record in done}
    num_tokens = sum(map(len, texts.values()))
    return {"k": k, "batch": batch, "tokens_per_s": num_tokens / seconds, "texts": texts}


def report(out: Path, *, ranks: int, options: dict[str, str]) -> None:
    """Equal texts and speed, row by row, and everything as JSON."""
    files = [out / f"world_{n}.json" for n in (1, ranks)]
    alone, split = (json.loads(file.read_text()) if file.is_file() else [] for file in files)
    found = []
    for one, many in zip(alone, split, strict=False):  # a world that failed has fewer rows
        pairs = [(one["texts"][name], text) for name, text in many["texts"].items()]
        parted = [
            next((i for i, (a, b) in enumerate(zip(*p, strict=False)) if a != b), None)
            for p in pairs
        ]
        first = min((i for i in parted if i is not None), default=None)
        speeds = (one["tokens_per_s"], many["tokens_per_s"])
        row = {"k": one["k"], "batch": one["batch"], "equal": parted.count(None) / len(parted)}
        found.append(row | {"first_difference": first, "tokens_per_s": speeds})
        print(
            f"K {row['k']}  batch {row['batch']:3d}  equal texts {row['equal']:.0%} (first "
            f"difference {first})  {speeds[0]:,.0f} -> {speeds[1]:,.0f} tok/s"
        )
    record = {"machine": describe_machine(), "ranks": ranks, "options": options, "rows": found}
    (out / "tensor_parallel.json").write_text(json.dumps(record))
    print(json.dumps(record))


if __name__ == "__main__":
    sys.exit(main())
