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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtp_research.bench import bench_split
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.grammar import FillMany
from mtp_research.decode.sampling.sampling_params import Matcher, SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.verify.verify import VerifyOptions
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels.bench.bench_runner import drain
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
    extras: str = "none"  # what requests ask of sampling beside greedy, see `EXTRAS`


@dataclass(frozen=True)
class Anything:
    """A grammar that allows every token, and its own matcher: masks cost no more than the loop."""

    is_terminated: bool = False

    def start(self, *, stop_token_ids: tuple[int, ...]) -> "Anything":
        """See `Grammar`."""
        return self

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        """See `Matcher`."""
        bitmask[row] = -1

    @property
    def fill_many(self) -> FillMany:
        """See `FillsMany`: as xgrammar's matchers are asked."""
        return _allow_all

    def accept_token(self, token_id: int) -> bool:
        """See `Matcher`."""
        return True

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""


def _allow_all(matchers: Sequence[Matcher], bitmask: Tensor, places: Sequence[int]) -> None:
    bitmask.numpy()[list(places)] = -1  # PyTorch takes six times as long


_PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.2}
_BIAS = {"logit_bias": ((3, 1.0), (5, -1.0)), "stop_token_ids": (2,), "min_tokens": 1 << 20}
_DRY = {"dry_multiplier": 0.8}
_LOGPROBS = {"logprobs": 5}
EXTRAS: dict[str, Mapping[str, object]] = {
    "none": {},
    "penalties": _PENALTIES,
    "bias": _BIAS,
    "dry": _DRY,
    "logprobs": _LOGPROBS,
    "grammar": {"grammar": Anything(), "stop_token_ids": (1 << 30,)},  # a token that never comes
    "all": {"grammar": Anything(), **_PENALTIES, **_BIAS, **_DRY, **_LOGPROBS},
}


class StepTimes(NamedTuple):
    """What the timed steps gave."""

    step_ms: float  # median over the slices of the wall time of a step
    num_tokens: int  # emitted
    num_steps: int
    num_syncs: int | None  # calls that waited for the device; None where nothing watched


def measure_row(
    target: Target,
    heads: MTPHeads,
    case: Case,
    options: argparse.Namespace,
    copy_tb_per_s: float | None,
) -> dict[str, object]:
    """Figures of one case; the copy bandwidth of the device is None without a GPU."""
    started = time.perf_counter()
    decoder = _warm_decoder(target, heads, case, options)
    ready_s = time.perf_counter() - started
    for _ in range(NUM_WARM_UP_STEPS):  # let the clocks settle
        decoder.step()
    drain()
    stats = decoder.stats
    steps_before, host_before = stats.num_steps, stats.busy_s - stats.wait_s
    tokens_before = num_text_tokens(decoder)
    times = time_steps(decoder, num_steps=options.steps, strict_sync=options.strict_sync)
    host_s = stats.busy_s - stats.wait_s - host_before
    host_ms = host_s / (stats.num_steps - steps_before) * 1e3
    num_tokens = (tokens_before + num_text_tokens(decoder)) / 2
    inside = _look_inside(decoder, options, step_ms=times.step_ms)
    needed = measure_bytes(decoder, heads if case.num_drafts else None, num_tokens=num_tokens)
    num_bytes = needed.target_weights + needed.draft_weights + needed.keys_values
    limit_ms = None if copy_tb_per_s is None else num_bytes / copy_tb_per_s / 1e9
    return {
        **dataclasses.asdict(case),
        "tau": times.num_tokens / times.num_steps / case.batch,
        "tok_per_s": times.num_tokens / times.num_steps / times.step_ms * 1e3,
        **{"step_ms": times.step_ms, "graph_ms": inside.graph_ms, "limit_ms": limit_ms},
        "share": None if limit_ms is None else limit_ms / times.step_ms,
        "host_ms": host_ms,
        "launches": None if inside.launches is None else inside.launches.num_launches,
        "replays": None if inside.launches is None else inside.launches.num_replays,
        **{"syncs": times.num_syncs, "num_steps": times.num_steps},
        **{"experts": needed.unique_experts, "text_tokens": num_tokens / case.batch},
        **{"ready_s": ready_s, "capture_s": decoder.capture_s},
        **{"pool_gib": decoder.pool_bytes / 2**30, "bytes": dataclasses.asdict(needed)},
        "split": None if inside.split is None else dataclasses.asdict(inside.split),
        "kernels": inside.kernels,
    }


class _Inside(NamedTuple):
    """What a step is made of, as far as it can be seen; `graph_ms` of one replay."""

    launches: bench_split.Launches | None = None
    graph_ms: float | None = None
    split: bench_split.StepSplit | None = None
    kernels: list[tuple[str, int, float]] | None = None  # of one replay


