"""What the last verify rounds say about acceptance and about the price of a draft.

The host feeds it at the end of each step; the expected-gain rule of `draft_length.py` reads it. Old
rounds fade, so that a text that becomes easier or harder is noticed, and a draft position that was
not tried for long drifts back to the prior and is tried again.

Letters: K drafts per step, n drafts made in a step.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtp_research.decode.request import Request

_NUM_TIMES = 16  # latest step times kept for each n
_MIN_TIMES = 4  # below this a median says nothing


@dataclass
class RecentRounds:
    """Fading counters of verify rounds, and the times of recent steps.

    Attributes:
        num_speculative_tokens: K.
        half_life_steps: steps after which a round counts half, > 0.
        prior_acceptance: chance assumed for a draft never seen, given that the ones before it were
            accepted, in [0, 1]. It is high on purpose: what is believed to be good gets tried, and
            what is tried gets measured.
        prior_rounds: rounds that the prior counts as, > 0.
        num_steps: decode steps seen.
        reached: per draft position, weight of the rounds that made this draft and accepted all
            before it.
        accepted: of these, those that accepted it.
        step_seconds: latest times of steps that made n drafts after a step that made n.
    """

    num_speculative_tokens: int
    half_life_steps: float = 32.0
    prior_acceptance: float = 0.8
    prior_rounds: float = 2.0
    num_steps: int = 0
    reached: list[float] = field(init=False)
    accepted: list[float] = field(init=False)
    step_seconds: dict[int, deque[float]] = field(default_factory=dict)
    _last_num_drafts: int | None = None

    def __post_init__(self) -> None:
        """Nothing seen yet."""
        self.reached = [0.0] * self.num_speculative_tokens
        self.accepted = [0.0] * self.num_speculative_tokens

    def add_round(self, *, num_drafted: int, num_accepted: int) -> None:
        """Count one verify round of one request.

        Args:
            num_drafted: drafts that were verified, 0..K.
            num_accepted: of these, 0..num_drafted.
        """
        reached, accepted = self.reached, self.accepted
        for position in range(num_accepted):
            reached[position] += 1.0
            accepted[position] += 1.0
        if num_accepted < num_drafted:
            reached[num_accepted] += 1.0

    def add_rounds(self, request: "Request", *, since: int) -> None:
        """Count the rounds of a request from index `since` on."""
        drafted, accepted = request.num_drafted_per_round, request.num_accepted_per_round
        for index in range(since, len(drafted)):
            self.add_round(num_drafted=drafted[index], num_accepted=accepted[index])

    def end_step(self, *, num_drafts: int, seconds: float | None) -> None:
        """Let the counters fade after a step that made `num_drafts` drafts a request.

        The time is kept only if the step before made as many: a step verifies what that one
        drafted, so after a change it prices neither number.

        Args:
            num_drafts: n.
            seconds: of the step; None where the clock also saw work of another kind.
        """
        fading = 0.5 ** (1.0 / self.half_life_steps)
        self.reached = [weight * fading for weight in self.reached]
        self.accepted = [weight * fading for weight in self.accepted]
        self.num_steps += 1
        if seconds is not None and num_drafts == self._last_num_drafts:
            times = self.step_seconds.setdefault(num_drafts, deque(maxlen=_NUM_TIMES))
            times.append(seconds)
        self._last_num_drafts = num_drafts

    def conditional_acceptance(self) -> list[float]:
        """Estimated chance of draft 1..K, given that it is made and all before it are accepted."""
        prior = self.prior_acceptance * self.prior_rounds
        return [
            (accepted + prior) / (reached + self.prior_rounds)
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        ]

    def cost_ratio(self) -> float | None:
        """Measured price of one more draft, in steps that make none; None if not known yet.

        It is the slope between the median times at n = 0 and at the largest n with enough times.
        """
        medians = {
            num_drafts: statistics.median(times)
            for num_drafts, times in self.step_seconds.items()
            if len(times) >= _MIN_TIMES
        }
        most = max(medians, default=0)
        if 0 not in medians or most == 0 or medians[0] <= 0:
            return None
        return max(medians[most] / medians[0] - 1.0, 0.0) / most
