"""Decode prompts in a continuous batch and hand out each one's record as it finishes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from mtp_research.decode.request import Request, Status
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.errors import ConfigError

if TYPE_CHECKING:  # it imports this module
    from mtp_research.decode.decoder import SpecDecoder

_MAX_NEW_TOKENS = 256  # where the caller names none


def generate_records(
    decoder: "SpecDecoder",
    prompts: Iterable[Sequence[int]],
    *,
    sampling: SamplingParams | None,
    max_new_tokens: int | None,
) -> Iterator[RequestRecord]:
    """See `SpecDecoder.generate`.

    Raises:
        ConfigError: both `sampling` and `max_new_tokens` are given; see `SpecDecoder.add_request`.
    """
    if sampling is not None and max_new_tokens is not None:
        raise ConfigError(
            "generate() takes sampling or max_new_tokens, got both; "
            "set max_new_tokens in SamplingParams."
        )
    sampling = sampling or SamplingParams(
        max_new_tokens=_MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens,
        stop_token_ids=decoder.target.stop_token_ids,
    )
    stats = decoder.stats
    num_seen = len(stats.records)
    requests: list[Request] = []
    try:
        for index, prompt in enumerate(prompts):
            requests.append(decoder.add_request(prompt, sampling=sampling, request_id=str(index)))
        mine = {request.request_id for request in requests}
        while True:
            finished, num_seen = stats.records[num_seen:], len(stats.records)
            yield from (record for record in finished if record.request_id in mine)
            if all(request.status is Status.FINISHED for request in requests):
                return
            decoder.step()
    finally:  # a bad prompt, or a caller who stops listening, must leave nothing behind
        for request in requests:
            decoder.abort(request)
