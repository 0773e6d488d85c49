"""The timed steps of `bench_decode`: wall times in slices, and proof that no step waits.

With `--strict-sync` a call that waits for the device raises inside the timed steps. What the loop
is meant to wait for, the copy of the tokens of the step before, is an event and not such a call.

Letters: K drafts per step.
"""

import statistics
import time
from typing import NamedTuple

import torch

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.runtime.errors import ConfigError, NumericFault

NUM_SLICES = 5
NUM_WARM_UP_STEPS = 8
_NUM_OTHER_STEPS = 64  # warm-up twice, replays that are timed, counted or traced, with room
_ROUND_TO_TOKENS = 256


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


def context_limit(*, context: int, num_steps: int, num_drafts: int, num_positions: int) -> int:
    """Tokens that a request can reach: its prompt and K + 1 for every step, measured ones or not.

    Args:
        context: prompt tokens.
        num_steps: timed steps.
        num_drafts: K.
        num_positions: of the model.

    Raises:
        ConfigError: the model has fewer positions.
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
    """Refuse a pool in which the batch would be preempted while it is timed.

    Raises:
        ConfigError: names blocks needed and had.
    """
    block_size, batch = decoder.engine.block_size, decoder.engine.max_num_requests
    needed = batch * -(-decoder.max_model_len // block_size)
    had = decoder.cache.num_blocks - 1  # one is for padding
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
