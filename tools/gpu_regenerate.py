"""Tokens per second of `regenerate` beside those of its decoding steps alone; on one GPU.

    python tools/gpu_regenerate.py --shape smollm2_135m --batch 256
    python tools/gpu_regenerate.py --cpu --shape tiny --batch 4 --documents 12 --prompt 8 --output 6

Documents have random prompts of `--prompt` tokens and end after 1 to 2 x `--output` - 1 tokens, all
lengths alike, so that places come free one by one as real answers end. They are decoded and written
by the function that `regenerate` calls, with its settings. "Steps alone" is the same batch with
every place taken and no prompt waiting, on texts as long as the documents are on average. `--admit`
compares numbers of free places from which on prompts are run (`engine.admit_together`). Prints a
line a pass, and last one JSON line.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from mtp_research.kernels.bench.bench_runner import describe_machine, drain

from mtp_research.bench.shapes import SHAPES, random_target
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.target import Target
from mtp_research.runtime.compiling import num_since, start_compilers
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.studies.answer_tasks import Task
from mtp_research.studies.regenerate import captured_engine, write_answers

_SETTLING_STEPS = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the passes and their JSON line; returns the exit status."""
    options = _parser().parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not options.cpu:
        print("error: this needs a CUDA GPU; --cpu tries the command.", file=sys.stderr)
        return EnvironmentFault.exit_code
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        start_compilers()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    target = random_target(options.shape, dtype=dtype, device=device)
    rows = []
    usual = captured_engine(target, batch=options.batch, max_model_len=2).admit_together
    for admit in options.admit or [usual]:
        rows += measure(target, options, admit=admit)
    report = {"machine": describe_machine(), "arguments": vars(options), "rows": rows}
    line = json.dumps(report, default=str)
    if options.json is not None:
        options.json.write_text(line + "\n")
    print(line)
    return 0


def measure(target: Target, options: argparse.Namespace, *, admit: int) -> list[dict[str, object]]:
    """A row a pass of one decoder, which is built and captured before."""
    started = time.perf_counter()
    length = options.prompt + 2 * options.output + 2 * _SETTLING_STEPS + options.steps
    engine = captured_engine(target, batch=options.batch, max_model_len=length)
    engine = replace(engine, admit_together=admit)
    if target.device.type == "cpu":
        engine = replace(engine, backend="auto", cuda_graphs=False, compile=False)
        engine = replace(engine, capture_mixed=False)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    sampling = SamplingParams(temperature=options.temperature, seed=0)
    if options.temperature > 0:
        sampling = replace(sampling, top_k=20, top_p=0.95)
    decoder.warm_up(sampling, num_requests=options.documents)
    ready_s = time.perf_counter() - started
    steps_alone, rows = _steps_alone(decoder, options, sampling), []
    for number in range(options.passes):
        row = _documents(decoder, options, sampling, seed=number)
        row |= {"admit_together": admit, "pass": number + 1, "ready_s": ready_s}
        row |= {"steps_alone": steps_alone, "ratio": row["tok_per_s"] / steps_alone}
        rows.append(row)
        print(
            f"{options.shape} batch {options.batch} admit {admit} pass {number + 1}: "
            f"{row['tok_per_s']:.0f} tok/s, steps alone {steps_alone:.0f}, "
            f"ratio {row['ratio']:.3f}; {row['num_steps']} steps, host {row['host_ms']:.2f} ms and "
            f"wall {row['step_ms']:.2f} ms a step, {row['num_builds']} builds later, "
            f"ready in {ready_s:.0f} s",
            flush=True,
        )
    return rows


def _steps_alone(
    decoder: SpecDecoder, options: argparse.Namespace, sampling: SamplingParams
) -> float:
    """Tokens per second of steps in which every place decodes."""
    draw, ids = random.Random(0), range(2, decoder.target.config.vocab_size)
    length = options.prompt + options.output // 2
    requests = [
        decoder.add_request(
            draw.choices(ids, k=length),
            sampling=replace(sampling, seed=seed, max_new_tokens=decoder.max_model_len - length),
        )
        for seed in range(options.batch)
    ]
    while any(request.is_prefilling or not request.block_ids for request in requests):
        decoder.step()
    for _ in range(_SETTLING_STEPS):
        decoder.step()
    drain()
    before, started = decoder.stats.num_emitted_tokens, time.perf_counter()
    for _ in range(options.steps):
        decoder.step()
    drain()
    rate = (decoder.stats.num_emitted_tokens - before) / (time.perf_counter() - started)
    for request in requests:
        decoder.abort(request)
    return rate


def _documents(
    decoder: SpecDecoder, options: argparse.Namespace, sampling: SamplingParams, *, seed: int
) -> dict[str, float]:
    draw, ids = random.Random(seed), range(2, decoder.target.config.vocab_size)
    lengths = [draw.randint(1, 2 * options.output - 1) for _ in range(options.documents)]
    tasks = [
        Task(f"{seed}:{number}", "bench", tuple(draw.choices(ids, k=options.prompt)), number=number)
        for number in range(options.documents)
    ]

    def params_of(task: Task) -> SamplingParams:
        return replace(sampling, seed=task.number, max_new_tokens=lengths[task.number])

    stats, builds = decoder.stats, decoder.num_builds
    before = stats.num_steps, stats.busy_s - stats.wait_s
    with tempfile.TemporaryDirectory() as folder:
        drain()
        started = time.perf_counter()
        write_answers(decoder, tasks, output=Path(folder) / "answers.jsonl", params_of=params_of)
        drain()
        wall_s = time.perf_counter() - started
    num_steps = stats.num_steps - before[0]
    return {
        "num_tokens": sum(lengths),
        "wall_s": wall_s,
        "tok_per_s": sum(lengths) / wall_s,
        "num_steps": num_steps,
        "step_ms": wall_s / num_steps * 1e3,
        "host_ms": (stats.busy_s - stats.wait_s - before[1]) / num_steps * 1e3,
        "num_builds": num_since(builds, decoder.num_builds) or 0,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python tools/gpu_regenerate.py")
    add = parser.add_argument
    add("--shape", default="smollm2_135m", choices=SHAPES, help="random weights of this shape")
    add("--batch", type=int, default=256, help="requests at a time")
    add("--documents", type=int, default=4096, help="of a pass")
    add("--prompt", type=int, default=64, help="tokens of each prompt")
    add("--output", type=int, default=256, help="mean tokens of an answer")
    add(
        "--temperature",
        type=float,
        default=0.6,
        help="as regenerate: top-k 20, top-p .95; 0 greedy",
    )
    add("--admit", type=int, nargs="+", help="engine.admit_together; default: as regenerate")
    add("--steps", type=int, default=200, help="timed alone")
    add("--passes", type=int, default=2)
    add("--cpu", action="store_true", help="run without a GPU, to try the command")
    add("--json", type=Path, help="also write the JSON line to this file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
