"""One GPU: the head training step at the shapes of lab targets, with its time split and MFU.

    python tools/train_bench.py --out $OUT                   lab_small and lab_base, ce and kl
    python tools/train_bench.py --out $OUT --models runs/lab_base/target \
        --documents runs/lab_base/answers.jsonl                  trained weights and their own text
    python tools/train_bench.py --out $OUT --models lab_base --losses ce \
        --variants half_logits=false fused_rows=false --profile 20        what each lever brings
    python tools/train_bench.py --out $OUT --models mimo_7b --hidden random --unrolls ttt mixed \
        --modules 1 --seq-len 32768 --batch-size 1 --losses ce --steps 3     long rows
    python tools/train_bench.py --out /tmp/x --models lab_tiny --losses ce --seq-len 64 \
        --batch-size 2 --steps 3 --compile no                    tiny, on a CPU

Per model, batch size, loss and hidden state source: tokens/s and MFU of the whole step as
`train.py` runs it, against a bf16 8192^3 product measured in the same run; peak memory; the host's
time a step; the split by stage, each drained, so that the parts add up to more than the step. A
table, and all as `train_bench.json`. Weights are random unless a folder is given; the text is a
noisy permutation of a few tokens, which heads learn within tens of steps. A trained target with
experts should read its own text, which decides how evenly its experts are used. `--hidden random`
reads no text's states but random ones, as if from a cache, and builds no more of a target than
embedding, lm_head and the layer that modules start from: for shapes of `bench/shapes.py` whose
target would not fit beside the step. Under torchrun ranks share the modules by `--parallel`, and
with `--shard-target` a target of `bench/shapes.py`, drawn where it stays (`gpu_split_target.py`);
tokens/s are then of all ranks, operations, MFU and memory those of rank 0's GPU.
Letters: D hidden, V vocabulary, N modules, k depths, S row length.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from mtp_research.kernels.bench.bench_runner import describe_machine, drain, timed
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_research.bench.shapes import SHAPES, random_target
from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import PARALLEL, DataConfig, HeadConfig, TrainerConfig
from mtp_research.data.hidden_cache import HiddenCache
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.models.fresh import new_target
from mtp_research.models.target import Target, load_target, wrap_target
from mtp_research.training.documents import HeadDocuments, load_head_documents, read_head_documents
from mtp_research.training.loop import accumulate_gradients
from mtp_research.training.losses import losses as head_losses
from mtp_research.training.losses.loss_terms import loss_spec
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.parallel.parallel import make_engine, prepare_target
from mtp_research.training.setup import RunParts, build_heads
from mtp_research.training.step_costs import StepCosts, flops_per_token, product_tflops
from mtp_research.training.tracking import FigureQueue, StopRequest
from mtp_research.training.unroll import UNROLLS

WARM_UP_STEPS, NUM_ROUNDS = 3, 3
NUM_SPLITS, NUM_PROFILED = 5, 2
LEARNING_RATE = 1e-3
CHOICES = {"no": [False], "yes": [True], "both": [False, True]}
USED_TOKENS = 256  # of the vocabulary
MADE_UP_TOKENS = 1 << 19  # at the most, of made-up text
# lab_base with the widths of a model that people use: 2.6 G parameters.
LARGE = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    **{"n_routed_experts": 32, "vocab_size": 65536},
}
Stages = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """What is trained: a model of `conf/model` or a folder, and the size of a step."""

    model: str
    seq_len: int
    batch_size: int
    loss: str = "ce"
    documents: str | None = None  # file that `data.path` takes; None for made-up text
    # of the target's states: `live`, `kept` once computed as in a cache, or `random`
    hidden: str = "live"
    experts: str = "auto"  # what `model.experts` takes
    unroll: str = "chain"
    num_mtp_modules: int = 3
    num_depths: int = 3
    is_sharded: bool = False  # its layers are spread over the ranks


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each shape; one table and one JSON file."""
    args = _parse(argv)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    ranks = Accelerator(cpu=not torch.cuda.is_available())
    is_shown = ranks.is_main_process
    ceiling = product_tflops(ranks.device)
    machine = describe_machine()
    if is_shown:
        print(f"device {machine['device']}  bf16 product {ceiling:.1f} TFLOP/s")
    results = []
    for shape in _shapes_of(args):
        ways = itertools.product(CHOICES[args.compile], CHOICES[args.cuda_graphs])
        for compiled, captured in ways:
            sizes = {"batch_size": shape.batch_size, "learning_rate": LEARNING_RATE}
            spread = {"parallel": args.parallel, "shard_target": args.shard_target}
            trainer = TrainerConfig(**sizes, **spread, compile=compiled, cuda_graphs=captured)
            for result in measure(shape, trainer, ranks, args=args, ceiling=ceiling):
                results.append(result)
                if is_shown:
                    _show(result)
    if not is_shown:
        return
    report = {"machine": machine, "product_tflops": ceiling, "arguments": vars(args)}
    args.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report | {"rows": results}, indent=1, default=str)
    (args.out / "train_bench.json").write_text(text)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The head training step on one GPU.")
    add = parser.add_argument
    add("--out", type=Path, required=True)
    models = "names of conf/model, of mtp_research/bench/shapes.py or `large`, with random "
    models += "weights; or folders with trained ones; with --hidden random: names of shapes.py"
    add("--models", nargs="+", default=["lab_small", "lab_base"], help=models)
    add("--documents", help="what data.path takes; left out: made-up text")
    add("--losses", nargs="+", default=["ce", "kl"])
    add("--hidden", nargs="+", choices=["kept", "live", "random"], default=["live"])
    add("--unrolls", nargs="+", choices=UNROLLS, default=["chain"])
    add("--modules", type=int, default=3, help="MTP modules, N")
    add("--depths", type=int, default=3, help="objective.num_depths, k")
    add("--experts", nargs="+", default=["auto"], help="what model.experts takes")
    add("--seq-len", type=int, default=256)
    add("--batch-size", type=int, nargs="+", default=[256])
    add("--steps", type=int, default=20, help="of each of three rounds")
    fields = "measure again with other fields of LossSpec: half_logits=true,chunk_rows=4864"
    add("--variants", nargs="+", default=[], help=fields)
    add("--profile", type=int, default=0, help="longest kernels a stage to print")
    add("--compile", choices=CHOICES, default="yes")
    add("--cuda-graphs", choices=CHOICES, default="no")
    add("--parallel", choices=PARALLEL, default="ddp", help="how ranks share the modules")
    add("--shard-target", action="store_true", help="spread a shape of shapes.py over the ranks")
    return parser.parse_args(argv)


