"""Whole requests end to end: prompts in, texts out, in a continuous batch, the first pass counted.

    python -m mtp_research.bench.end_to_end --shape mimo_7b --k 0 3 --requests 128 --batch 32
    python -m mtp_research.bench.end_to_end --shape mimo_7b --k 3 --engine vllm
    python -m mtp_research.bench.end_to_end --target FOLDER --heads FOLDER --k 3
    python -m mtp_research.bench.end_to_end --cpu --shape tiny --prompt 16 --output 8

All requests of a pass are there at its start, or come one by one with `--rate` or `--arrivals`;
then a time to the first token counts from a request's arrival. The first pass compiles and captures
while requests wait, unless `--warm-up` has all steps captured before; later ones show the warm
loop. Each line says when its decoder was ready, in seconds since the process was started. Random
weights of `--shape` come with synthetic acceptance (`--accept`, the chance of a draft given that it
is reached) and random prompts, a folder's own weights with its head and shipped text. The decoder
of `--also` is the same, so that other lengths and arrivals cost no other start. With `--engine
vllm` vLLM 0.24 gets the same requests at the same times. Prints a line a pass, and last one JSON
line. `bench_decode` times the steps alone.
Letters: K drafts per step.
"""

import argparse
import gc
import itertools
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch

from mtp_research.bench.shapes import SHAPES, config_of, random_heads, random_target
from mtp_research.bench.vllm_loop import VllmLoop
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord, count_acceptance
from mtp_research.decode.verify.verify import VerifyOptions
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompt, load_prompts
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.kernels.bench.bench_runner import describe_machine, drain
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.runtime.compiling import num_since, old_objects_kept, start_compilers
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.provenance import write_error

_ACCEPT = 0.8
_ROOM_TOKENS = 64  # beyond prompt and output


def main(arguments: list[str] | None = None) -> int:
    """Print the passes of every K and their JSON line; returns the exit status."""
    options = parse_options(arguments)
    try:
        return _run(options)
    except (ConfigError, EnvironmentFault, IntegrityError) as fault:
        write_error(str(fault))
        return fault.exit_code


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options by their names; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.bench.end_to_end")
    add = parser.add_argument
    add("--shape", default="mimo_7b", choices=SHAPES, help="random weights of this shape")
    add("--target", help="folder or hub id of a target in place of --shape; needs --heads")
    add("--heads", help="folder of the target's heads; their acceptance is the real one")
    add("--engine", default="own", choices=("own", "vllm"), help="vllm: random weights alone")
    add("--vllm", type=json.loads, default={}, help="more arguments of vllm.LLM, as JSON")
    add("--vllm-apart", action="store_true", help="its engine in a process of its own")
    add("--k", nargs="+", type=int, default=[0, 3])
    add("--policy", nargs="+", default=["eagle"], help="K = 0 is measured once")
    add("--accept", type=float, help=f"synthetic acceptance of random weights; default {_ACCEPT}")
    add("--requests", type=int, default=128, help="of a pass")
    add("--rate", type=float, help="they come at random, so many a second (a Poisson process)")
    add("--arrivals", type=Path, help="they come when this file's lines say: seconds, ascending")
    add("--batch", type=int, default=32, help="requests at a time")
    add("--prompt", type=int, default=1024, help="tokens of each prompt")
    add("--output", type=int, default=256, help="tokens of each text")
    add("--also", nargs="*", default=[], help="PROMPT:OUTPUT or PROMPT:OUTPUT:ARRIVALS, each")
    add("--passes", type=int, default=3, help="0 with --warm-up: compile alone")
    add("--warm-up", action="store_true", help="capture all steps before the passes, as eval.py")
    add("--chunk", type=int, default=2048, help="engine.max_prefill_chunk")
    add("--rows", nargs="+", type=int, default=[8192], help="engine.max_num_batched_tokens, each")
    add("--admit", type=int, default=1, help="engine.admit_together: free places before prompts")
    add("--no-mixed", action="store_true", help="engine.capture_mixed=false")
    add("--no-compile", action="store_true")
    add("--no-graphs", action="store_true")
    add("--cpu", action="store_true", help="run without a GPU, to try the command")
    add("--json", type=Path, help="also write the JSON line to this file, after each pass")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    workloads, own = _checked(options), options.engine == "own"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.cpu:
        print("error: end_to_end needs a CUDA GPU; --cpu tries the commands.", file=sys.stderr)
        return EnvironmentFault.exit_code
    if device.type == "cuda" and not options.no_compile and own:
        start_compilers()
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    loaded = _load(options, device, dtype) if own else None
    report = {"machine": describe_machine(), "dtype": dtype}
    rows: list[dict[str, object]] = []
    line = json.dumps(report)
    first = options.policy[:1]
    cases = [
        Case(num_drafts, policy, max_rows)
        for num_drafts in options.k
        for policy in (options.policy if num_drafts and own else first)
        for max_rows in options.rows
    ]
    for case in cases:
        for row in _passes(loaded, options, workloads, case):
            rows.append(row)
            print(_line(row), flush=True)
            line = json.dumps({"arguments": vars(options), **report, "rows": rows}, default=str)
            if options.json is not None:
                options.json.write_text(line)
        gc.collect()
        torch.cuda.empty_cache()
    print(line)
    return 0


