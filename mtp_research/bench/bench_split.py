"""Where the time of `bench_decode`'s steps goes: launches, parts of a step, the acceptance model.

A captured step is one graph, which no clock can look into. With `--split` its parts are tied
together by `mark`, an op that the compiler does not see through: it copies the values that the next
part reads, in a kernel of its own name. The trace of a replay is cut at these kernels:

    target: input rows, forward, logits | verify: the rule | bookkeeping: texts, lengths, frontier |
    draft: the rest, all K passes

A trace stretches the replay, so the shares of its parts are applied to the replay's own time. The
compiler cannot fuse across a mark: a split step is not quite the step without it, and what the
marks take is told apart. Without graphs a clock between the parts is read (`StepClock`), whose
verification includes the bookkeeping. Letters: K drafts per step.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling import SamplingTensors
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.step import DeviceParts, TargetRows, Verified
from mtp_research.decode.verify.verify import VerifyOutput
from mtp_research.evaluation.run.timed_decode import StepClock
from mtp_research.kernels.checks import MARK_KERNEL_NAME, part_mark
from mtp_research.policy.plan import StepState
from mtp_research.runtime.captures import Captured
from mtp_research.runtime.errors import NumericFault

NUM_COUNTED_STEPS = 4
NUM_SPLIT_STEPS = 8
PARTS = ("target", "verify", "bookkeeping", "draft")


@dataclass(frozen=True)
class StepSplit:
    """Milliseconds of a step by part."""

    target: float  # input rows, target forward and logits
    verify: float  # logit processors and the rule; without graphs the bookkeeping too
    bookkeeping: float | None  # texts, lengths and the frontier; None without graphs
    draft: float | None  # all draft passes; None without drafts
    marks: float  # what the marks themselves take, in none of the parts
    host: float  # the rest of the step's wall time, in which the device has nothing to do


class DeviceRun(NamedTuple):
    """A kernel, copy or fill on the device's clock, in microseconds."""

    name: str
    begin_us: float
    end_us: float


class Launches(NamedTuple):
    """Kernels, copies and fills on the device, and graph replays, in one `decoder.step()`."""

    num_launches: float
    num_replays: float


