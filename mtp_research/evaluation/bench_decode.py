"""Speed of the decode loop on models by shape: random weights, synthetic acceptance, a real loop.

    python -m mtp_research.evaluation.bench_decode --shapes dense_1b mimo_7b --batch 1 32 --k 0 3
    python -m mtp_research.evaluation.bench_decode --steps 1000 --strict-sync    and no step waits

Both sides of a comparison read the same bytes whatever the drafts are, so acceptance is set
(`--accept`, the chance of a draft given that it is reached) and speed is measured. Every row is
printed beside the limit of the same run: bytes that a step must read over the measured copy
bandwidth.

Letters: B requests, K drafts per step.
"""

import argparse
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing

import torch

from mtp_research.config import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.verify_options import VerifyOptions
from mtp_research.errors import ConfigError, EnvironmentFault, NumericFault
from mtp_research.evaluation.bench_bytes import measure_bytes
from mtp_research.evaluation.bench_options import Case, cases_of, parse_options
from mtp_research.evaluation.bench_steps import (
    NUM_WARM_UP_STEPS,
    context_limit,
    require_blocks,
    time_steps,
)
from mtp_research.evaluation.turns import Turns
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.kernels.bench_timing import describe_machine, measure_ceilings
from mtp_research.models.shapes import random_target
from mtp_research.models.target import Target

COLUMNS = {
    "shape": "{}",
    "batch": "{}",
    "num_drafts": "{}",
    "policy": "{}",
    "num_modules": "{}",
    "context": "{}",
    "draft_vocab": "{}",
    "arithmetic": "{}",
    "tau": "{:.3f}",
    "tok_per_s": "{:.0f}",
    "step_ms": "{:.3f}",
    "graph_ms": "{:.3f}",
    "limit_ms": "{:.3f}",
    "share": "{:.3f}",
    "host_ms": "{:.3f}",
    "launches": "{}",
    "syncs": "{}",
    "experts": "{:.1f}",
    "ready_s": "{:.0f}",
}


def main(arguments: list[str] | None = None) -> int:
    """Print one row per case and write them as JSON; returns the exit status."""
    options = parse_options(arguments)
    try:
        with closing(Turns(options.turns, name="--turns")) as turns:
            return _run(options, turns)
    except (ConfigError, EnvironmentFault, NumericFault) as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code


def _run(options: argparse.Namespace, turns: Turns) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.cpu:
        print("error: bench_decode needs a CUDA GPU; --cpu tries the commands.", file=sys.stderr)
        return 4
    report: dict[str, object] = {"arguments": vars(options) | {"json": str(options.json)}}
    copy_tb_per_s = None
    if device.type == "cuda":
        turns.decode()
        ceilings = measure_ceilings()
        report |= {"machine": describe_machine(), "ceilings": ceilings}
        copy_tb_per_s = ceilings["copy_tb_per_s"]
        print(json.dumps(report["machine"] | ceilings))
        torch.cuda.empty_cache()
    print("  ".join(COLUMNS), flush=True)
    rows: list[dict[str, object]] = []
    for shape in options.shapes:
        turns.prepare()
        target = random_target(
            shape,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            device=device,
            experts=options.experts,
        )
        for row in _measure_shape(target, shape, options, turns, copy_tb_per_s):
            rows.append(row)
            print("  ".join(_cell(row.get(name), form) for name, form in COLUMNS.items()))
            if options.strict_sync:
                print(f"    {_strict_line(row)}")
            for name, count, us in (row["kernels"] or [])[: options.kernels]:
                print(f"    {us:9.1f} us {count:5d}  {name[:110]}")
            sys.stdout.flush()
            if options.json is not None:
                options.json.write_text(json.dumps(report | {"rows": rows}, indent=1))
        del target
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _strict_line(row: Mapping[str, object]) -> str:
    """What `--strict-sync` found, in words."""
    if row["syncs"] is None:
        return f"syncs are not counted without a GPU; {row['num_steps']} steps were made"
    launches = f"{row['launches']} launches a step in 1 graph replay, "
    return f"{launches if row['launches'] else ''}{row['syncs']} syncs in {row['num_steps']} steps"


def _cell(value: object, form: str) -> str:
    return "-" if value is None else form.format(value)


