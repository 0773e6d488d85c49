"""Counters of a decode loop, and every acceptance figure computed from them, without evaluation.

A *round* is one verify step of one request that had drafts. Round t verified n_t drafts and
accepted a_t of them, `0 <= a_t <= n_t <= K`. With sums over the rounds of finished requests:

- `acceptance_rate` = sum a_t / sum n_t
- `acceptance_length` = 1 + sum a_t / rounds, tokens per round, bonus counted
- `acceptance_rate_per_position[i-1]`, p_i = rounds with a_t >= i / rounds; so the length is
  1 + p_1 + ... + p_K, however many drafts each round made
- `conditional_acceptance_rate_per_position[i-1]` = rounds with a_t >= i / rounds that made draft i
  and accepted all before it; it equals p_i / p_{i-1} when every round makes K drafts
- `draft_rate_per_position[i-1]` = rounds with n_t >= i / rounds
- `target_forwards_per_token` = decode steps / (tokens after the first of each request). Compare
  draft-length rules by this one: a step without drafts is no round, so a rule that drafts only
  where it is easy has a long acceptance length and yet many steps

Warning: "accepted" differs by project. Here, as in vLLM's metrics, `num_accepted` excludes the
bonus token, and `acceptance_length` = 1 + accepted / rounds includes it. TensorRT-LLM's
`num_accepted_tokens` includes the bonus; EAGLE's `accept_length` excludes it. Published tables
should print both `acceptance_rate` and `acceptance_length`.

Letters: K drafts per step.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from mtp_research.decode.sampling.sampling_params import TokenLogprobs
from mtp_research.decode.schedule.request import Decode, Request
from mtp_research.policy.audit import Auditor, Verdict
from mtp_research.runtime.errors import ConfigError


@dataclass(frozen=True, repr=False)
class RequestRecord:
    """What one finished request leaves behind: `text` and `token_ids` of the output, and counters.

    Attributes:
        request_id: as given to the decoder.
        num_prompt_tokens: prompt length.
        output_token_ids: generated tokens, a stop token included.
        finish_reason: see `decode.request.FinishReason`.
        num_accepted_per_round: per verify round with drafts, drafts the verifier accepted (0..K,
            bonus not counted), before any cut by a stop token or a length limit.
        num_drafted_per_round: drafts verified in that round; same length.
        num_target_forwards: decode steps this request took part in, prompt chunks not counted.
        ttft_s: wall seconds from arrival to the first token.
        decode_s: wall seconds from the first token to the end.
        token_logprobs: one entry per output token; None where the request did not ask.
        error: what a request that ended with `error` was told; None for all others.
    """

    request_id: str
    num_prompt_tokens: int
    output_token_ids: tuple[int, ...]
    finish_reason: str
    num_accepted_per_round: tuple[int, ...]
    num_drafted_per_round: tuple[int, ...]
    num_target_forwards: int
    ttft_s: float
    decode_s: float
    token_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None

    # No field: fields are what files hold of a generation, and a copy elsewhere has no target.
    _decode = None

    def __repr__(self) -> str:
        rounds = len(self.num_accepted_per_round)
        length = 1 + sum(self.num_accepted_per_round) / rounds if rounds else None
        accepted = "" if length is None else f", acceptance length {length:.2f}"
        return (
            f"RequestRecord({self.request_id!r}, {len(self.output_token_ids)} tokens, "
            f"{self.finish_reason}{accepted})"
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_decode"}

    def with_text(self, decode: Decode | None) -> "RequestRecord":
        """The same record, in place, with a way to make `text`."""
        object.__setattr__(self, "_decode", decode)
        return self

    @property
    def token_ids(self) -> tuple[int, ...]:
        """`output_token_ids`, by the name that stream events have for them."""
        return self.output_token_ids

    @property
    def text(self) -> str:
        """The output in words, made when it is asked for; special tokens are left out.

        Raises:
            ConfigError: the target has no tokenizer, or the record was read from a file.
        """
        if self._decode is None:
            raise ConfigError(
                "text of an output needs the target that wrote it, got a record from a file or "
                "another process; use target.decode(record.token_ids)."
            )
        return self._decode(self.output_token_ids)


def record_of(request: Request) -> RequestRecord:
    """The record of a finished request."""
    finish_s = request.finish_s
    assert request.finish_reason is not None, f"request {request.request_id} has not finished"
    assert finish_s is not None, f"request {request.request_id} has not finished"
    first = request.first_token_s if request.first_token_s is not None else finish_s
    return RequestRecord(
        request_id=request.request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        output_token_ids=request.output_token_ids,
        finish_reason=request.finish_reason.value,
        num_accepted_per_round=tuple(request.num_accepted_per_round),
        num_drafted_per_round=tuple(request.num_drafted_per_round),
        num_target_forwards=request.num_target_forwards,
        ttft_s=first - request.arrival_s,
        decode_s=finish_s - first,
        token_logprobs=(
            None if request.sampling.logprobs is None else tuple(request.token_logprobs)
        ),
        error=request.error,
    ).with_text(request.decode)


@dataclass(frozen=True)
class AcceptanceCounts:
    """Integer sums behind the acceptance figures; position i is at index i - 1."""

    num_rounds: int  # verify rounds that had drafts
    num_drafted: tuple[int, ...]  # per position, rounds that made this draft
    num_reached: tuple[int, ...]  # per position, rounds that made it and accepted all before it
    num_accepted: tuple[int, ...]  # per position, rounds that accepted it and all before it


def count_acceptance(records: Iterable[RequestRecord]) -> AcceptanceCounts:
    """Count the rounds of some requests, for as many positions as the longest round has."""
    rounds = [
        pair
        for record in records
        for pair in zip(record.num_drafted_per_round, record.num_accepted_per_round, strict=True)
    ]
    positions = range(1, max((drafted for drafted, _ in rounds), default=0) + 1)
    return AcceptanceCounts(
        num_rounds=len(rounds),
        num_drafted=tuple(sum(n >= i for n, _ in rounds) for i in positions),
        num_reached=tuple(sum(n >= i and a >= i - 1 for n, a in rounds) for i in positions),
        num_accepted=tuple(sum(a >= i for _, a in rounds) for i in positions),
    )


@dataclass(repr=False)
class DecodeStats:
    """Counters since the decoder was built; the module docstring has the formulas.

    Rates are None, or leave out a position, where their denominator is 0.
    """

    num_steps: int = 0  # steps of the loop
    num_target_rows: int = 0  # packed rows of all target passes
    num_prompt_rows: int = 0  # those that were prompt rows
    # prompt rows of all steps that were started; ahead of `num_prompt_rows` by the step in flight
    # where the host is one step late
    num_launched_prompt_rows: int = 0
    # requests of each step, summed over the steps; a request that ended while its step ran counts,
    # because it held its place
    num_entries: int = 0
    num_launched_entries: int = 0  # the same of all steps that were started
    num_cached_tokens: int = 0  # of admitted texts, whose rows came from the prefix cache
    num_emitted_tokens: int = 0  # tokens that requests kept
    num_preemptions: int = 0  # requests whose pages were taken away
    busy_s: float = 0.0  # wall seconds spent in steps
    wait_s: float = 0.0  # those of them spent waiting for the device's results
    records: list[RequestRecord] = field(default_factory=list)  # in the order they finished
    auditor: Auditor | None = field(default=None, repr=False)  # watches the draft KV, or None

    def __repr__(self) -> str:
        """One line, of counts: the records alone are pages."""
        length = self.acceptance_length
        accepted = "" if length is None else f", acceptance length {length:.3f}"
        return (
            f"DecodeStats({len(self.records)} requests, {self.num_emitted_tokens} tokens, "
            f"{self.num_steps} steps{accepted})"
        )

    @property
    def acceptance(self) -> AcceptanceCounts:
        """The sums over finished requests."""
        return count_acceptance(self.records)

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per round, bonus counted."""
        counts = self.acceptance
        return 1 + sum(counts.num_accepted) / counts.num_rounds if counts.num_rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts per verified draft."""
        counts = self.acceptance
        drafted = sum(counts.num_drafted)
        return sum(counts.num_accepted) / drafted if drafted else None

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """p_1 .. p_K, over all rounds."""
        counts = self.acceptance
        return tuple(accepted / counts.num_rounds for accepted in counts.num_accepted)

    @property
    def conditional_acceptance_rate_per_position(self) -> tuple[float, ...]:
        """Rate of each position over the rounds that reached it, up to the last reached one."""
        counts = self.acceptance
        pairs = zip(counts.num_accepted, counts.num_reached, strict=True)
        return tuple(accepted / reached for accepted, reached in pairs if reached)

    @property
    def draft_rate_per_position(self) -> tuple[float, ...]:
        """Share of the rounds that made each draft; below 1 where a length rule stopped."""
        counts = self.acceptance
        return tuple(drafted / counts.num_rounds for drafted in counts.num_drafted)

    @property
    def target_forwards_per_token(self) -> float | None:
        """Decode steps per token of finished requests; 1 without drafts, below 1 is the gain."""
        tokens = sum(max(len(record.output_token_ids) - 1, 0) for record in self.records)
        steps = sum(record.num_target_forwards for record in self.records)
        return steps / tokens if tokens else None

    @property
    def rows_per_step(self) -> float | None:
        """Mean packed rows of a target pass."""
        return self.num_target_rows / self.num_steps if self.num_steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all requests, live ones included, per second spent in steps (prefill too)."""
        return self.num_emitted_tokens / self.busy_s if self.busy_s else None

    @property
    def audit(self) -> dict[str, int] | None:
        """Slots by finding over all KV layers of finished, watched requests; None: no auditor.

        `slots` is the number of slots looked at, the denominator of any share.
        """
        if self.auditor is None:
            return None
        totals = self.auditor.totals
        counts = {verdict.value: sum(total[verdict] for total in totals) for verdict in Verdict}
        return counts | {"slots": self.auditor.num_slots * len(totals)}