def _shapes_of(args: argparse.Namespace) -> list[Shape]:
    lists = (args.models, args.batch_size, args.losses, args.hidden, args.experts, args.unrolls)
    return [
        Shape(
            *(model, args.seq_len, size, loss, args.documents, *words),
            num_mtp_modules=args.modules,
            num_depths=args.depths,
            is_sharded=args.shard_target,
        )
        for model, size, loss, *words in itertools.product(*lists)
    ]


def measure(
    shape: Shape,
    trainer: TrainerConfig,
    ranks: Accelerator,
    *,
    args: argparse.Namespace,
    ceiling: float,
) -> Iterator[dict[str, object]]:
    """One shape: a result a variant."""
    on_gpu = torch.cuda.is_available()
    config = run_config(shape, trainer, device=ranks.device.type)
    parts, flops = make_parts(shape, config, ranks)
    parts.heads.train()
    run = StepRunner(parts, config, ranks)
    warm_s = run.seconds(WARM_UP_STEPS)
    parts.costs.mark("optimizer")
    stages = stages_of(parts, config, learning_rate=LEARNING_RATE)
    tokens = shape.batch_size * shape.seq_len
    for variant in ("", *args.variants):
        with loss_fields(parts, variant):
            run.seconds(1)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            rounds = [run.seconds(args.steps) / args.steps for _ in range(NUM_ROUNDS)]
            seconds = statistics.median(rounds)
            achieved = sum(flops.values()) * tokens / seconds / 1e12  # of a rank
            step_ms, spread_ms = 1e3 * seconds, 1e3 * (max(rounds) - min(rounds))
            yield {
                **vars(shape),
                **{"compiled": trainer.compile, "cuda_graphs": trainer.cuda_graphs},
                **{"variant": variant, "warm_up_s": round(warm_s, 1)},
                **{"step_ms": step_ms, "step_ms_spread": spread_ms},
                **{"parallel": trainer.parallel, "ranks": ranks.num_processes},
                "tokens_per_s": tokens * ranks.num_processes / seconds,
                "mflop_per_token": {name: value / 1e6 for name, value in flops.items()},
                **{"tflops": achieved, "mfu": achieved / ceiling, "host_ms": run.host_ms},
                "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
                "memory_gib": parts.costs.memory_gib(),
                **{"loss_first": run.losses[0], "loss_last": run.losses[-1]},
                "split_ms": split(stages, ranks),
                "kernels": kernels_of(stages, limit=args.profile) if args.profile else {},
            }


