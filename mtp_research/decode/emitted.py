"""What a request's newly kept tokens change beside its text."""

from mtp_research.decode.logprobs import LogprobTensors
from mtp_research.decode.request import Request


def note_emitted(
    request: Request, *, since: int, logprobs: LogprobTensors | None, row: int
) -> None:
    """Move the grammar on, and keep the log-probabilities.

    Args:
        request: its text holds the kept tokens already.
        since: length of the text before them.
        logprobs: of the step, None where no request asks.
        row: the request's row in the step.
    """
    kept = request.token_ids[since:]
    if request.matcher is not None:
        for token_id in kept:
            accepted = request.matcher.accept_token(token_id)
            assert accepted, f"request {request.request_id} emitted {token_id} against its grammar"
    if logprobs is not None and request.sampling.logprobs is not None:
        request.token_logprobs += logprobs.of_request(
            row, num_tokens=len(kept), num_top=request.sampling.logprobs
        )