def _checked(options: argparse.Namespace) -> list["Workload"]:
    """The workloads of options that fit together."""
    if (options.target is None) != (options.heads is None):
        raise ConfigError("--target and --heads must be given together, got one; set both.")
    if options.accept is not None and options.heads is not None:
        raise ConfigError("--accept must be left out where --heads decide what is accepted.")
    if options.rate is not None and (options.rate <= 0 or options.arrivals is not None):
        raise ConfigError("--rate must be > 0, without --arrivals; set one of both.")
    if options.engine != "own" and options.target is not None:
        raise ConfigError("--engine vllm runs random weights, got --target; leave one of both out.")
    workloads = _workloads(options)
    for one in workloads:
        _arrivals(options, one.arrivals, seed=0)  # a bad file is seen before anything is compiled
    return workloads


class Case(NamedTuple):
    """A decoder, which all workloads share."""

    num_drafts: int  # K
    policy: str
    max_rows: int  # of a step


class Workload(NamedTuple):
    """Requests of one size."""

    prompt: int  # tokens
    output: int  # tokens
    arrivals: Path | None = None


def _workloads(options: argparse.Namespace) -> list[Workload]:
    """What `--prompt`, `--output` and `--arrivals` say, then each word of `--also`."""
    found = [Workload(options.prompt, options.output, options.arrivals)]
    for word in options.also:
        prompt, _, rest = word.partition(":")
        output, _, file = rest.partition(":")
        if not (prompt.isdecimal() and output.isdecimal()):
            raise ConfigError(
                f"--also must hold PROMPT:OUTPUT or PROMPT:OUTPUT:ARRIVALS, got {word!r}; "
                "set --also 128:128."
            )
        found.append(Workload(int(prompt), int(output), Path(file) if file else None))
    return found


def _load(options: argparse.Namespace, device: torch.device, dtype: str) -> tuple[Target, MTPHeads]:
    if options.target is not None:
        target = load_target(options.target, dtype=dtype, device=device.type)
        return target, load_heads(options.heads, target)
    target = random_target(options.shape, dtype=getattr(torch, dtype), device=device)
    return target, random_heads(target)


