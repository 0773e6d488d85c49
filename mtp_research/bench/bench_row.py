"""One row of `bench_decode`: fill the batch, capture, time the steps of the loop, look inside one.

The steps are timed in slices. With `--strict-sync` a call that waits for the device raises inside
them. What the loop is meant to wait for, the copy of the tokens of the step before, is an event and
not such a call.
Letters: K drafts per step.
"""

import argparse
import dataclasses
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mtp_research.bench.bench_bytes import measure_bytes, num_text_tokens
from mtp_research.bench.bench_split import (
    NUM_SPLIT_STEPS,
    Launches,
    StepSplit,
    count_launches,
    kernel_totals,
    marked_parts,
    replay_ms,
    split_steps,
    split_traces,
    trace_replay,
)
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.verify.verify import VerifyOptions
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, NumericFault

NUM_SLICES = 5
NUM_WARM_UP_STEPS = 8
_NUM_OTHER_STEPS = 64  # warm-up twice, replays that are timed, counted or traced, with room
_ROUND_TO_TOKENS = 256


@dataclass(frozen=True)
class Case:
    """One row of the benchmark."""

    shape: str
    batch: int
    num_drafts: int
    policy: str
    num_modules: int
    context: int
    draft_vocab: int | None = None  # None: all tokens may be drafted
    arithmetic: str = "usual"


class StepTimes(NamedTuple):
    """What the timed steps gave.

    Attributes:
        step_ms: median over the slices of the wall time of a step.
        num_tokens: emitted.
        num_steps: that were timed.
        num_syncs: calls that waited for the device; None where nothing watched.
    """

    step_ms: float
    num_tokens: int
    num_steps: int
    num_syncs: int | None


def measure_row(
    target: Target,
    heads: MTPHeads,
    case: Case,
    options: argparse.Namespace,
    copy_tb_per_s: float | None,
) -> dict[str, object]:
    """Figures of one case.

    Args:
        target: random weights.
        heads: its modules.
        case: what is decoded.
        options: of `bench_decode`.
        copy_tb_per_s: copy bandwidth of the device; None without a GPU.
    """
    started = time.perf_counter()
    decoder = _warm_decoder(target, heads, case, options)
    ready_s = time.perf_counter() - started
    for _ in range(NUM_WARM_UP_STEPS):  # let the clocks settle
        decoder.step()
    _synchronize()
    stats = decoder.stats
    steps_before, host_before = stats.num_steps, stats.busy_s - stats.wait_s
    tokens_before = num_text_tokens(decoder)
    times = time_steps(decoder, num_steps=options.steps, strict_sync=options.strict_sync)
    host_s = stats.busy_s - stats.wait_s - host_before
    host_ms = host_s / (stats.num_steps - steps_before) * 1e3
    num_tokens = (tokens_before + num_text_tokens(decoder)) / 2
    inside = _look_inside(decoder, options, step_ms=times.step_ms)
    needed = measure_bytes(decoder, heads if case.num_drafts else None, num_tokens=num_tokens)
    limit_ms = None if copy_tb_per_s is None else needed.total / copy_tb_per_s / 1e9
    return {
        **dataclasses.asdict(case),
        "tau": times.num_tokens / times.num_steps / case.batch,
        "tok_per_s": times.num_tokens / times.num_steps / times.step_ms * 1e3,
        "step_ms": times.step_ms,
        "graph_ms": inside.graph_ms,
        "limit_ms": limit_ms,
        "share": None if limit_ms is None else limit_ms / times.step_ms,
        "host_ms": host_ms,
        "launches": None if inside.launches is None else inside.launches.num_launches,
        "replays": None if inside.launches is None else inside.launches.num_replays,
        "syncs": times.num_syncs,
        "num_steps": times.num_steps,
        "experts": needed.unique_experts,
        "text_tokens": num_tokens / case.batch,
        "ready_s": ready_s,
        "capture_s": decoder.capture_s,
        "pool_gib": decoder.pool_bytes / 2**30,
        "bytes": dataclasses.asdict(needed),
        "split": None if inside.split is None else dataclasses.asdict(inside.split),
        "kernels": inside.kernels,
    }


class _Inside(NamedTuple):
    """What a step is made of, as far as it can be seen; `graph_ms` of one replay."""

    launches: Launches | None = None
    graph_ms: float | None = None
    split: StepSplit | None = None
    kernels: list[tuple[str, int, float]] | None = None  # of one replay


