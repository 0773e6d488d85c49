"""Counters of finished requests: everything an acceptance figure is computed from.

Warning: "accepted" differs by project. Here, as in vLLM's metrics, `num_accepted` excludes the
bonus token, and `acceptance_length` = 1 + accepted / rounds includes it. TensorRT-LLM's
`num_accepted_tokens` includes the bonus; EAGLE's `accept_length` excludes it. Published tables
should print both `acceptance_rate` and `acceptance_length`.
"""

from dataclasses import dataclass, field

from mtp_research.decode.request import Request


@dataclass(frozen=True)
class RequestRecord:
    """What one finished request leaves behind.

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
    )


@dataclass
class DecodeStats:
    """Counters since the decoder was built.

    Attributes:
        num_steps: steps of the loop.
        num_target_rows: packed rows of all target passes.
        num_prompt_rows: those that were prompt rows.
        num_emitted_tokens: tokens that requests kept.
        num_preemptions: requests whose pages were taken away.
        records: finished requests in the order they finished.
    """

    num_steps: int = 0
    num_target_rows: int = 0
    num_prompt_rows: int = 0
    num_emitted_tokens: int = 0
    num_preemptions: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / rounds of finished requests (bonus counted); None before any round."""
        rounds = sum(len(record.num_accepted_per_round) for record in self.records)
        accepted = sum(sum(record.num_accepted_per_round) for record in self.records)
        return 1 + accepted / rounds if rounds else None
