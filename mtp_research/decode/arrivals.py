"""From a prompt to a queued request; `SpecDecoder.add_request` hands prompts over.

What could never run is refused here, before it costs anything.
"""

import itertools
from collections.abc import Sequence

from mtp_research.decode.arguments import check_request
from mtp_research.decode.ledger import Ledger
from mtp_research.decode.request import FinishReason, Request
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.verify_rules import Rule
from mtp_research.models.target import Target


class Arrivals:
    """Makes requests of prompts and queues them.

    Args:
        ledger: ends a request that wants no token; its scheduler has the queue.
        target: whose tokens a prompt may hold.
        rule: verification rule of the loop.
    """

    def __init__(self, ledger: Ledger, target: Target, *, rule: Rule) -> None:
        self._ledger, self._scheduler = ledger, ledger.scheduler
        self._target, self._rule = target, rule
        self._numbers = itertools.count()

    def checked(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """What `SpecDecoder.add_request` would queue: to be asked before minutes of capture.

        Raises:
            ConfigError: see `SpecDecoder.add_request`.
        """
        sampling = sampling or SamplingParams()
        check_request(
            prompt_token_ids,
            sampling,
            rule=self._rule,
            vocab_size=self._target.config.vocab_size,
            deferred=self._scheduler.deferred,
        )
        request = Request(
            request_id=request_id if request_id is not None else f"request-{next(self._numbers)}",
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._scheduler.check(request)
        return request

    def queue(self, request: Request) -> None:
        """Queue a request that `checked` made; one that wants no token has ended then."""
        if (grammar := request.sampling.grammar) is not None:
            request.matcher = grammar.start(stop_token_ids=request.sampling.stop_token_ids)
        self._scheduler.add(request)
        if request.sampling.max_new_tokens == 0:
            self._ledger.finish(request, FinishReason.LENGTH)
