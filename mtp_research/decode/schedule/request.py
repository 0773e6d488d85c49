"""One generation: its accepted tokens, its drafts beside them, its counters and its limits.

`Request` is one of the four state owners. `token_ids` holds accepted tokens only, never a
placeholder; `draft_token_ids` are proposals for the positions after them. Only the scheduler
and the ledger move a request on. `Schedule` is what one step runs; `RequestFeed` reads what a
request has said since it was last asked.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from mtp_research.decode.sampling.grammar import GuardedMatcher
from mtp_research.decode.sampling.sampling_params import SamplingParams, TokenLogprobs

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens left out
_CUT_CHARACTER = "\ufffd"  # of tokens that end inside a character
_NUM_CONTEXT_TOKENS = 32  # before a piece of text, so that a character begun there is completed


class Status(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token was emitted (it is part of the output)
    LENGTH = "length"  # max_new_tokens or the context limit was reached
    NON_FINITE = "non_finite"  # the target's logits were not finite, or masks left no token
    ABORT = "abort"
    ERROR = "error"  # its grammar raised; `error` of the record has the text


@dataclass(eq=False)
class Request:
    """State of one generation, equal to itself alone."""

    request_id: str  # unique among the requests of a decoder
    prompt_token_ids: tuple[int, ...]  # the prompt, at least one token
    sampling: SamplingParams  # how to sample and when to stop
    priority: int = 0  # smaller is served first; ties by arrival
    token_ids: list[int] = field(default_factory=list)  # accepted tokens, prompt included
    max_tokens: int = 0  # text length at which it ends at the latest, prompt included; once queued
    # for the positions after `token_ids`, at most K; -1 marks a draft that must be rejected
    draft_token_ids: list[int] = field(default_factory=list)
    # target rows whose KV is in the pages or will be once the scheduled prompt chunks have run; [0,
    # num_tokens - 1] when no step is in flight
    num_computed_tokens: int = 0
    # rows below are prompt rows: the prompt, or after a preemption all tokens but the newest
    num_prefill_tokens: int = 0
    # scheduled steps not committed yet; at most 1 between steps, and that with deferred output only
    num_in_flight: int = 0
    # pages held, in text order; leading ones may be shared (see `PrefixCache`). The list only grows
    # while the request runs; after that it has a new one.
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of leading full blocks, once needed
    num_published_blocks: int = 0  # leading ones, taken from or offered to the prefix cache
    num_cached_tokens: int = 0  # rows whose KV came from the prefix cache at the last admission
    # one list of the prompt's positions per rotary axis; None: the same on all, counted from 0
    axis_positions: tuple[tuple[int, ...], ...] | None = None
    cache_salt: str = ""  # texts with different salts share no cached block
    slot: int | None = None  # row in the slot-addressed state (`SlotState`), None while waiting
    # passes of a round, from the first on, that ran in each of its steps; other passes drafted, or
    # will, without some of their draft KV
    num_full_passes: int = 1 << 30
    matcher: GuardedMatcher | None = None  # the output's place in its grammar, None without one
    token_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of outputs, if asked for
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None  # why it ended with `FinishReason.ERROR`
    num_accepted_per_round: list[int] = field(default_factory=list)
    num_drafted_per_round: list[int] = field(default_factory=list)
    num_target_forwards: int = 0
    num_preemptions: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    finish_s: float | None = None
    decode: Decode | None = field(default=None, repr=False, compare=False)  # of its target

    def __post_init__(self) -> None:
        """Start the accepted text with the prompt."""
        self.token_ids = list(self.prompt_token_ids)
        self.num_prefill_tokens = len(self.token_ids)

    def __repr__(self) -> str:
        """One line, of counts: the fields are pages."""
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        return (
            f"Request({self.request_id!r}, {self.num_prompt_tokens} prompt tokens, "
            f"{num_output_tokens} tokens, {self.finish_reason or self.status})"
        )

    def note_round(self, *, num_drafted: int, num_emitted: int) -> int:
        """Count the verification of so many drafts, and time the first token.

        Returns:
            The drafts that were accepted.
        """
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter()
        num_accepted = num_drafted if num_emitted > num_drafted else max(num_emitted - 1, 0)
        if num_drafted:
            self.num_accepted_per_round.append(num_accepted)
            self.num_drafted_per_round.append(num_drafted)
        return num_accepted

    def restart(self) -> None:
        """Recompute the text from its start once the request, which waits, is admitted again."""
        has_output = self.num_tokens > self.num_prompt_tokens
        self.num_computed_tokens = 0
        self.num_prefill_tokens = self.num_tokens - has_output
        if not self.num_in_flight:  # the step in flight still has to be judged by its drafts
            self.draft_token_ids = []

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
        """Whether prompt rows (or rows recomputed after a preemption) are still to schedule."""
        return self.num_computed_tokens < self.num_prefill_tokens


class Scheduled(NamedTuple):
    """One entry of a schedule."""

    request: Request  # whose rows
    num_scheduled_tokens: int  # rows, at least 1
    # position of the first row; for rows that are not prompt rows, as far as the host knows (the
    # device knows the exact one)
    first_position: int
    is_prefill: bool  # the rows are prompt rows, or recomputed after a preemption
    ends_at_newest_token: bool  # the rows reach the end of the accepted text, so a token is sampled
    ends_recompute: bool  # the rows end a recompute: drafts follow, but the next token is known

    @property
    def end_position(self) -> int:
        """Position behind the last row, as far as the host knows."""
        return self.first_position + self.num_scheduled_tokens

    def verifying(self, num_drafts: int) -> "Scheduled":
        """The same rows, those of a decoding request without drafts beyond `num_drafts`."""
        if self.is_prefill or self.num_scheduled_tokens <= num_drafts + 1:
            return self
        return self._replace(num_scheduled_tokens=num_drafts + 1)


class Schedule(NamedTuple):
    """One step's work."""

    entries: list[Scheduled]  # rows to run
    # requests with a fresh slot, whose text must be written before the step
    admitted: list[Request]
    preempted: list[Request]  # requests whose pages and slot were taken away
    num_prompt_rows: int  # rows of the entries that are prompt rows
    started_s: float  # on the host's clock, when scheduling began


