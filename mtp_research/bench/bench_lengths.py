"""Does the number of drafts that is chosen per step keep up with the best fixed one?

    python -m mtp_research.bench.bench_lengths --shape mimo_7b --batch 1 32 256 --accept 0.8 0.5

A row is a batch size whose places are all taken and an acceptance: tokens per second of plain
decoding without heads, of every fixed number of drafts 0..K, and of `spec.draft_length=
expected_gain`. Numbers and rule share one decoder with random weights and synthetic acceptance;
they are measured in turn, `--repeats` times, and the median counts. The spread is the largest
distance of a repeat from its median. Steps of a number are compiled once for all batch sizes, so
one decoder serves them all, with as many places taken as the row says. What is measured is printed
and written at once. `--repeats 0` compiles alone, for a later process. Letters: K drafts per step.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from mtp_research.bench.shapes import SHAPES, random_heads, random_target
from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import (
    BatchTableLength,
    DraftLength,
    ExpectedGainLength,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels.bench.bench_runner import describe_machine, drain
from mtp_research.models.target import Target
from mtp_research.runtime.compiling import start_compilers

CHOSEN = "chosen"
_SETTLING_STEPS = 32  # before a clock starts


def main(arguments: list[str] | None = None) -> int:
    """Print a line per batch size and acceptance, and write them as JSON; the exit status."""
    options = parse_options(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.cpu:
        print("error: bench_lengths needs a CUDA GPU; --cpu tries the commands.", file=sys.stderr)
        return 4
    if device.type == "cuda":
        start_compilers()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = random_target(options.shape, dtype=dtype, device=device)
    heads = random_heads(target)
    report: dict[str, object] = {"arguments": vars(options), "machine": describe_machine()}
    rows: list[dict[str, object]] = []
    plain = _plain_rates(target, options)
    for accept in options.accept:
        gc.collect()  # the decoder before
        torch.cuda.empty_cache()
        for row in _rows(target, heads, options, accept=accept, plain=plain):
            rows.append(row)
            print(_line(rows[-1]), flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps(report | {"rows": rows}, default=str, indent=1))
    return 0


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options by their names; `arguments` are those of the process by default."""
    parser = argparse.ArgumentParser(prog="python -m mtp_research.bench.bench_lengths")
    add = parser.add_argument
    add("--shape", default="mimo_7b", choices=SHAPES, help="random weights of this shape")
    add("--batch", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    add("--accept", nargs="+", type=float, default=[0.8, 0.5], help="of a draft that is reached")
    add("--policy", default="eagle")
    add("--k", type=int, default=5, help="most drafts")
    add("--prompt", type=int, default=128, help="tokens of each prompt")
    add("--steps", type=int, default=128, help="timed steps")
    add("--repeats", type=int, default=3, help="of a row; 0: compile alone")
    add("--cpu", action="store_true", help="run without a GPU, to try the command")
    add("--json", type=Path)
    return parser.parse_args(arguments)


def _plain_rates(target: Target, options: argparse.Namespace) -> dict[int, float]:
    """Tokens per second without heads, by batch size."""
    decoder = _decoder(target, None, options, accept=0.0)
    rates: dict[int, float] = {}
    for batch in options.batch if options.repeats else []:
        found = [_tokens_per_s(decoder, options, batch, seed=s)[0] for s in range(options.repeats)]
        rates[batch] = statistics.median(found)
        print(f"batch {batch}: plain {rates[batch]:.0f}", flush=True)
    return rates


def _rows(
    target: Target,
    heads: MTPHeads,
    options: argparse.Namespace,
    *,
    accept: float,
    plain: Mapping[int, float],
) -> Iterator[dict[str, object]]:
    """What one decoder gives for each batch size, beside `plain` tokens per second."""
    decoder = _decoder(target, heads, options, accept=accept)
    print(f"accept {accept}: ready in {decoder.capture_s or 0:.0f} s", flush=True)
    chosen = decoder.spec.draft_length
    for batch in options.batch if options.repeats else []:
        decoder.spec = replace(decoder.spec, draft_length=chosen)
        row = {"batch": batch, "accept": accept, "plain": plain[batch]}
        yield row | _measured(decoder, options, batch=batch)


def _measured(
    decoder: SpecDecoder, options: argparse.Namespace, *, batch: int
) -> dict[str, object]:
    rules: dict[str, DraftLength] = {
        str(n): BatchTableLength(((1, n),)) for n in range(options.k + 1)
    }
    rules[CHOSEN] = decoder.spec.draft_length
    rates: dict[str, list[float]] = {name: [] for name in rules}
    chosen: list[float] = []
    for seed, (name, rule) in itertools.product(range(options.repeats), rules.items()):
        decoder.spec = replace(decoder.spec, draft_length=rule)
        rate, mean_drafts = _tokens_per_s(decoder, options, batch, seed=seed)
        rates[name].append(rate)
        if name == CHOSEN:
            chosen.append(mean_drafts)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max(medians, key=lambda name: medians[name] if name != CHOSEN else 0.0)
    spread = max(abs(rate / medians[name] - 1) for name, found in rates.items() for rate in found)
    return {
        "tokens_per_s": medians,
        "best": best,
        "chosen_over_best": medians[CHOSEN] / medians[best],
        "spread": spread,
        "mean_chosen": statistics.fmean(chosen),
        "step_seconds": decoder.step_seconds,
        "ready_s": decoder.capture_s,
    }


def _decoder(
    target: Target, heads: MTPHeads | None, options: argparse.Namespace, *, accept: float
) -> SpecDecoder:
    on_gpu, k = target.device.type == "cuda", 0 if heads is None else options.k
    steps = _SETTLING_STEPS + options.steps + 8
    engine = EngineConfig(
        max_num_requests=max(options.batch),
        graph_batch_sizes=sorted({max(batch, 2) for batch in options.batch}),
        max_num_batched_tokens=8192,
        max_prefill_chunk=2048,
        max_model_len=options.prompt + steps * (options.k + 1) + 16,
        deferred_output=True,
        cuda_graphs=on_gpu,
        compile=on_gpu,
        audit=False,
    )
    spec = SpecSettings(num_speculative_tokens=k, policy=options.policy)
    if k:
        rates = [accept ** (step + 1) for step in range(k)]
        spec = replace(
            spec,
            verify="synthetic",
            verify_options=VerifyOptions(synthetic_rates=rates),
            draft_length=ExpectedGainLength(),
        )
    decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
    decoder.warm_up(SamplingParams(max_new_tokens=8, seed=0))
    return decoder


def _tokens_per_s(
    decoder: SpecDecoder, options: argparse.Namespace, batch: int, *, seed: int
) -> tuple[float, float]:
    """Tokens per second of `batch` requests, and drafts that a request verifies."""
    draw = random.Random(seed)
    vocab_size = decoder.target.config.vocab_size
    sampling = SamplingParams(max_new_tokens=decoder.max_model_len, seed=seed)
    requests = [
        decoder.add_request(
            draw.choices(range(2, vocab_size), k=options.prompt),
            sampling=replace(sampling, max_new_tokens=decoder.max_model_len - options.prompt),
        )
        for _ in range(batch)
    ]
    while any(request.is_prefilling or not request.block_ids for request in requests):
        decoder.step()
    for _ in range(_SETTLING_STEPS):
        decoder.step()
    drain()
    before, started = _counts(decoder), time.perf_counter()
    for _ in range(options.steps):
        decoder.step()
    drain()
    seconds = time.perf_counter() - started
    tokens, rows, entries = (new - old for old, new in zip(before, _counts(decoder), strict=True))
    for request in requests:
        decoder.abort(request)
    return tokens / seconds, rows / entries - 1


def _counts(decoder: SpecDecoder) -> tuple[int, int, int]:
    stats = decoder.stats
    return stats.num_emitted_tokens, stats.num_target_rows, stats.num_entries


def _line(row: dict) -> str:
    rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tokens_per_s"].items())
    return (
        f"batch {row['batch']} accept {row['accept']}: plain {row['plain']:.0f}  {rates}; "
        f"{row['chosen_over_best']:.3f} of n = {row['best']}, spread {row['spread']:.3f}, "
        f"mean n {row['mean_chosen']:.2f}, ready in {row['ready_s'] or 0:.0f} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