class StepRunner:
    """Runs optimizer steps one after the other, as the training loop does."""

    def __init__(self, parts: RunParts, config: TrainConfig, ranks: Accelerator) -> None:
        self._engine, self._queue, self._step = parts.engine, FigureQueue(), 0
        self._accumulate = functools.partial(
            accumulate_gradients, parts, config=config, ranks=ranks, stop=StopRequest()
        )
        self.losses: list[float] = []  # of every finished step
        # Mean time of the last round in which the host prepared and queued a step, without the wait
        # for the figures of the step before; near the step's own it means a wait inside.
        self.host_ms = 0.0

    def seconds(self, count: int) -> float:
        """Wall time of `count` more steps, the device drained before and after."""
        drain()
        started, waited = time.perf_counter(), 0.0
        for _ in range(count):
            stats = self._accumulate(step=self._step)
            norm = self._engine.step(learning_rate=LEARNING_RATE)
            self._queue.push(stats, step=self._step, learning_rate=LEARNING_RATE, grad_norm=norm)
            self._step += 1
            queued = time.perf_counter()
            self.losses += [figures.loss for figures in self._queue.ready()]
            waited += time.perf_counter() - queued
        self.host_ms = 1e3 * (time.perf_counter() - started - waited) / count
        drain()
        return time.perf_counter() - started


def _show(result: dict) -> None:
    parts = "  ".join(f"{name} {ms:.2f}" for name, ms in result["split_ms"].items())
    memory = "  ".join(f"{name} {gib:.2f} GiB" for name, gib in result["memory_gib"].items())
    peak = "" if result["peak_gb"] is None else f"  peak {result['peak_gb']:.1f} GB"
    print(
        f"{result['model']} S={result['seq_len']} B={result['batch_size']} {result['loss']} "
        f"{result['unroll']} N={result['num_mtp_modules']} hidden {result['hidden']} "
        f"experts {result['experts']} compiled={result['compiled']} "
        f"graphs={result['cuda_graphs']} "
        f"{result['parallel']} x {result['ranks']} [{result['variant']}]  "
        f"{result['step_ms']:.2f} ms "
        f"(+-{result['step_ms_spread']:.2f})  {result['tokens_per_s']:,.0f} tok/s  "
        f"{result['tflops']:.2f} TFLOP/s  MFU {100 * result['mfu']:.1f} %{peak}  "
        f"host {result['host_ms']:.1f} ms\n    {parts} ms\n    {memory or 'no allocator'}",
        flush=True,
    )
    for stage, kernels in result["kernels"].items():
        print(f"  {stage}")
        for row in kernels:
            print(f"    {row['ms']:8.3f} ms {row['launches']:6.0f} x  {row['kernel']:.84}")


def stages_of(parts: RunParts, config: TrainConfig, *, learning_rate: float) -> Stages:
    """What a step consists of, in order; `modules_forward` is a part of the one after it."""
    engine, spec, objective = parts.engine, parts.unroll_spec, objective_of(parts)
    indices = list(range(config.trainer.batch_size))
    batch = parts.rows.batch(indices)
    hidden = parts.rows.hidden(indices)
    marks = {"document_index": batch.document_index, "loss_mask": batch.loss_mask}
    labels = head_losses.depth_labels(batch.input_ids, **marks, num_depths=spec.num_depths)
    counts = head_losses.label_counts(labels)
    losses: list[torch.Tensor] = []
    return {
        "target_forward": lambda: parts.rows.hidden(indices),
        "modules_forward": lambda: objective.run(*head_losses.row_inputs(batch, hidden)),
        "modules_and_loss_forward": lambda: losses.append(
            engine.objective(batch, hidden, labels, counts).loss
        ),
        "backward": lambda: engine.backward(losses.pop()),
        "optimizer": lambda: engine.step(learning_rate=learning_rate),
    }


