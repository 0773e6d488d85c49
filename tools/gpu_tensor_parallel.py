"""Ranks that split a target: one process's texts, and the speed of GLM-4.5-Air on two GPUs.

    torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out $OUT             two H200
    torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out $OUT --plan experts --texts
    torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out $OUT --plan data --batch 32
    torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out $OUT --no-graphs --batch 32
    torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out /tmp/x --device cpu \
        --texts tiny tiny_experts --shape tiny_experts --context 16 --batch 2 --steps 5

Texts, in float32: each rank decodes the same prompts greedily with the whole small model and with
its part of it, K = 0 and K drafts of random modules, and counts equal texts. Speed, in bfloat16:
random weights, synthetic acceptance, as in `bench_decode`, whose row each rank measures. The limit
is the bytes that the rank with most has to read, unique experts of this routing, over its measured
copy bandwidth, and the link's time at the vendor's bandwidth (`planned.link_time_ms`); the step is
that of the slowest rank. Steps are compiled and captured on a GPU, NCCL's calls included
(`--no-compile`, `--whole-steps`: fewer compiled parts, if that fails); with `--no-graphs` they run
as they come. By the plan `data` ranks are dealt the requests of the batch, which is rounded up to a
multiple of theirs. Its rate is the sum of the ranks'.
Weights are drawn by part: GLM-4.5-Air and a module take some 109 GB of each of two GPUs. Exit
codes: 1 texts differ, 4 there are no such devices.
"""

import argparse
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from mtp_research.kernels.bench.bench_runner import describe_machine, measure_ceilings
from torch import distributed

from mtp_research.bench.bench_decode import parse_options as bench_options
from mtp_research.bench.bench_row import Case, measure_row
from mtp_research.bench.planned import GPUS, StepLimit, link_time_ms, num_bytes
from mtp_research.bench.shapes import SHAPES, drawn_target, random_heads
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.loading.parts import join_ranks
from mtp_research.models.target import Target

EXIT_NO_DEVICE = 4
NUM_TEXTS, PROMPT_TOKENS, TEXT_TOKENS = 8, 32, 48
PLANS = ("tensor", "experts", "data")
# NVLink multicast can put GPUs that others share out of service.
MULTICAST_OFF = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
MULTICAST_OFF |= {"NVSHMEM_DISABLE_NVLS": "1"}
Row = dict[str, object]


def main() -> int:
    """Compare texts, then measure; rank 0 prints and writes `tensor_parallel.json`."""
    args = _parse_options()
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks < 2 or (args.device == "cuda" and torch.cuda.device_count() < num_ranks):
        fault = f"a GPU for each of 2 or more processes of torchrun is needed, got {num_ranks} and"
        print(f"error: {fault} {torch.cuda.device_count()} GPUs; see --help.", file=sys.stderr)
        return EXIT_NO_DEVICE
    os.environ |= MULTICAST_OFF
    device = torch.device(args.device)
    join_ranks(device)
    report: Row = {"machine": describe_machine(), "ranks": num_ranks, "options": vars(args)}
    report["texts"] = [
        row for shape in args.texts for row in compare_texts(shape, args, device=device)
    ]
    _write(args, report)
    if args.shape != "none":
        measure(args, device=device, report=report)
    gc.collect()  # graphs that hold NCCL calls keep their communicator from being taken down
    distributed.destroy_process_group()
    texts = cast(list[Row], report["texts"])
    return int(any(row["equal"] != NUM_TEXTS for row in texts))


def _parse_options() -> argparse.Namespace:
    usage = "torchrun --nproc-per-node 2 tools/gpu_tensor_parallel.py --out FOLDER"
    parser = argparse.ArgumentParser(usage=usage)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--texts", nargs="*", default=["dense_1b", "lab_small"], choices=sorted(SHAPES))
    add("--shape", default="glm45_air", choices=["none", *sorted(SHAPES)])
    add("--plan", default="tensor", choices=PLANS, help="of the timed shape")
    add("--batch", type=int, nargs="+", default=[1, 32])
    add("--k", type=int, nargs="+", default=[0, 3])
    add("--context", type=int, default=1024, help="prompt tokens")
    add("--accept", type=float, default=0.8)
    add("--steps", type=int, default=50, help="timed steps")
    add("--device", default="cuda", choices=("cpu", "cuda"))
    add("--no-graphs", action="store_true", help="steps run as they come")
    add("--no-compile", action="store_true")
    add("--whole-steps", action="store_true", help="engine.layer_regions=false")
    return parser.parse_args()


def compare_texts(shape: str, args: argparse.Namespace, *, device: torch.device) -> list[Row]:
    """How many texts of this rank, and of all, are those of a whole model."""
    how = {"dtype": torch.float32, "device": device}
    plans = PLANS if "n_routed_experts" in SHAPES[shape].arguments else PLANS[:1]
    whole = drawn_target(shape, **how)
    expected = {k: decode(whole, args, k=k) for k in args.k}
    del whole
    rows: list[Row] = []
    for plan in plans:
        target = drawn_target(shape, **how, tp_plan=plan)
        for k in args.k:
            found = decode(target, args, k=k)
            of_ranks = _of_ranks(sum(text == expected[k][name] for name, text in found.items()))
            equal = sum(of_ranks) if target.exchange is not None else min(of_ranks)
            rows.append({"shape": shape, "plan": plan, "k": k, "equal": equal})
            _say(f"{shape} {plan} K {k}: {equal} of {NUM_TEXTS} texts are one process's")
    return rows