def _passes(
    loaded: tuple[Target, MTPHeads] | None,
    options: argparse.Namespace,
    workloads: Sequence[Workload],
    case: Case,
) -> Iterator[dict[str, object]]:
    """A row a pass of one loop, which is built before the first clock starts."""
    started = time.perf_counter()
    longest = max(one.prompt + one.output for one in workloads) + _ROOM_TOKENS
    # No stop token ends a text: every request has all its tokens.
    sampling = SamplingParams(max_new_tokens=options.output, seed=0)
    if loaded is None:
        loop = VllmLoop(
            options.shape,
            rates=_rates(options, case.num_drafts),
            max_num_requests=options.batch,
            max_model_len=longest,
            apart=options.vllm_apart,
            words={"max_num_batched_tokens": case.max_rows, **options.vllm},
        )
    else:
        loop = _decoder(*loaded, options, case, longest=longest)
        if options.warm_up:
            loop.warm_up(sampling, num_requests=options.requests)
    drain()
    build_s, ready_s = time.perf_counter() - started, age_of_process()
    for one, number in itertools.product(workloads, range(options.passes)):
        prompts = _prompts(options, length=one.prompt, seed=number)
        arrivals = _arrivals(options, one.arrivals, seed=number)
        own = replace(sampling, max_new_tokens=one.output)
        steps_before, builds_before = loop.stats.num_steps, loop.num_builds
        drain()
        started = time.perf_counter()
        records = serve(loop, prompts, arrivals, sampling=own)
        drain()
        wall_s = time.perf_counter() - started
        figures = _figures(records, wall_s=wall_s)
        if isinstance(loop, VllmLoop):
            figures["tau"] = loop.acceptance_length()
        yield {
            **{"shape": options.target or options.shape, "batch": options.batch},
            **case._asdict(),
            **one._asdict(),
            "policy": loop.version if isinstance(loop, VllmLoop) else case.policy,
            **{"pass": number + 1, "wall_s": wall_s},
            **{"build_s": build_s, "ready_s": ready_s},
            "num_builds": num_since(builds_before, loop.num_builds),
            "num_steps": loop.stats.num_steps - steps_before,
            **figures,
        }
    if isinstance(loop, VllmLoop):
        loop.close()


@old_objects_kept()
def serve(
    loop: SpecDecoder | VllmLoop,
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    *,
    sampling: SamplingParams,
) -> list[RequestRecord]:
    """Records of prompts that come at `arrivals`, seconds from now, ascending, one a prompt.

    A request that comes during a step is seen at its end, and has waited since its arrival.
    """
    records = loop.stats.records
    num_seen, waited = len(records), dict[str, float]()
    coming = deque(enumerate(zip(arrivals, prompts, strict=True)))
    started = time.perf_counter()
    while coming or loop.has_work:
        now = time.perf_counter() - started
        while coming and coming[0][1][0] <= now:
            index, (arrival, prompt) = coming.popleft()
            own = replace(sampling, seed=index)  # one seed for all would draw the same for all
            loop.add_request(prompt, sampling=own, request_id=str(index))
            waited[str(index)] = now - arrival
        if loop.has_work:
            loop.step()
        else:
            time.sleep(coming[0][1][0] - now)
    return [replace(r, ttft_s=r.ttft_s + waited[r.request_id]) for r in records[num_seen:]]


def _arrivals(options: argparse.Namespace, file: Path | None, *, seed: int) -> list[float]:
    """Seconds after the start of a pass at which its requests come."""
    if file is not None:
        seconds = [float(line) for line in file.read_text().split()]
        if len(seconds) < options.requests or seconds != sorted(seconds) or seconds[0] < 0:
            raise ConfigError(
                f"--arrivals must hold at least --requests={options.requests} seconds >= 0 in "
                f"ascending order, got {len(seconds)}; write more lines or lower --requests."
            )
        return seconds[: options.requests]
    if options.rate is None:
        return [0.0] * options.requests
    draw = random.Random(seed)
    gaps = (draw.expovariate(options.rate) for _ in range(options.requests))
    return list(itertools.accumulate(gaps))