def objective_of(parts: RunParts) -> head_losses.HeadObjective:
    """The objective inside of whatever spreads it over ranks."""
    modules = parts.engine.objective.modules()
    return next(one for one in modules if isinstance(one, head_losses.HeadObjective))


@contextmanager
def loss_fields(parts: RunParts, fields: str) -> Iterator[None]:
    """Fields of the run's `LossSpec` changed for a while: `chunk_rows=4864,half_logits=true`."""
    objective = objective_of(parts)
    before = objective.loss_spec
    pairs = [field.split("=") for field in fields.split(",") if field]
    changes = {name: yaml.safe_load(value) for name, value in pairs}
    objective.loss_spec = dataclasses.replace(before, **changes)
    try:
        yield
    finally:
        objective.loss_spec = before


def split(stages: Stages, ranks: Accelerator) -> dict[str, float]:
    """Median milliseconds of each stage, drained before and after."""
    times: dict[str, list[float]] = {name: [] for name in stages}
    for _ in range(NUM_SPLITS):
        for name, call in stages.items():
            times[name].append(1e3 * time_of(call, ranks.device))
    found = {name: statistics.median(values) for name, values in times.items()}
    found["loss"] = found.pop("modules_and_loss_forward") - found["modules_forward"]
    return found


def kernels_of(stages: Stages, *, limit: int) -> dict[str, list[dict[str, object]]]:
    """The `limit` longest kernels of each stage: name, launches and milliseconds of one run.

    The profiler slows the host down, so its times are of use for shares of a stage only.
    """
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    found: dict[str, dict[str, list[float]]] = {name: {} for name in stages}
    for _ in range(NUM_PROFILED):
        for name, call in stages.items():
            with profile(activities=[activity]) as run:
                call()
                if on_gpu:
                    torch.cuda.synchronize()
            for event in run.key_averages():
                micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
                entry = found[name].setdefault(event.key, [0.0, 0.0])
                entry[0] += event.count / NUM_PROFILED
                entry[1] += micros / 1e3 / NUM_PROFILED
    return {
        name: [
            {"kernel": key, "launches": count, "ms": round(ms, 3)}
            for key, (count, ms) in sorted(kernels.items(), key=lambda item: -item[1][1])[:limit]
        ]
        for name, kernels in found.items()
    }


def run_config(shape: Shape, trainer: TrainerConfig, *, device: str) -> TrainConfig:
    """The configuration that a run of this shape would have."""
    # Noise is drawn on the host: a minute for a module with the experts of a large target.
    is_large = shape.is_sharded or shape.hidden == "random"
    noise = 0.0 if is_large else HeadConfig.init_noise
    return TrainConfig(
        model=ModelConfig(shape.model, "", "", device=device),
        data=DataConfig(shape.documents or "", seq_len=shape.seq_len, eval_documents=1),
        head=HeadConfig(num_mtp_modules=shape.num_mtp_modules, init_noise=noise),
        trainer=trainer,
    )


