"""What a request has said since it was last asked: the events of a stream.

`SpecDecoder.stream` and `AsyncDecoder.generate` hand them out. Tokens are accepted tokens: nothing
that a stream has shown is ever taken back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mtp_research.decode.logprobs import TokenLogprobs
from mtp_research.decode.request import Request, Status


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of a request.

    Attributes:
        request_id: as given to the decoder.
        token_ids: new tokens, in order; at least one unless this is the last event.
        finish_reason: see `decode.request.FinishReason`; None while the request goes on.
        logprobs: of each new token; None unless the request asked for them.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


class RequestFeed:
    """Reads a request from where it was read last.

    Args:
        request: a request that has no output yet.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_read = 0
        self._has_ended = False

    def read(self) -> StreamEvent | None:
        """All that is new; None if nothing is. After the event with a finish reason comes None."""
        request = self._request
        token_ids = tuple(request.token_ids[request.num_prompt_tokens + self._num_read :])
        is_finished = request.status is Status.FINISHED
        if self._has_ended or not (token_ids or is_finished):
            return None
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = tuple(request.token_logprobs[self._num_read :])
        self._num_read += len(token_ids)
        self._has_ended = is_finished
        reason = request.finish_reason.value if request.finish_reason is not None else None
        return StreamEvent(request.request_id, token_ids, reason, logprobs)


def stream_events(
    request: Request, *, step: Callable[[], None], abort: Callable[[Request], None]
) -> Iterator[StreamEvent]:
    """Step until the request ends and yield what each step adds; abort it if nobody listens.

    Args:
        request: a queued request.
        step: runs one step of the loop it is queued in.
        abort: ends a request; does nothing to one that has ended.
    """
    feed = RequestFeed(request)
    try:
        while request.status is not Status.FINISHED:
            if (event := feed.read()) is not None:
                yield event
            step()
        if (event := feed.read()) is not None:
            yield event
    finally:
        abort(request)
