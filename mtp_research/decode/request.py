"""One generation: its accepted tokens, its drafts beside them, its counters and its limits.

`Request` is one of the four state owners. `token_ids` holds accepted tokens only, never a
placeholder; `draft_token_ids` are proposals for the positions after them. Only the scheduler
changes a request.
"""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from mtp_research.errors import ConfigError


class Status(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token was emitted (it is part of the output)
    LENGTH = "length"  # max_new_tokens or the context limit was reached
    NON_FINITE = "non_finite"  # the target's logits were not finite
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        temperature: 0 is greedy, otherwise > 0.
        top_k: keep the k most probable tokens, 0 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        seed: noise seed of this request; equal seeds give equal noise whatever the batch.
        max_new_tokens: most tokens to emit, >= 0.
        stop_token_ids: tokens that end the request; the stop token itself is emitted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check ranges.

        Raises:
            ConfigError: names the field, the range and the value.
        """
        checks = (
            ("temperature", self.temperature >= 0.0, ">= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("max_new_tokens", self.max_new_tokens >= 0, ">= 0"),
        )
        for name, holds, expected in checks:
            if not holds:
                raise ConfigError(
                    f"sampling.{name} must be {expected}, got {getattr(self, name)}; "
                    f"set sampling.{name}."
                )


@dataclass
class Request:
    """State of one generation.

    Attributes:
        request_id: unique among the requests of a decoder.
        prompt_token_ids: the prompt, at least one token.
        sampling: how to sample and when to stop.
        priority: smaller is served first; ties by arrival.
        token_ids: accepted tokens, prompt included.
        draft_token_ids: drafts for the positions after `token_ids`, at most K; -1 marks a draft
            that must be rejected.
        num_computed_tokens: target rows whose KV is in the pages, [0, num_tokens - 1] between
            steps.
        num_prefill_tokens: rows below are prompt rows: the prompt, or after a preemption all tokens
            but the newest.
        block_ids: pages owned, in text order.
        slot: row in the slot-addressed state (`HiddenRing`), None while waiting.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_prefill_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int | None = None
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_accepted_per_round: list[int] = field(default_factory=list)
    num_drafted_per_round: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_preemptions: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    finish_s: float | None = None

    def __post_init__(self) -> None:
        """Start the accepted text with the prompt."""
        self.token_ids = list(self.prompt_token_ids)
        self.num_prefill_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Accepted tokens, prompt included (L)."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt rows (or rows recomputed after a preemption) are still missing."""
        return self.num_computed_tokens < self.num_prefill_tokens