def make_target(name: str, *, device: torch.device, experts: str = "auto") -> Target:
    """A folder with weights, or random ones in the shape of `conf/model/NAME.yaml` or `large`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if Path(name).is_dir():
        dtype_name = str(dtype).removeprefix("torch.")
        return load_target(name, dtype=dtype_name, device=device.type, experts=experts)
    file = "lab_base" if name == "large" else name
    fields = yaml.safe_load((ROOT / "conf" / "model" / f"{file}.yaml").read_text())
    architecture = {"vocab_size": fields["pretrain"]["vocab_size"], **fields["architecture"]}
    architecture |= LARGE if name == "large" else {}
    model = new_target(fields["family"], architecture, dtype=dtype, device=device, seed=0)
    return wrap_target(model, experts=experts)


def short_target(name: str, *, device: torch.device, experts: str) -> Target:
    """A shape of `bench/shapes.py` without the layers that no module starts from."""
    arguments = SHAPES[name].arguments
    last = int(cast(int, arguments.get("first_k_dense_replace", 0)))
    fields = {**arguments, "num_hidden_layers": last + 1}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = AutoConfig.for_model(SHAPES[name].model_type, **fields)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return wrap_target(model, experts=experts)


class RandomStates:
    """Stands in for a cache on disk: the same random states for whatever rows are asked for."""

    def __init__(self, target: Target, *, seq_len: int) -> None:
        shape = (1, seq_len, target.config.hidden_size)
        generator = torch.Generator(target.device).manual_seed(0)
        self._states = torch.randn(
            shape, generator=generator, device=target.device, dtype=target.dtype
        )

    def open_shard(self, index: int) -> bool:
        """Nothing is to be checked."""
        del index
        return False

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """`[rows, S, D]`."""
        del name
        return self._states.expand(len(indices), -1, -1).contiguous()


class Parts(NamedTuple):
    """A run, and the operations of a token by part, counted while modules were whole."""

    run: RunParts
    flops: dict[str, float]


def make_parts(shape: Shape, config: TrainConfig, ranks: Accelerator) -> Parts:
    """A run without a held-out part: heads, engine and training rows."""
    costs = StepCosts(ranks.device, num_ranks=ranks.num_processes)
    if shape.hidden == "random":
        target = short_target(shape.model, device=ranks.device, experts=shape.experts)
    elif shape.is_sharded or (shape.model in SHAPES and not shape.model.startswith("lab_")):
        # lab targets are those of conf/model, as they start
        dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
        place = {"dtype": dtype, "device": ranks.device, "experts": shape.experts}
        layers = "sharded" if shape.is_sharded else "all"
        target = random_target(shape.model, **place, layers=layers)
    else:
        target = make_target(shape.model, device=ranks.device, experts=shape.experts)
    costs.mark("target")
    config.objective.loss, config.objective.unroll = shape.loss, shape.unroll
    heads = build_heads(config, target=target)
    prepare_target(target, trainer=config.trainer)
    spec = head_losses.UnrollSpec(shape.num_depths, config.objective.unroll, "cycle")
    objective = head_losses.HeadObjective(
        heads, unroll_spec=spec, loss_spec=loss_spec(config.objective)
    )
    flops = flops_per_token(
        heads,
        seq_len=shape.seq_len,
        num_depths=shape.num_depths,
        has_teacher=shape.loss != "ce",
        runs_target=shape.hidden == "live",
    )
    engine = make_engine(objective, trainer=config.trainer, ranks=ranks)
    costs.mark("modules")
    if shape.documents is None:
        documents = HeadDocuments(made_up_documents(shape), [], num_short=0, data_sha256="none")
    else:
        sizes = {"vocab_size": target.config.vocab_size, "num_depths": shape.num_depths}
        found = read_head_documents(config.data)
        documents = load_head_documents(config.data, found, model_path=shape.model, **sizes)
    packed = pack_first_fit(documents.train, seq_len=shape.seq_len, pad_id=0)
    kept, states = shape.hidden == "kept", None
    if shape.hidden == "random":
        states = cast(HiddenCache, RandomStates(target, seq_len=shape.seq_len))
    rows = TrainingRows(
        packed,
        target=target,
        hidden_source="post_norm",
        keep_hidden=kept,
        cache=states,
        checks_cache=False,
        captures=config.trainer.cuda_graphs,
    )
    assert rows.keeps_hidden == kept, "the rows do not fit in CACHE_BYTES"
    return Parts(RunParts(heads, engine, documents, rows, rows, spec, {}, "", costs), flops)


def made_up_documents(shape: Shape) -> list[EncodedDocument]:
    """Documents of half to three quarters of a row; nine tokens in ten follow a permutation."""
    num_rows = min(512, max(4, MADE_UP_TOKENS // shape.seq_len))
    generator = np.random.default_rng(0)
    follow = generator.permutation(USED_TOKENS)
    found = []
    for index in range(num_rows):
        length = int(generator.integers(shape.seq_len // 2, 3 * shape.seq_len // 4 + 1))
        for part, size in enumerate((length, shape.seq_len - length)):
            tokens = [int(generator.integers(USED_TOKENS))]
            while len(tokens) < size:
                noise = generator.random() < 0.1
                tokens.append(int(generator.integers(USED_TOKENS) if noise else follow[tokens[-1]]))
            mask = (False, *[True] * (size - 1))
            found.append(EncodedDocument(f"{index}-{part}", "synthetic", tuple(tokens), mask))
    return found


def time_of(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the device drained before and after."""
    drain()
    return timed(call, on_gpu=device.type == "cuda")[0] / 1e3


if __name__ == "__main__":
    main()
