"""Soak the scheduler: many short requests under pressure must say what they say at leisure.

    python tools/soak.py                        # 20 000 requests, some minutes on one core
    python tools/soak.py --requests 2000 --deferred --no-prefix-caching

Waves of requests with random lengths, priorities, arrivals and aborts run twice on a random target
of a few thousand parameters: through a decoder with room for all, and through one whose pool is so
small that requests preempt each other. Compared are texts and accepted drafts of every round; an
aborted request must have said a prefix. Every step checks the invariants, every wave that all
blocks are free. Prints figures, then one JSON line; exits with 1 on a violation.
"""

import argparse
import json
import operator
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from tests import tiny

WAVE = 500
VOCAB = 8  # so few tokens that random modules are right now and then
SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6},
}
NUM_DRAFTS = 2
ABORT_CHANCE = 0.1
MAX_WAITING = 64  # arrivals stop while so many wait
MAX_SLOPE_KIB = 10.0  # resident memory per 100 requests over the second half: 0.1 KiB a request

Records = dict[str, RequestRecord]


@dataclass(frozen=True)
class Job:
    """One request, and after how many steps it is aborted; None lets it finish."""

    name: str
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    abort_after: int | None


@dataclass
class Report:
    """What a soak found; every field of the last block must be zero or empty."""

    num_requests: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_blocks: int = 0
    acceptance_length: float = 1.0
    seconds: float = 0.0
    rss_first_mib: float = 0.0
    rss_last_mib: float = 0.0
    rss_slope_kib_per_100_requests: float = 0.0
    num_different: int = 0
    num_leaked_blocks: int = 0
    num_dirty_rounds: int = 0
    violations: list[str] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak and print what it found; 1 if a rule was broken."""
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
    report = soak(args)
    for name, value in asdict(report).items():
        print(f"{name:32} {value}")
    print(json.dumps(vars(args) | asdict(report)))
    return 1 if report.violations else 0


def soak(args: argparse.Namespace) -> Report:
    """Run waves until there were `args.requests`, and compare them."""
    started, rng, report = time.perf_counter(), random.Random(args.seed), Report()
    calm = _decoder(args.policy, EngineConfig(block_size=16, max_num_requests=64, audit=False))
    tight = EngineConfig(
        **{"block_size": 4, "num_blocks": 44, "max_num_requests": 24, "steps_per_priority": 20},
        **{"max_num_batched_tokens": 96, "max_prefill_chunk": 9, "deferred_output": args.deferred},
        prefix_caching=not args.no_prefix_caching,
    )
    pressed = _decoder(args.policy, tight)
    rss, num_rounds, num_accepted = [], 0, 0
    while report.num_requests < args.requests:
        first = report.num_requests
        jobs = [_job(index, rng) for index in range(first, min(first + WAVE, args.requests))]
        expected = _run(calm, jobs, rng=None)
        records = _run(pressed, jobs, rng=rng)
        _compare(jobs, records, expected, report)
        report.num_requests += len(jobs)
        for record in records.values():
            num_rounds += len(record.num_accepted_per_round)
            num_accepted += sum(record.num_accepted_per_round)
            report.num_tokens += len(record.output_token_ids)
        report.num_leaked_blocks += pressed.num_blocks - pressed.num_free_blocks
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        rss.append((report.num_requests, pages * resource.getpagesize() / 2**20))
    report.num_steps = pressed.stats.num_steps
    report.num_preemptions = pressed.stats.num_preemptions
    if (cached := pressed.prefix_cache_stats) is not None:
        report.num_cached_tokens = cached.num_cached_tokens
        report.num_evicted_blocks = cached.num_evicted_blocks
    report.acceptance_length = 1 + num_accepted / max(num_rounds, 1)
    report.num_dirty_rounds = pressed.auditor.num_dirty_rounds if pressed.auditor else 0
    report.seconds = time.perf_counter() - started
    _judge(report, rss)
    return report


def _decoder(policy: str, engine: EngineConfig) -> SpecDecoder:
    """A decoder over the smallest target and heads, always the same, in float64."""
    k, target = NUM_DRAFTS, tiny.tiny_target("qwen3", **SIZES)
    heads = tiny.tiny_heads(target, num_mtp_modules=k)
    spec = SpecSettings(policy=policy, num_speculative_tokens=k)
    return SpecDecoder(target, heads, spec=spec, engine=engine)


def _job(index: int, rng: random.Random) -> Job:
    """A short request; half of the prompts begin with one of three long common beginnings."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 10))]
    if rng.random() < 0.5:
        common = random.Random(rng.randrange(3))
        prompt = [common.randrange(VOCAB) for _ in range(rng.randint(4, 16))] + prompt
    sampling = SamplingParams(max_new_tokens=rng.randint(0, 12), stop_token_ids=(3,))
    priority = rng.randint(-1, 1)
    abort_after = rng.randint(0, 20) if rng.random() < ABORT_CHANCE else None
    return Job(str(index), prompt, sampling, priority, abort_after)


def _run(decoder: SpecDecoder, jobs: list[Job], *, rng: random.Random | None) -> Records:
    """Decode a wave; with `rng` arrivals are spread and aborts happen."""
    todo, aborts, step = list(reversed(jobs)), {}, 0
    while todo or decoder.has_work:
        num_new = len(todo) if rng is None else rng.randint(0, 8)
        for _ in range(min(num_new, len(todo))):
            if rng is not None and decoder.num_waiting >= MAX_WAITING:
                break
            job = todo.pop()
            place = {"request_id": job.name, "priority": job.priority}
            request = decoder.add_request(job.prompt, sampling=job.sampling, **place)
            if rng is not None and job.abort_after is not None:
                aborts.setdefault(step + job.abort_after, []).append(request)
        for request in aborts.pop(step, []):
            decoder.abort(request)
        if decoder.has_work:
            decoder.step()
            decoder.check_integrity()
        step += 1
    records = {record.request_id: record for record in decoder.stats.records}
    decoder.stats.records.clear()
    return records


def _compare(jobs: list[Job], records: Records, expected: Records, report: Report) -> None:
    """Count requests whose texts or rounds differ, and aborted ones that said something else."""
    for job in jobs:
        found, wanted = records[job.name], expected[job.name]
        if found.finish_reason == "abort":
            report.num_aborted += 1
            said = found.output_token_ids
            report.num_different += wanted.output_token_ids[: len(said)] != said
            continue
        fields = operator.attrgetter("output_token_ids", "num_accepted_per_round", "finish_reason")
        report.num_different += fields(found) != fields(wanted)


def _judge(report: Report, rss: list[tuple[int, float]]) -> None:
    """Fill in the memory figures, of (requests so far, MiB) after each wave, and list faults."""
    later = rss[len(rss) // 2 :]
    report.rss_first_mib, report.rss_last_mib = rss[0][1], rss[-1][1]
    report.rss_slope_kib_per_100_requests = slope(later) * 1024 * 100
    for name in ("num_different", "num_leaked_blocks", "num_dirty_rounds"):
        if value := getattr(report, name):
            report.violations.append(f"{name} is {value}")
    if report.num_preemptions == 0:
        report.violations.append("the pool forced no preemption")
    growth_kib = report.rss_slope_kib_per_100_requests
    if len(later) >= 10 and growth_kib > MAX_SLOPE_KIB:  # fewer points say nothing about a slope
        report.violations.append(f"memory grows: {growth_kib:.2f} KiB")


def slope(points: list[tuple[int, float]]) -> float:
    """Least-squares slope of y over x; 0 for a single point."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


if __name__ == "__main__":
    raise SystemExit(main())