@torch.library.custom_op("mtp_research::part_mark", mutates_args=())
def mark(values: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    """A copy of `values` once `made` exists; compiled code keeps it whole."""
    return part_mark(values)


@mark.register_fake
def _fake_mark(values: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def marked_parts(parts: DeviceParts) -> DeviceParts:
    """The parts of a step, each of which hands on its last values through a mark.

    Results are built by their classes: what `_replace` makes PyTorch 2.11 cannot return from
    compiled code.
    """

    def target(inputs: StepInputs) -> TargetRows:
        rows = parts.target(inputs)
        return TargetRows(rows.hidden, mark(rows.logits, []))

    def verify(inputs: StepInputs, rows: TargetRows, params: SamplingTensors) -> Verified:
        verified = parts.verify(inputs, rows, params)
        first, *others = verified.tokens
        return Verified(VerifyOutput(mark(first, others), *others), verified.logprobs)

    def advance(inputs: StepInputs, verified: Verified) -> StepState:
        state = parts.advance(inputs, verified)
        first_fresh, frontier, num_known_tokens, *others = state
        marked = mark(frontier, [num_known_tokens])
        return StepState(first_fresh, marked, num_known_tokens, *others)

    return DeviceParts(target, verify, advance, parts.draft)


def count_launches(decoder: SpecDecoder) -> Launches:
    """Mean over some steps of the loop, the host's copies to the device included; GPU only."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_COUNTED_STEPS):
            decoder.step()
        torch.cuda.synchronize()
    events = profile.events() or []
    on_device = sum(e.device_type == torch.autograd.DeviceType.CUDA for e in events)
    replays = sum(e.name.startswith("cudaGraphLaunch") for e in events)
    return Launches(on_device / NUM_COUNTED_STEPS, replays / NUM_COUNTED_STEPS)


def replay_ms(captured: Captured, *, num_replays: int = 20) -> float:
    """Median milliseconds of a replay, from event to event."""
    times = []
    for _ in range(num_replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        captured.graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def trace_replay(captured: Captured) -> list[DeviceRun]:
    """What a replay runs, by its begin."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        captured.graph.replay()
        torch.cuda.synchronize()
    runs = [
        DeviceRun(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events() or []
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(runs, key=lambda run: run.begin_us)


def kernel_totals(runs: Sequence[DeviceRun]) -> list[tuple[str, int, float]]:
    """Name, launches and microseconds of the kernels of a trace, the slowest first."""
    totals: dict[str, tuple[int, float]] = {}
    for run in runs:
        count, us = totals.get(run.name, (0, 0.0))
        totals[run.name] = (count + 1, us + run.end_us - run.begin_us)
    rows = [(name, count, us) for name, (count, us) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])


def split_traces(
    traces: Sequence[Sequence[DeviceRun]], *, graph_ms: float, step_ms: float
) -> StepSplit:
    """Cut traces of a replay, each by the begin of its kernels, at its marks.

    A part lasts from the end of the mark before it to the begin of the next one, gaps between its
    kernels included. Without drafts there may be two marks, and no draft part. `graph_ms` is the
    time of a replay that is not traced, `step_ms` the wall time of a step.
    """
    shares = [_shares(runs) for runs in traces]
    mean = {name: sum(share[name] for share in shares) / len(shares) for name in shares[0]}
    found = {name: share * graph_ms for name, share in mean.items()}
    draft = found.pop("draft", None) or None  # an eager step without drafts has all three marks
    return StepSplit(**found, draft=draft, host=max(step_ms - graph_ms, 0.0))


def _shares(runs: Sequence[DeviceRun]) -> dict[str, float]:
    """Share of a trace that each part and the marks take."""
    # The compiler's kernels that read a mark's copy have `part_mark` in their names too.
    marks = [run for run in runs if run.name.startswith(MARK_KERNEL_NAME)]
    if len(marks) not in (len(PARTS) - 2, len(PARTS) - 1):
        raise NumericFault(
            f"expected 2 or 3 marks of --split in a replay, got {len(marks)}; leave --split out."
        )
    begin, end = runs[0].begin_us, max(run.end_us for run in runs)
    starts = [begin, *(run.end_us for run in marks)]
    ends = [*(run.begin_us for run in marks), end]
    share = {
        name: max(to - since, 0.0) / (end - begin)
        for name, since, to in zip(PARTS, starts, ends, strict=False)
    }
    return share | {"marks": sum(run.end_us - run.begin_us for run in marks) / (end - begin)}


def split_steps(decoder: SpecDecoder) -> StepSplit:
    """Time the parts of some more steps of a loop without graphs."""
    clock = StepClock(decoder.target.device)
    decoder.observe(clock.watch)
    for _ in range(NUM_SPLIT_STEPS):
        started = time.perf_counter()
        decoder.step()
        clock.end_step(wall_s=time.perf_counter() - started, keep=True)
    decoder.observe(None)
    parts = clock.parts()
    assert parts is not None, "every step was kept"
    to_ms = 1e3 / parts.num_steps
    draft = parts.draft_s * to_ms if decoder.num_speculative_tokens else None
    target, verify, host = (s * to_ms for s in (parts.target_s, parts.verify_s, parts.host_s))
    return StepSplit(target, verify, bookkeeping=None, draft=draft, marks=0.0, host=host)


def model_costs(
    row: Mapping[str, object], rows: Sequence[Mapping[str, object]]
) -> dict[str, float] | None:
    """The acceptance model's c and v of a row, see `speed`.

    None without a split row of the same case with K = 0 among the rows of the run.
    """
    split, num_drafts = row["split"], cast(int, row["num_drafts"])
    names = ("shape", "batch", "context", "arithmetic")
    same = (other for other in rows if all(other[name] == row[name] for name in names))
    base = next((other for other in same if other["num_drafts"] == 0), None)
    if split is None or base is None or base["split"] is None or not num_drafts:
        return None
    found, unit = (cast(dict[str, float], r["split"]) for r in (row, base))
    spent, one = (sum(part[name] or 0 for name in PARTS[:3]) for part in (found, unit))
    return {"c": (found["draft"] or 0) / num_drafts / one, "v": spent / one - 1}


def describe_split(row: Mapping[str, object]) -> str:
    """The parts of a row, in words."""
    parts = cast(dict[str, float | None], row["split"])
    costs = cast(dict[str, float] | None, row["costs"])
    words = [f"{name} {ms:.3f}" for name, ms in parts.items() if ms is not None]
    model = "" if costs is None else f"; c {costs['c']:.3f} v {costs['v']:.3f}"
    return f"{'  '.join(words)} ms{model}"