def _look_inside(decoder: SpecDecoder, options: argparse.Namespace, *, step_ms: float) -> _Inside:
    """Profile more steps; leaves a decoder with graphs unusable."""
    launches = bench_split.count_launches(decoder) if decoder.target.device.type == "cuda" else None
    captured = decoder.newest_capture
    if captured is None:
        return _Inside(launches, split=bench_split.split_steps(decoder) if options.split else None)
    graph_ms = bench_split.replay_ms(captured)
    traces = [
        bench_split.trace_replay(captured)
        for _ in range(bench_split.NUM_SPLIT_STEPS if options.split else 1)
    ]
    split = None
    if options.split:
        split = bench_split.split_traces(traces, graph_ms=graph_ms, step_ms=step_ms)
    return _Inside(launches, graph_ms, split, bench_split.kernel_totals(traces[0]))


def _warm_decoder(
    target: Target, heads: MTPHeads, case: Case, options: argparse.Namespace
) -> SpecDecoder:
    """A decoder whose requests are all past their prompts and whose step is captured."""
    decoder = _decoder(target, heads, case, options)
    require_blocks(decoder)
    if options.split and decoder.is_captured:
        decoder.observe(bench_split.marked_parts)  # before the first capture
    ranks = target.split
    # Requests that ranks are dealt differ, as those of one batch do.
    first = 0 if ranks is None or ranks.exchange is None else ranks.rank * case.batch
    generator = torch.Generator().manual_seed(case.batch + first)
    vocab_size = target.config.vocab_size
    for seed in range(first, first + case.batch):
        prompt = torch.randint(vocab_size, (case.context,), generator=generator).tolist()
        sampling = SamplingParams(
            max_new_tokens=1 << 20,
            seed=seed,
            **EXTRAS[case.extras],  # pyright: ignore[reportArgumentType]: of fields by name
        )
        decoder.add_request(prompt, sampling=sampling)
    while any(r.is_prefilling for r in decoder.live_requests):
        decoder.step()
    for _ in range(NUM_WARM_UP_STEPS):  # capture
        decoder.step()
    drain()
    return decoder


def _decoder(
    target: Target, heads: MTPHeads, case: Case, options: argparse.Namespace
) -> SpecDecoder:
    on_gpu = target.device.type == "cuda"
    limit = context_limit(
        **{"context": case.context, "num_steps": options.steps, "num_drafts": case.num_drafts},
        num_positions=target.config.max_position_embeddings,
    )
    rates = [options.accept ** (step + 1) for step in range(case.num_drafts)]
    engine = EngineConfig(
        block_size=options.block_size,
        max_num_requests=case.batch,
        max_num_batched_tokens=max(8192, case.batch * (case.num_drafts + 1)),
        max_prefill_chunk=2048,
        max_model_len=limit,
        deferred_output=True,
        cuda_graphs=on_gpu and not options.no_graphs,
        compile=on_gpu and not options.no_compile,
        few_rows_kernel=not options.library_products,
        rotary_in_attention=not options.library_rotary,
        overlap_launches=not options.serial_launches,
        layer_regions=not options.whole_steps,
        deterministic=options.deterministic,
        audit=False,
    )
    spec = SpecSettings(
        policy=case.policy,
        num_speculative_tokens=case.num_drafts,
        draft_token_ids=None if case.draft_vocab is None else range(case.draft_vocab),
        verify="synthetic" if case.num_drafts else "greedy",
        verify_options=VerifyOptions(synthetic_rates=rates),
    )
    return SpecDecoder(target, heads if case.num_drafts else None, spec=spec, engine=engine)


