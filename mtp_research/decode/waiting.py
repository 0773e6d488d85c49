"""The order of service: who is admitted first, who is preempted last.

A request of priority p that arrived at step s has rank `s + p * steps_per_priority`; the smaller
rank is served first, ties by arrival. A priority is thus a head start, not a wall: a request can be
overtaken only by requests that arrive less than `(difference of priorities) * steps_per_priority`
steps after it, and never by one of equal or lower priority, however short it is. A rank never
changes, so every request ends up first: then nothing is admitted before it, and nothing can
preempt it. The bound of the wait is the head start and what those before it still have to say.

Source: the rule is ours; linear ageing with a constant rate keeps a heap in order by itself.
"""

import heapq
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from mtp_research.decode.request import Request
from mtp_research.errors import ConfigError


class Rank(NamedTuple):
    """Place in the order of service; smaller is served first.

    Attributes:
        due_step: step of arrival, put off by the priority.
        arrival: running number of the request.
    """

    due_step: int
    arrival: int


class WaitingQueue:
    """Requests that wait, and the ranks of all live ones.

    Args:
        steps_per_priority: head start of one level of priority, in steps, >= 1.
    """

    def __init__(self, *, steps_per_priority: int) -> None:
        self.steps_per_priority = steps_per_priority
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting: dict[str, Request] = {}
        self._ranks: dict[str, Rank] = {}
        self._num_arrived = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting.values())

    def knows(self, request_id: str) -> bool:
        """Whether a live request, waiting or running, has this id."""
        return request_id in self._ranks

    def check_new(self, request: Request) -> None:
        """Refuse an id that a live request, waiting or running, has.

        Raises:
            ConfigError: it is taken.
        """
        if self.knows(request.request_id):
            raise ConfigError(
                f"request_id must be unique among live requests, {request.request_id!r} is taken."
            )

    def arrive(self, request: Request, *, step: int) -> None:
        """Rank a new request and queue it."""
        due_step = step + request.priority * self.steps_per_priority
        self._ranks[request.request_id] = Rank(due_step, next(self._num_arrived))
        self.push(request)

    def rank(self, request: Request) -> Rank:
        """Rank of a live request."""
        return self._ranks[request.request_id]

    def push(self, request: Request) -> None:
        """Queue a live request, at the rank it has had since it arrived."""
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self.rank(request), request))

    def first(self) -> Request:
        """The request to admit next."""
        while self._heap[0][1] is not self._waiting.get(self._heap[0][1].request_id):
            heapq.heappop(self._heap)  # it ended while it waited
        return self._heap[0][1]

    def pop(self) -> Request:
        """Take out the request to admit next."""
        request = self.first()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def leave(self, request: Request) -> None:
        """Forget a request that ends, waiting or not."""
        self._waiting.pop(request.request_id, None)
        self._ranks.pop(request.request_id, None)