def _measure_shape(
    target: Target,
    shape: str,
    options: argparse.Namespace,
    turns: Turns,
    copy_tb_per_s: float | None,
) -> Iterator[dict[str, object]]:
    heads = MTPHeads(target, spec=HeadSpec(num_mtp_modules=options.modules)).requires_grad_(False)
    for case in cases_of(shape, options):
        turns.prepare()
        yield _measure(target, heads, case, options, turns, copy_tb_per_s)
        gc.collect()
        torch.cuda.empty_cache()


def _measure(
    target: Target,
    heads: MTPHeads,
    case: Case,
    options: argparse.Namespace,
    turns: Turns,
    copy_tb_per_s: float | None,
) -> dict[str, object]:
    """One row: fill the batch, warm up, time `steps` steps of the loop."""
    started = time.perf_counter()
    decoder = _decoder(target, heads, case, options)
    require_blocks(decoder)
    generator = torch.Generator().manual_seed(case.batch)
    for seed in range(case.batch):
        prompt = torch.randint(
            target.config.vocab_size, (case.context,), generator=generator
        ).tolist()
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=1 << 20, seed=seed))
    while any(r.is_prefilling for r in decoder.scheduler.requests()):
        decoder.step()
    for _ in range(NUM_WARM_UP_STEPS):  # capture
        decoder.step()
    _synchronize()
    ready_s = time.perf_counter() - started
    turns.decode()
    for _ in range(NUM_WARM_UP_STEPS):  # let the clocks settle
        decoder.step()
    _synchronize()
    stats = decoder.stats
    steps_before, host_before = stats.num_steps, stats.busy_s - stats.wait_s
    times = time_steps(decoder, num_steps=options.steps, strict_sync=options.strict_sync)
    host_s = stats.busy_s - stats.wait_s - host_before
    graph_ms = launches = profile = None
    if decoder.graphs is not None:  # what follows leaves the decoder unusable
        graph_ms = decoder.graphs.time_replays()
        profile = decoder.graphs.profile()
        launches = sum(count for _, count, _ in profile)
    needed = measure_bytes(decoder, heads if case.num_drafts else None)
    limit_ms = None if copy_tb_per_s is None else needed.total / copy_tb_per_s / 1e9
    return {
        **dataclasses.asdict(case),
        "tau": times.num_tokens / times.num_steps / case.batch,
        "tok_per_s": times.num_tokens / times.num_steps / times.step_ms * 1e3,
        "step_ms": times.step_ms,
        "graph_ms": graph_ms,
        "limit_ms": limit_ms,
        "share": None if limit_ms is None else limit_ms / times.step_ms,
        "host_ms": host_s / (stats.num_steps - steps_before) * 1e3,
        "launches": launches,
        "syncs": times.num_syncs,
        "num_steps": times.num_steps,
        "experts": needed.unique_experts,
        "ready_s": ready_s,
        "capture_s": None if decoder.graphs is None else decoder.graphs.capture_s,
        "pool_gib": decoder.cache.num_bytes / 2**30,
        "bytes": dataclasses.asdict(needed),
        "kernels": profile,
    }


def _decoder(
    target: Target, heads: MTPHeads, case: Case, options: argparse.Namespace
) -> SpecDecoder:
    on_gpu = target.device.type == "cuda"
    rates = tuple(options.accept ** (step + 1) for step in range(case.num_drafts))
    engine = EngineConfig(
        block_size=options.block_size,
        max_num_requests=case.batch,
        max_num_batched_tokens=max(8192, case.batch * (case.num_drafts + 1)),
        max_prefill_chunk=2048,
        max_model_len=context_limit(
            context=case.context,
            num_steps=options.steps,
            num_drafts=case.num_drafts,
            num_positions=target.config.max_position_embeddings,
        ),
        deferred_output=True,
        cuda_graphs=on_gpu and not options.no_graphs,
        compile=on_gpu and not options.no_compile and not options.deterministic,
        few_rows_kernel=not options.library_products,
        rotary_in_attention=options.rotary_in_attention,
        overlap_launches=options.overlap_launches,
        deterministic=options.deterministic,
        audit=False,
    )
    return SpecDecoder(
        target,
        heads if case.num_drafts else None,
        policy=case.policy,
        num_speculative_tokens=case.num_drafts,
        engine=engine,
        draft_token_ids=None if case.draft_vocab is None else range(case.draft_vocab),
        verify="synthetic" if case.num_drafts else "greedy",
        verify_options=VerifyOptions(synthetic_rates=rates),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