def _figures(records: Sequence[RequestRecord], *, wall_s: float) -> dict[str, object]:
    """Throughput, latencies and acceptance length of the requests of one pass.

    `token_ms` is the mean time between the tokens of a request, its percentiles over requests.
    """
    num_tokens = sum(len(record.output_token_ids) for record in records)
    counts = count_acceptance(records)
    lengths = [(r.decode_s, len(r.output_token_ids)) for r in records]
    gaps = [decode_s / (length - 1) for decode_s, length in lengths if length > 1]
    return {
        "num_requests": len(records),
        "num_tokens": num_tokens,
        "tok_per_s": num_tokens / wall_s,
        "tau": 1 + sum(counts.num_accepted) / counts.num_rounds if counts.num_rounds else 1.0,
        "ttft_ms": _percentiles_ms([record.ttft_s for record in records]),
        "token_ms": _percentiles_ms(gaps),
    }


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {"p50": float(p50), "p99": float(p99)}


def _prompts(options: argparse.Namespace, *, length: int, seed: int) -> list[list[int]]:
    """Prompts of `length` tokens: random ids, or windows of the shipped prompts' text."""
    count, generator = options.requests, random.Random(seed)
    if options.target is None:
        ids = range(2, config_of(options.shape).vocab_size)
        return [generator.choices(ids, k=length) for _ in range(count)]
    tokenizer = cast(ChatTokenizer, load_tokenizer(options.target))
    texts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts(None)]
    generator.shuffle(texts)
    tokens = itertools.cycle(itertools.chain.from_iterable(texts))
    return [list(itertools.islice(tokens, length)) for _ in range(count)]


def _decoder(
    target: Target,
    heads: MTPHeads,
    options: argparse.Namespace,
    case: Case,
    *,
    longest: int,
) -> SpecDecoder:
    on_gpu = target.device.type == "cuda"
    graphs = on_gpu and not options.no_graphs
    engine = EngineConfig(
        block_size=16,
        max_num_requests=options.batch,
        max_num_batched_tokens=max(case.max_rows, options.batch * (case.num_drafts + 1)),
        max_prefill_chunk=options.chunk,
        admit_together=options.admit,
        max_model_len=longest,
        deferred_output=True,
        cuda_graphs=graphs,
        compile=on_gpu and not options.no_compile,
        capture_mixed=graphs and not options.no_mixed,
        audit=False,
    )
    rates = _rates(options, case.num_drafts)
    spec = SpecSettings(
        policy=case.policy,
        num_speculative_tokens=case.num_drafts,
        verify="synthetic" if rates else "greedy",
        verify_options=VerifyOptions(synthetic_rates=rates),
    )
    return SpecDecoder(target, heads if case.num_drafts else None, spec=spec, engine=engine)


def _rates(options: argparse.Namespace, num_drafts: int) -> list[float]:
    """Chance that the first draft is accepted, the first two, ...; empty for real acceptance."""
    accept = _ACCEPT if options.accept is None else options.accept
    return [accept ** (step + 1) for step in range(num_drafts)] if options.heads is None else []


def age_of_process() -> float:
    """Seconds since this process was started, imports included; of its own work off Linux."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.process_time()
    started_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / ticks_per_s


def _line(row: dict[str, object]) -> str:
    ttft, gap = (cast(dict[str, float] | None, row[name]) for name in ("ttft_ms", "token_ms"))
    arrivals = "" if row["arrivals"] is None else f", {row['arrivals']}"
    words = [
        f"{row['shape']} K={row['num_drafts']} {row['policy']} B={row['batch']} "
        f"{row['max_rows']} rows "
        f"{row['prompt']}->{row['output']}{arrivals} "
        f"pass {row['pass']}, ready at {row['ready_s']:.1f} s, {row['num_builds']} builds later:",
        f"{row['num_requests']} requests {row['num_tokens']} tokens {row['wall_s']:.3f} s",
        f"{row['tok_per_s']:.0f} tok/s  tau {row['tau']:.3f}  steps {row['num_steps']}",
    ]
    for name, found in (("first token", ttft), ("between tokens", gap)):
        if found is not None:
            words.append(f"{name} {found['p50']:.2f} ms (p99 {found['p99']:.2f})")
    return "  ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
