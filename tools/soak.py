"""Soak the scheduler: many short requests under pressure must say what they say at leisure.

    python tools/soak.py                        # 20 000 requests, some minutes on one core
    python tools/soak.py --requests 2000 --deferred --no-prefix-caching

Waves of requests with random lengths, priorities, arrivals and aborts run twice on a random target
of a few thousand parameters: through a decoder with room for all, and through one whose pool is so
small that requests preempt each other. Compared are texts and accepted drafts of every round; an
aborted request must have said a prefix. After every step the invariants are checked, after every
wave that all blocks are free. Prints figures, then one JSON line; exits with 1 on a violation.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Request
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from tests import tiny
from tools.soak_report import Report, judge, rss_mib

WAVE = 500
VOCAB = 8  # so few tokens that random modules are right now and then
NUM_DRAFTS = 2
ABORT_CHANCE = 0.1
MAX_WAITING = 64  # arrivals stop while so many wait


@dataclass(frozen=True)
class Job:
    """One request, and after how many steps it is aborted; None lets it finish."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    abort_after: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="training", choices=["eagle", "training"])
    parser.add_argument("--deferred", action="store_true", help="engine.deferred_output=true")
    parser.add_argument("--no-prefix-caching", action="store_true")
    args = parser.parse_args(arguments)
    if args.requests < 1:
        parser.error(f"--requests must be >= 1, got {args.requests}")
    torch.set_num_threads(1)
    report = soak(
        args.requests,
        seed=args.seed,
        policy=args.policy,
        deferred=args.deferred,
        prefix_caching=not args.no_prefix_caching,
    )
    for name, value in asdict(report).items():
        print(f"{name:32} {value}")
    print(json.dumps(vars(args) | asdict(report)))
    return 1 if report.violations else 0


def soak(
    num_requests: int, *, seed: int, policy: str, deferred: bool, prefix_caching: bool
) -> Report:
    """Run waves until there were `num_requests`, and compare them."""
    started, rng, report = time.perf_counter(), random.Random(seed), Report()
    calm = _decoder(policy, EngineConfig(block_size=16, max_num_requests=64, audit=False))
    tight = EngineConfig(
        block_size=4,
        max_num_requests=24,
        num_blocks=44,
        max_num_batched_tokens=96,
        max_prefill_chunk=9,
        prefix_caching=prefix_caching,
        deferred_output=deferred,
        steps_per_priority=20,
    )
    pressed = _decoder(policy, tight)
    rss: list[tuple[int, float]] = []
    num_rounds = num_accepted = 0
    while report.num_requests < num_requests:
        first = report.num_requests
        jobs = [_job(index, rng) for index in range(first, min(first + WAVE, num_requests))]
        expected = _run(calm, jobs, rng=None)
        records = _run(pressed, jobs, rng=rng)
        _compare(jobs, records, expected, report)
        report.num_requests += len(jobs)
        for record in records.values():
            num_rounds += len(record.num_accepted_per_round)
            num_accepted += sum(record.num_accepted_per_round)
            report.num_tokens += len(record.output_token_ids)
        report.num_leaked_blocks += pressed.num_blocks - pressed.num_free_blocks
        rss.append((report.num_requests, rss_mib()))
    report.num_steps = pressed.stats.num_steps
    report.num_preemptions = pressed.stats.num_preemptions
    if (cached := pressed.prefix_cache_stats) is not None:
        report.num_cached_tokens = cached.num_cached_tokens
        report.num_evicted_blocks = cached.num_evicted_blocks
    report.acceptance_length = 1 + num_accepted / max(num_rounds, 1)
    report.num_dirty_rounds = pressed.auditor.num_dirty_rounds if pressed.auditor else 0
    report.seconds = time.perf_counter() - started
    judge(report, rss)
    return report


def _decoder(policy: str, engine: EngineConfig) -> SpecDecoder:
    """A decoder over the smallest target and heads, always the same, in float64."""
    target = tiny.tiny_target(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
    )
    heads = tiny.tiny_heads(target, num_mtp_modules=NUM_DRAFTS)
    return SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=NUM_DRAFTS),
        engine=engine,
    )


def _job(index: int, rng: random.Random) -> Job:
    """A short request; half of the prompts begin with one of three long common beginnings."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))]
    if rng.random() < 0.5:
        common = random.Random(rng.randrange(3))
        prompt = [common.randrange(VOCAB) for _ in range(rng.randint(4, 16))] + prompt
    return Job(
        name=str(index),
        prompt=prompt,
        sampling=SamplingParams(max_new_tokens=rng.randint(0, 12), stop_token_ids=(3,)),
        priority=rng.randint(-1, 1),
        abort_after=rng.randint(0, 20) if rng.random() < ABORT_CHANCE else None,
    )


def _run(
    decoder: SpecDecoder, jobs: list[Job], *, rng: random.Random | None
) -> dict[str, RequestRecord]:
    """Decode a wave; with `rng` arrivals are spread and aborts happen."""
    todo, aborts, step = list(reversed(jobs)), {}, 0
    while todo or decoder.has_work:
        num_new = len(todo) if rng is None else rng.randint(0, 8)
        for _ in range(min(num_new, len(todo))):
            if rng is not None and decoder.num_waiting >= MAX_WAITING:
                break
            job = todo.pop()
            request = decoder.add_request(
                job.prompt, sampling=job.sampling, request_id=job.name, priority=job.priority
            )
            if rng is not None and job.abort_after is not None:
                aborts.setdefault(step + job.abort_after, []).append(request)
        _abort(decoder, aborts.pop(step, []))
        if decoder.has_work:
            decoder.step()
            decoder.check_integrity()
        step += 1
    records = {record.request_id: record for record in decoder.stats.records}
    decoder.stats.records.clear()
    return records


def _abort(decoder: SpecDecoder, requests: list[Request]) -> None:
    for request in requests:
        decoder.abort(request)


def _compare(
    jobs: list[Job],
    records: dict[str, RequestRecord],
    expected: dict[str, RequestRecord],
    report: Report,
) -> None:
    """Count requests whose texts or rounds differ, and aborted ones that said something else."""
    for job in jobs:
        found, wanted = records[job.name], expected[job.name]
        if found.finish_reason == "abort":
            report.num_aborted += 1
            said = found.output_token_ids
            is_same = wanted.output_token_ids[: len(said)] == said
        else:
            is_same = (
                found.output_token_ids == wanted.output_token_ids
                and found.num_accepted_per_round == wanted.num_accepted_per_round
                and found.finish_reason == wanted.finish_reason
            )
        report.num_different += not is_same


if __name__ == "__main__":
    raise SystemExit(main())