def context_limit(*, context: int, num_steps: int, num_drafts: int, num_positions: int) -> int:
    """Tokens that a request can reach: its prompt, and K + 1 for every step, timed or not."""
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
    needed, had = batch * -(-decoder.max_model_len // block_size), decoder.num_blocks
    if had < needed:
        raise ConfigError(
            f"--steps and --batch {batch} need {needed} blocks of {block_size} tokens, the free "
            f"memory gives {had}; set a smaller --steps, --context or --batch."
        )


def time_steps(decoder: SpecDecoder, *, num_steps: int, strict_sync: bool) -> StepTimes:
    """Time steps of a batch that only decodes, in slices of at least one step.

    With `strict_sync` a step that waits for the device raises NumericFault, which says where.
    """
    per_slice = max(num_steps // NUM_SLICES, 1)
    watches = strict_sync and decoder.target.device.type == "cuda"
    times, first, done = [], decoder.stats.num_emitted_tokens, 0
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
    drain()
    num_tokens, num_syncs = decoder.stats.num_emitted_tokens - first, 0 if watches else None
    return StepTimes(statistics.median(times), num_tokens, num_steps=done, num_syncs=num_syncs)


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one step has to read: the limit that its time is compared with.

    Weights are read once per pass that uses them, experts as often as they are unique in a step,
    which is counted: the routing of random weights is not uniform. Keys and values once per pass.
    """

    target_weights: int  # without the embedding table, with lm_head
    draft_weights: int  # of all K module passes, each with lm_head or the drafted rows of it
    keys_values: int  # of the target pass and the module passes
    unique_experts: float | None  # mean per expert layer of the target alone; None without


def num_text_tokens(decoder: SpecDecoder) -> int:
    """Tokens of all running requests, prompts included."""
    return sum(request.num_tokens for request in decoder.live_requests)


def measure_bytes(decoder: SpecDecoder, heads: MTPHeads | None, *, num_tokens: float) -> StepBytes:
    """Bytes of a decoding step of the running requests; runs one step to see the routing.

    The step happens behind the host's back: the decoder is of no use afterwards. All requests are
    past their prompts; `num_tokens` of all texts is the mean over the steps compared with.
    """
    return step_bytes(decoder, heads, num_tokens=num_tokens, used=_experts_used(decoder, heads))


def step_bytes(
    decoder: SpecDecoder, heads: MTPHeads | None, *, num_tokens: float, used: "ExpertsUsed"
) -> StepBytes:
    """Bytes of a decoding step, nothing run: of a decoder without weights as well.

    Args:
        decoder: its target and settings are read.
        heads: modules that draft; None without drafts.
        num_tokens: of all texts.
        used: experts that the passes of the step use, by stack.
    """
    model, num_drafts = decoder.target.model, decoder.num_speculative_tokens
    embedding = cast(Tensor, decoder.target.embed_tokens.weight)
    target = _read_bytes(model, used) - embedding.nbytes
    if decoder.target.lm_head.weight is embedding:
        target += embedding.nbytes
    drafts = 0
    if heads is not None:
        per_module = _read_bytes(heads, used) // heads.spec.num_mtp_modules
        drafts = num_drafts * (per_module + decoder.draft_head.nbytes)
    num_target = decoder.target.config.num_hidden_layers
    per_token = sum(decoder.bytes_per_token(layer) for layer in range(num_target))
    if heads is not None:
        per_token += num_drafts * decoder.bytes_per_token(num_target)
    own = set(model.modules())
    counts = [found.count for module, found in used.items() if module in own]
    unique = sum(counts) / len(counts) if counts else None
    return StepBytes(target, drafts, round(num_tokens * per_token), unique_experts=unique)


class Used(NamedTuple):
    """Experts of a stack that are used, a mean over the stack's passes in a step."""

    count: float
    share: float


ExpertsUsed = dict[nn.Module, Used]


def evenly_used(model: nn.Module, *, num_rows: float, top_k: int) -> ExpertsUsed:
    """What a pass of `num_rows` rows uses where every expert is as likely as any other.

    Of E experts a row misses all but `top_k`; some row uses E (1 - (1 - top_k / E)^rows) of them.
    Learned and random routers prefer some experts, so a real pass uses fewer.
    """
    used = {}
    for stack in model.modules():
        if weights := expert_weights(stack):
            count = weights[0].shape[0]
            share = 1 - (1 - top_k / count) ** num_rows
            used[stack] = Used(count * share, share)
    return used


def _read_bytes(model: nn.Module, used: ExpertsUsed) -> int:
    """Bytes of the parameters, those of expert stacks times the share of experts in use."""
    shares = {id(p): part.share for module, part in used.items() for p in module.parameters()}
    return sum(int(p.nbytes * shares.get(id(p), 1.0)) for p in model.parameters())


def _experts_used(decoder: SpecDecoder, heads: MTPHeads | None) -> ExpertsUsed:
    """What one step uses, by stack of experts."""
    modules = [*decoder.target.model.modules()]
    if heads is not None:
        modules += [*heads.modules()]
    stacks = [module for module in modules if expert_weights(module)]
    counts: dict[nn.Module, list[int]] = {stack: [] for stack in stacks}
    handles = [stack.register_forward_pre_hook(_note_experts(counts[stack])) for stack in stacks]
    if handles:
        decoder.rehearse()
    for handle in handles:
        handle.remove()
    used = {}
    for stack, passes in counts.items():
        if passes:  # a stack that no pass ran counts as read whole
            count = sum(passes) / len(passes)
            used[stack] = Used(count, count / expert_weights(stack)[0].shape[0])
    return used


def expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all experts in one tensor `[E, out, in]` each; none of any other module."""
    if isinstance(module, nn.Conv1d):  # of a recurrent layer
        return []
    return [p for p in module.parameters(recurse=False) if p.dim() == 3]


def _note_experts(passes: list[int]) -> Callable:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        used = torch.unique(inputs[1])
        here = used < len(expert_weights(module)[0])  # behind them are those of other ranks
        passes.append(int(here.sum()))

    return note