def decode(target: Target, args: argparse.Namespace, *, k: int) -> dict[str, tuple[int, ...]]:
    """Greedy texts of this rank's random prompts by number, captured as a timed step is."""
    on_gpu = target.device.type == "cuda" and not args.no_graphs
    engine = EngineConfig(
        max_num_requests=NUM_TEXTS,
        max_model_len=PROMPT_TOKENS + TEXT_TOKENS + 16,
        deferred_output=True,
        cuda_graphs=on_gpu,
        compile=on_gpu and not args.no_compile,
        layer_regions=not args.whole_steps,
        graph_batch_sizes=[NUM_TEXTS] if on_gpu else None,
        audit=False,
    )
    torch.manual_seed(1)
    heads = random_heads(target)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(k), engine=engine)
    generator = torch.Generator().manual_seed(2)
    shape = (NUM_TEXTS, PROMPT_TOKENS)
    prompts = torch.randint(5, target.config.vocab_size, shape, generator=generator).tolist()
    numbers = range(NUM_TEXTS)
    if target.exchange is not None:
        numbers = numbers[distributed.get_rank() :: distributed.get_world_size()]
    done = decoder.generate(
        [prompts[number] for number in numbers],
        sampling=SamplingParams(max_new_tokens=TEXT_TOKENS),
    )
    return {str(numbers[int(one.request_id)]): one.output_token_ids for one in done}


def measure(args: argparse.Namespace, *, device: torch.device, report: Row) -> None:
    """A row for each batch size and K, written as soon as it is there."""
    on_gpu = device.type == "cuda"
    gc.collect()
    copy_tb_per_s = measure_ceilings()["copy_tb_per_s"] if on_gpu else None
    if on_gpu:
        torch.cuda.empty_cache()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    target = drawn_target(args.shape, dtype=dtype, device=device, tp_plan=args.plan)
    torch.manual_seed(1)
    with target.device:  # the same numbers on every rank, which then keeps its part
        heads = random_heads(target)
    heads.split()
    sizes = (num_bytes(target.model), num_bytes(heads))
    report["held_bytes"] = _of_ranks(sizes)  # target and modules by rank
    for rank, parts in enumerate(cast(list[tuple[int, int]], report["held_bytes"])):
        _say(
            "rank {}: {:.2f} GB of the target, {:.2f} GB of a module".format(
                rank, *(size / 1e9 for size in parts)
            )
        )
    words = ["--steps", str(args.steps), "--accept", str(args.accept)]
    flags = {"--no-compile": args.no_compile, "--whole-steps": args.whole_steps}
    flags |= {"--no-graphs": args.no_graphs}
    options = bench_options([*words, *(name for name, is_set in flags.items() if is_set)])
    report["speed"] = rows = []
    num_shares = 1 if target.exchange is None else distributed.get_world_size()
    for batch, k in itertools.product(args.batch, args.k):
        case = Case(args.shape, -(-batch // num_shares), k, "eagle", 1 if k else 0, args.context)
        own = measure_row(target, heads, case, options, copy_tb_per_s)
        link_ms = _link_ms(heads, case)
        rows.append(combined(_of_ranks(own), link_ms=link_ms, is_dealt=num_shares > 1))
        _say(describe(rows[-1]))
        _write(args, report)
        gc.collect()


def _link_ms(heads: MTPHeads, case: Case) -> float:
    plan, drafts = SpecSettings(case.num_drafts, case.policy).plan(heads), case.num_drafts
    rows = case.batch * (drafts + 1)
    module_rows = case.batch * plan.num_rows_per_step if drafts else 0.0
    limit = StepLimit(0.0, rows, module_rows, rows + case.batch * drafts, None, 0.0)
    return link_time_ms(heads, limit, gpu=GPUS["h200"], num_gpus=distributed.get_world_size())


def combined(rows: list[Row], *, link_ms: float, is_dealt: bool = False) -> Row:
    """One row of all ranks': the slowest step, and the limit of the one that reads most.

    Requests and rates of ranks that were dealt requests are added up.
    """
    slowest = max(rows, key=lambda row: cast(float, row["step_ms"]))
    limits = [cast(float, row["limit_ms"]) for row in rows if row["limit_ms"] is not None]
    limit_ms = max(limits) + link_ms if limits else None
    share = None if limit_ms is None else limit_ms / cast(float, slowest["step_ms"])
    added = ("batch", "tok_per_s") if is_dealt else ()
    slowest |= {name: sum(cast(float, row[name]) for row in rows) for name in added}
    return slowest | {"link_ms": link_ms, "limit_ms": limit_ms, "share": share}


def describe(row: Row) -> str:
    """One line."""
    limit = "no limit known" if row["limit_ms"] is None else f"limit {row['limit_ms']:.3f} ms"
    share = "" if row["share"] is None else f", share {row['share']:.1%}"
    experts = "" if row["experts"] is None else f", {row['experts']:.1f} experts a layer"
    return (
        f"K {row['num_drafts']}  batch {row['batch']:3}  step {row['step_ms']:.3f} ms  "
        f"{limit} (link {row['link_ms']:.3f}){share}  {row['tok_per_s']:,.0f} tok/s, length "
        f"{row['tau']:.2f}{experts}, {row['launches']} launches, ready in {row['ready_s']:.0f} s"
    )


def _of_ranks(own: object) -> list:
    """What every rank has, in their order."""
    found: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, own)
    return found


def _say(line: str) -> None:
    if distributed.get_rank() == 0:
        print(line, flush=True)


def _write(args: argparse.Namespace, report: Row) -> None:
    if distributed.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "tensor_parallel.json").write_text(json.dumps(report, default=str))


if __name__ == "__main__":
    sys.exit(main())