def _look_inside(decoder: SpecDecoder, options: argparse.Namespace, *, step_ms: float) -> _Inside:
    """Profile more steps; leaves a decoder with graphs unusable."""
    launches = count_launches(decoder) if decoder.target.device.type == "cuda" else None
    captured = decoder.newest_capture
    if captured is None:
        return _Inside(launches, split=split_steps(decoder) if options.split else None)
    graph_ms = replay_ms(captured)
    traces = [trace_replay(captured) for _ in range(NUM_SPLIT_STEPS if options.split else 1)]
    split = None
    if options.split:
        split = split_traces(traces, graph_ms=graph_ms, step_ms=step_ms)
    return _Inside(launches, graph_ms, split, kernel_totals(traces[0]))


def _warm_decoder(
    target: Target, heads: MTPHeads, case: Case, options: argparse.Namespace
) -> SpecDecoder:
    """A decoder whose requests are all past their prompts and whose step is captured."""
    decoder = _decoder(target, heads, case, options)
    require_blocks(decoder)
    if options.split and decoder.is_captured:
        decoder.observe(marked_parts)  # before the first capture
    generator = torch.Generator().manual_seed(case.batch)
    for seed in range(case.batch):
        prompt = torch.randint(
            target.config.vocab_size, (case.context,), generator=generator
        ).tolist()
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=1 << 20, seed=seed))
    while any(r.is_prefilling for r in decoder.live_requests):
        decoder.step()
    for _ in range(NUM_WARM_UP_STEPS):  # capture
        decoder.step()
    _synchronize()
    return decoder


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
        rotary_in_attention=not options.library_rotary,
        overlap_launches=not options.serial_launches,
        deterministic=options.deterministic,
        audit=False,
    )
    return SpecDecoder(
        target,
        heads if case.num_drafts else None,
        spec=SpecSettings(
            policy=case.policy,
            num_speculative_tokens=case.num_drafts,
            draft_token_ids=None if case.draft_vocab is None else range(case.draft_vocab),
            verify="synthetic" if case.num_drafts else "greedy",
            verify_options=VerifyOptions(synthetic_rates=list(rates)),
        ),
        engine=engine,
    )


def context_limit(*, context: int, num_steps: int, num_drafts: int, num_positions: int) -> int:
    """Tokens that a request can reach: its prompt and K + 1 for every step, measured ones or not.

    Raises:
        ConfigError: the model has fewer positions than that.
    """
    longest = context + (num_steps + _NUM_OTHER_STEPS) * (num_drafts + 1)
    if longest > num_positions:
        most = (num_positions - context) // (num_drafts + 1) - _NUM_OTHER_STEPS
        raise ConfigError(
            f"--steps must be at most {max(most, 0)} for --context {context} and --k {num_drafts} "
            f"on a shape with {num_positions} positions, got {num_steps}; set --steps or --context."
        )
    return min(-(-longest // _ROUND_TO_TOKENS) * _ROUND_TO_TOKENS, num_positions)


def require_blocks(decoder: SpecDecoder) -> None:
    """Refuse a pool in which the batch would be preempted while it is timed (ConfigError)."""
    block_size, batch = decoder.engine.block_size, decoder.engine.max_num_requests
    needed = batch * -(-decoder.max_model_len // block_size)
    had = decoder.num_blocks
    if had < needed:
        raise ConfigError(
            f"--steps and --batch {batch} need {needed} blocks of {block_size} tokens, the free "
            f"memory gives {had}; set a smaller --steps, --context or --batch."
        )


def time_steps(decoder: SpecDecoder, *, num_steps: int, strict_sync: bool) -> StepTimes:
    """Time steps of a batch that only decodes, in slices.

    Args:
        decoder: warmed up, all requests past their prompts.
        num_steps: at least one for each slice is made.
        strict_sync: let a call that waits for the device raise.

    Raises:
        NumericFault: a step waited for the device; the message says which and where.
    """
    per_slice = max(num_steps // NUM_SLICES, 1)
    watches = strict_sync and decoder.target.device.type == "cuda"
    times, first = [], decoder.stats.num_emitted_tokens
    done = 0
    if watches:
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(NUM_SLICES):
            started = time.perf_counter()
            for _ in range(per_slice):
                decoder.step()
                done += 1
            times.append((time.perf_counter() - started) / per_slice * 1e3)
    except RuntimeError as fault:
        if "synchronizing" not in str(fault):
            raise
        raise NumericFault(
            f"expected no wait for the device in {NUM_SLICES * per_slice} steps, got one in step "
            f"{done + 1}: {fault}; leave --strict-sync out to time it all the same."
        ) from fault
    finally:
        if watches:
            torch.cuda.set_sync_debug_mode("default")
    if decoder.target.device.type == "cuda":
        torch.cuda.synchronize()
    return StepTimes(
        step_ms=statistics.median(times),
        num_tokens=decoder.stats.num_emitted_tokens - first,
        num_steps=done,
        num_syncs=0 if watches else None,
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