class TextPiece(NamedTuple):
    """Where the text of the tokens `[start, end)` of a request comes from."""

    decode: Decode
    token_ids: list[int]  # the request's own, which only grows
    first: int  # of the tokens before, with which they are decoded; one of the output
    start: int
    end: int
    is_last: bool  # nothing follows that could complete a character

    def read(self) -> str:
        """The text; a character whose last token is not there yet belongs to a later piece."""
        before = self.decode(self.token_ids[self.first : self.start]).rstrip(_CUT_CHARACTER)
        whole = self.decode(self.token_ids[self.first : self.end])
        return (whole if self.is_last else whole.rstrip(_CUT_CHARACTER))[len(before) :]


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of a request.

    Attributes:
        request_id: as given to the decoder.
        token_ids: new tokens, in order; at least one unless this is the last event.
        finish_reason: see `FinishReason`; None while the request goes on.
        logprobs: of each new token; None unless the request asked for them.
        error: what went wrong, in the last event of a request that ends with `error`.
        piece: where `text` comes from.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    piece: TextPiece | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """What the new tokens add to the text, made when it is asked for.

        The texts of all events give the text of the output. A character of several tokens comes
        whole, with its last one.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        return "" if self.piece is None else self.piece.read()


class RequestFeed:
    """Reads a request from where it was read last."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_read = 0
        self._has_ended = False

    def read(self) -> StreamEvent | None:
        """All that is new; None if nothing is. After the event with a finish reason comes None."""
        request = self._request
        start = request.num_prompt_tokens + self._num_read
        token_ids = tuple(request.token_ids[start:])
        is_finished = request.status is Status.FINISHED
        if self._has_ended or not (token_ids or is_finished):
            return None
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(request.token_logprobs[self._num_read :])
        self._num_read += len(token_ids)
        self._has_ended = is_finished
        reason = request.finish_reason.value if request.finish_reason is not None else None
        piece = None
        if request.decode is not None:
            first = max(start - _NUM_CONTEXT_TOKENS, request.num_prompt_tokens)
            end = start + len(token_ids)
            piece = TextPiece(request.decode, request.token_ids, first, start, end, is_finished)
        return StreamEvent(request.request_id, token_ids, reason, logprobs, request.error, piece)
