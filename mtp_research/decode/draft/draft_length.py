"""How many drafts a step makes: a fixed number, or fewer where more are not worth their price.

On the host a rule limits all requests of a step (`num_drafts`); on the device it may stop single
requests between two passes (`keeps`), without a copy to the host. A draft that was not made is
`NOT_DRAFTED`; the host cuts the list there, so that the next step verifies fewer rows and every
rate is divided by drafts that were made. -1 stays what it was: made, but no valid token.

**The draft KV stays what it would have been.** Passes are not simply left out, because later rounds
read what they write. Base rows run in every pass, made draft or not: under the chain policies pass
m of this round is the only one that ever writes the older fresh rows of depth m (K hidden states
are kept, not 2K), and under `eagle` with N modules module m is the only writer of its own layer.
Draft rows, those above the frontier, are rewritten by the next round before anything reads them: a
pass that makes no draft has none. A row whose token is a draft that was not made runs with token 0
in its place; like every row that consumes a draft it is run again by the next round.

What a draft that is not made saves:

    always                       its verification row and its draft logits (one LM head)
    eagle, one module            the whole pass
    eagle, N modules             the pass's draft rows; the whole pass if its module ran before
    training and the ablations   no module row

With deferred output the host learns too late how many drafts there are. Every request is then
verified with as many rows as the step's limit says: when the limit falls, drafts above it are
dropped unseen, and when it rises, the first step has rows whose drafts were not made. `keeps` saves
no row there. Captured steps are one graph per limit, and `warm_up` times each: that is the cost
table of `ExpectedGainLength`.

**Passes can be left out for good**, those beyond the first n: such a step is that of a decoder with
K = n, in every layer that it writes and reads. Requests that run then lack the draft KV of the
other passes for the rest of their lives (`Request.num_full_passes`). When these run again, requests
that begin then gain by it; the older ones get drafts, too, which are verified but not counted in
what a draft is worth. `ExpectedGainLength` chooses this as well (`num_passes`) where steps are
captured and timed. Passes are left out only while requests wait. They run again in a step whose
requests all begin in it, or once as many as half of a batch have begun with nobody waiting behind
them. Not where other ranks or a prefix cache hold on to what this one left out.

**Losslessness.** A limit may depend on the past, never on the token just drawn: a draft that is
kept only when its own probability is high is no draw from the draft distribution, and rejection
sampling would be biased. `ConfidenceLength` therefore judges the distribution, by its largest
probability, which for greedy drafts is the draft's own.

Letters: R requests, K drafts per step, n drafts made in a step, m passes run in a step, c cost
ratio.
Source: stopping at a low draft probability as in llama.cpp (`p_min`) and transformers
(`assistant_confidence_threshold`); expected tokens per cost as in Leviathan et al.
(arXiv:2211.17192, section 3.5), with one rate per position.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from mtp_research.runtime.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from mtp_research.decode.schedule.request import Request
    from mtp_research.policy.plan import DraftPlan

_NUM_TIMES = 16  # latest step times kept for each n
_MIN_TIMES = 4  # below this a median says nothing
# Chance assumed for a draft never seen, given that the ones before it were accepted, and the rounds
# that this counts as. High on purpose: what is believed to be good is tried, and so it is measured.
_PRIOR_ACCEPTANCE = 0.8
_PRIOR_ROUNDS = 2.0
_REMEMBERED_STEPS = 2048  # for which a number of drafts need not be tried again
_HOST_REQUESTS = 64  # whose work on the host is as much as what a call does beside them


@dataclass
class LatestTimes:
    """Median of the latest numbers of seconds, or of ratios of them.

    It is asked for in every step, and found anew for every fourth number.
    """

    numbers: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_TIMES))
    _num_new: int = 0  # numbers since it was found
    _median: float | None = None

    def add(self, number: float) -> None:
        """Count one more."""
        self.numbers.append(number)
        self._num_new += 1

    def median(self) -> float | None:
        """None before there are enough of them."""
        if self._num_new >= _MIN_TIMES:
            self._num_new, self._median = 0, statistics.median(self.numbers)
        return self._median


@dataclass
class RoundCounts:
    """Fading counts of verify rounds, by draft position."""

    reached: list[float]  # weight of the rounds that made this draft and accepted all before it
    accepted: list[float]  # of these, those that accepted it

    @classmethod
    def none(cls, num_speculative_tokens: int) -> "RoundCounts":
        """Of K positions."""
        return cls([0.0] * num_speculative_tokens, [0.0] * num_speculative_tokens)

    def add(self, count: int, *, num_drafted: int, num_accepted: int) -> None:
        """Count `count` rounds that verified `num_drafted` drafts and accepted `num_accepted`."""
        for position in range(num_accepted):
            self.reached[position] += count
            self.accepted[position] += count
        if num_accepted < num_drafted:
            self.reached[num_accepted] += count

    def fade(self, factor: float, *, num_drafts: int) -> None:
        """Let what was seen of the first drafts count less."""
        for position in range(num_drafts):
            self.reached[position] *= factor
            self.accepted[position] *= factor

    def conditional_acceptance(self) -> list[float]:
        """Estimated chance of draft 1..K, given that it is made and all before it are accepted."""
        prior = _PRIOR_ACCEPTANCE * _PRIOR_ROUNDS
        return [
            (accepted + prior) / (reached + _PRIOR_ROUNDS)
            for accepted, reached in zip(self.accepted, self.reached, strict=True)
        ]


@dataclass
class RecentRounds:
    """Fading counters of verify rounds, and the times of recent steps.

    There are two memories. Drafts of a step are chosen by the rounds just before it. Passes are
    left out for as long as a queue lasts, and prompts often come in order of their kind: that
    follows what many texts were like.
    """

    plan: "DraftPlan"  # whose drafts are counted
    half_life_steps: float = 32.0  # decode steps after which a round counts half, > 0
    half_life_texts: float = 256.0  # texts that end after which it counts half in the long memory
    max_rows: int = 1 << 30  # of a step
    num_steps: int = 0  # decode steps seen
    counts: RoundCounts = field(init=False)
    lasting_counts: RoundCounts = field(init=False)
    # latest times of steps that made n drafts after a step that made n; for steps without prices,
    # which run all passes
    step_seconds: dict[int, LatestTimes] = field(default_factory=dict)
    times: "StepTimes" = field(default_factory=lambda: StepTimes())
    num_seen: int = 0  # steps of any kind
    # recent steps with prompt rows: those that had every row that a step may have, and others
    mixed: "dict[bool, MixedSteps]" = field(default_factory=dict)
    # long memory of tokens that were written to any text, and of texts that ended before they had
    # as many as they may have; their ratio is the chance that a text ends at a token
    output_tokens: float = field(init=False)
    num_stopped: float = field(init=False)
    num_rounds: int = field(init=False)  # that made drafts
    last_num_drafts: int | None = None  # of the last step that the host knows
    num_drafts: int = field(init=False)  # n, drafts that a rule chose last
    num_passes: int = field(init=False)  # m, passes that steps run now
    is_due: bool = True  # drafts and passes are chosen in the step that begins
    chosen_at: int = 0  # `num_seen` when they last were
    num_looks: int = 0  # at passes, since others began to run, or a batch of new texts
    # requests that began since any last waited behind them, and the tokens of their texts then
    num_unqueued: int = 0
    unqueued_tokens: int = 0
    most_running: float = 1.0  # requests at a time, of late; only where passes are chosen

    def __post_init__(self) -> None:
        self.num_passes = self.num_drafts = self.plan.num_speculative_tokens
        self.forget_texts()

    def forget_texts(self) -> None:
        """Forget what was accepted, and how often texts ended; what steps take stays."""
        self.chosen_at = self.num_seen - _CHOICE_EVERY
        self.counts = RoundCounts.none(self.plan.num_speculative_tokens)
        self.lasting_counts = RoundCounts.none(self.plan.num_speculative_tokens)
        self.output_tokens = self.num_stopped = 0.0
        self.num_rounds = 0

    def begin_step(self, *, is_new_batch: bool) -> None:
        """Find out whether this step chooses drafts and passes: the first of a batch does."""
        if is_new_batch:
            self.num_looks = 0
        self.is_due = is_new_batch or self.num_seen - self.chosen_at >= _CHOICE_EVERY
        if self.is_due:
            self.chosen_at = self.num_seen

    def run_passes(self, num_passes: int) -> None:
        """Run other passes from this step on, and choose drafts anew, from all that they make."""
        self.num_passes = self.num_drafts = num_passes
        self.num_looks, self.is_due = 0, True

    def add_rounds(self, count: int, *, num_drafted: int, num_accepted: int) -> None:
        """Count `count` rounds that verified `num_drafted` drafts and accepted `num_accepted`."""
        self.num_rounds += count if num_drafted else 0
        for counts in (self.counts, self.lasting_counts):
            counts.add(count, num_drafted=num_drafted, num_accepted=num_accepted)

    def add_step(
        self, num_prompt_rows: int, *, num_decoding: int, num_passes: int, num_tokens: int
    ) -> None:
        """Count a step: prompt rows, requests that decode, passes, and tokens of output."""
        self.num_seen += 1
        self.output_tokens += num_tokens
        if num_prompt_rows:
            num_rows = num_prompt_rows + num_decoding * (num_passes + 1)
            for kind in self.mixed.values():
                kind.fade(_fading(self.half_life_steps))
            kind = self.mixed.setdefault(num_rows >= self.max_rows, MixedSteps())
            kind.add(num_decoding=num_decoding, num_prompt_rows=num_prompt_rows)

    def add_admissions(self, num_tokens: Sequence[int], *, is_queue: bool) -> None:
        """Count texts that begin in a step, by their tokens; anew where others wait behind them."""
        if is_queue:
            self.num_unqueued = self.unqueued_tokens = 0
        elif num_tokens:
            self.num_unqueued += len(num_tokens)
            self.unqueued_tokens += sum(num_tokens)

    def add_text(self, *, is_stopped: bool) -> None:
        """Count a text that ended; `is_stopped` if it might have had more tokens."""
        fading = _fading(self.half_life_texts)
        self.num_stopped = fading * self.num_stopped + is_stopped
        self.output_tokens *= fading
        # Of passes that do not run nothing new is learnt: what was known of their drafts stays.
        self.lasting_counts.fade(fading, num_drafts=self.num_passes)

    def add_call(self, seconds: float, *, has_prompts: bool, batch_size: int) -> None:
        """Keep what the host did in a call that started a step of half of `most_running` or more.

        At the end of a batch, when few run, it would say little of the next one.
        """
        if 2 * batch_size >= self.most_running:
            self.times.note_host(seconds, has_prompts=has_prompts, batch_size=batch_size)

    def end_step(self, *, num_drafts: int, seconds: float | None, batch_size: int = 1) -> None:
        """Let the counters fade after a step that made `num_drafts` drafts a request.

        The time is kept only if the step before made as many: a step verifies what that one
        drafted, so after a change it prices neither number.
        """
        self.counts.fade(_fading(self.half_life_steps), num_drafts=self.num_passes)
        self.num_steps += 1
        if seconds is not None and num_drafts == self.last_num_drafts:
            self.step_seconds.setdefault(num_drafts, LatestTimes()).add(seconds)
            self.times.note(
                self._kind(False),
                num_drafts,
                size=batch_size,
                batch_size=batch_size,
                seconds=seconds,
            )
        self.last_num_drafts = num_drafts

    def costs(self, batch_size: int) -> dict[int, float]:
        """Expected seconds of a step by its number of drafts; {} where none was timed.

        A number that was not timed lately counts as its price says: if that looks good it is tried,
        and what is tried is timed.
        """
        return self.times.costs(self._kind(False), batch_size=batch_size)

    def rate(self, num_passes: int, batch_size: int, *, rows_a_token: float = 0.0) -> float:
        """Expected tokens a second of steps of `num_passes` passes.

        They make the n that is best without prompts, as `num_drafts` chooses it; to look for it
        beside prompts would double the work. `rows_a_token` prompt rows come with each token of
        output. All numbers of passes and drafts take as much more than their price as steps do now:
        what was seen of another is of other texts, or of none.
        """
        times, mixed = self.times, StepKind(num_passes, True)
        usual = times.usual(self._kind(False)), times.usual(self._kind(True))
        costs = times.priced(StepKind(num_passes, False), batch_size=batch_size, usual=usual[0])
        expected = expected_tokens(self.lasting_counts.conditional_acceptance())
        n = _best_for_cost(expected, costs)
        if not times.prices.get(mixed):
            rows_a_token = 0.0
        share, steps = self._with_prompts(batch_size, num_passes, rows_a_token * expected[n])
        seconds, num_decoding = (1.0 - share) * costs[n], (1.0 - share) * batch_size
        for is_full, step in steps:
            most_rows = None if is_full else self.max_rows
            priced = times.priced_beside_prompts(
                mixed, n, step, most_rows=most_rows, usual=usual[1]
            )
            seconds += share * step.weight * priced
            num_decoding += share * step.weight * step.num_decoding
        return num_decoding * expected[n] / seconds

    def _with_prompts(
        self, batch_size: int, num_passes: int, wanted: float
    ) -> tuple[float, list[tuple[bool, "MixedSteps"]]]:
        """Share of the steps that have prompt rows; full ones and others, whose weights make 1.

        They are like the latest: so many requests decode in them, beside so many prompt rows, which
        in full ones are what decoding rows leave. Their share is that which brings `wanted` prompt
        rows for each request that decodes in any step. Where even a share of 1 does not, all steps
        have more prompt rows, up to full ones, and as many requests decode as can then be fed.
        """
        if not wanted:
            return 0.0, []
        kinds = self.mixed or {True: MixedSteps(1.0, batch_size)}
        total, steps = sum(kind.weight for kind in kinds.values()), []
        for is_full, kind in kinds.items():
            num_decoding = min(kind.num_decoding / kind.weight, batch_size)
            rows = kind.num_prompt_rows / kind.weight
            if is_full:
                rows = max(self.max_rows - num_decoding * (num_passes + 1), 1.0)
            steps.append((is_full, MixedSteps(kind.weight / total, num_decoding, rows)))
        num_decoding = sum(step.weight * step.num_decoding for _, step in steps)
        num_rows = sum(step.weight * step.num_prompt_rows for _, step in steps)
        num_rows += wanted * (batch_size - num_decoding)
        if batch_size * wanted <= num_rows:
            return batch_size * wanted / num_rows, steps
        most_fed, num_decoding = self.max_rows / (num_passes + 1 + wanted), max(num_decoding, 1.0)
        num_fed = min(most_fed, num_decoding)
        return 1.0, [(most_fed <= num_decoding, MixedSteps(1.0, num_fed, num_fed * wanted))]

    def _kind(self, has_prompts: bool) -> "StepKind":
        return StepKind(self.num_passes, has_prompts)

    def cost_ratio(self) -> float | None:
        """Measured price of one more draft, in steps that make none; None if not known yet.

        It is the slope between the median times at n = 0 and at the largest n with enough times.
        """
        medians = {
            num_drafts: median
            for num_drafts, times in self.step_seconds.items()
            if (median := times.median()) is not None
        }
        most = max(medians, default=0)
        if 0 not in medians or most == 0 or medians[0] <= 0:
            return None
        return max(medians[most] / medians[0] - 1.0, 0.0) / most


@dataclass
class MixedSteps:
    """Sums over recent steps with prompt rows, in which older ones count less."""

    weight: float = 0.0  # steps
    num_decoding: float = 0.0  # requests
    num_prompt_rows: float = 0.0

    def fade(self, factor: float) -> None:
        """Let what was seen count less."""
        self.weight *= factor
        self.num_decoding *= factor
        self.num_prompt_rows *= factor

    def add(self, *, num_decoding: int, num_prompt_rows: int) -> None:
        """Count a step."""
        self.weight += 1.0
        self.num_decoding += num_decoding
        self.num_prompt_rows += num_prompt_rows


class StepKind(NamedTuple):
    """Steps whose time follows from their size and number of drafts."""

    num_passes: int  # m
    has_prompts: bool  # the size is their rows; else their requests


@dataclass
class StepTimes:
    """What captured steps of every kind take, by size and number of drafts n.

    Steps take longer than their price: with 128 requests and texts of 128 to 300 tokens 12 %
    without drafts and 30 % with three (MiMo-7B's shape), with 32 requests 13 to 15 % whatever they
    draft (SmolLM2). By how much is the median of the latest of a kind and number. No step is
    shorter than what the host does in it, which grows with the requests.
    """

    # seconds, timed where steps were captured, with short texts; empty where nothing was
    prices: dict[StepKind, dict[int, dict[int, float]]] = field(default_factory=dict)
    # seconds that the host worked in the latest calls that started a step with prompt rows or none,
    # for each request, where a call itself counts as `_HOST_REQUESTS`
    host_seconds: dict[bool, LatestTimes] = field(default_factory=dict)
    num_noted: int = 0  # steps
    # what latest steps of a kind and number took in units of their price, or of what the host did
    # if that was more, and when the last ran
    overruns: dict[tuple[StepKind, int], LatestTimes] = field(default_factory=dict)
    last_noted: dict[tuple[StepKind, int], int] = field(default_factory=dict)

    def note(
        self, kind: StepKind, num_drafts: int, *, size: int, batch_size: int, seconds: float
    ) -> None:
        """Keep the time of a step that was replayed: none larger than those timed is."""
        price = self._prices(kind, size).get(num_drafts)
        if price is not None and size <= max(self.prices[kind]):
            key = kind, num_drafts
            if self._is_forgotten(key):
                self.overruns[key] = LatestTimes()
            self.num_noted += 1
            self.overruns[key].add(seconds / max(price, self._least(kind, batch_size)))
            self.last_noted[key] = self.num_noted

    def note_host(self, seconds: float, *, has_prompts: bool, batch_size: int) -> None:
        """Keep what the host did in a call that started a step."""
        times = self.host_seconds.setdefault(has_prompts, LatestTimes())
        times.add(seconds / (_HOST_REQUESTS + batch_size))

    def costs(self, kind: StepKind, *, batch_size: int) -> dict[int, float]:
        """Expected seconds by number of drafts without prompts; the price where none ran lately."""
        least = self._least(kind, batch_size)
        return {
            n: max(price * self._overrun((kind, n)), least)
            for n, price in self._prices(kind, batch_size).items()
        }

    def priced(self, kind: StepKind, *, batch_size: float, usual: float) -> dict[int, float]:
        """Seconds of steps without prompt rows by number of drafts, if all overrun as is usual."""
        least, prices = self._least(kind, batch_size), self._prices(kind, batch_size)
        return {n: max(price * usual, least) for n, price in prices.items()}

    def priced_beside_prompts(
        self,
        kind: StepKind,
        num_drafts: int,
        mean: "MixedSteps",
        *,
        most_rows: int | None,
        usual: float,
    ) -> float:
        """Mean seconds of steps with prompt rows that are like `mean` on the average.

        A step costs what the smallest bucket costs that holds it; above the largest, as much more
        as it is larger. Decoding rows are as many in each, and prompt rows vary: each further one
        has the same chance, up to `most_rows` in all. None: all steps are of one size.
        """
        num_rows, num_prompt_rows = mean.num_decoding * (num_drafts + 1), mean.num_prompt_rows
        largest = max(self.prices[kind])
        if most_rows is None:
            size = num_rows + num_prompt_rows
            price = self._prices(kind, round(size))[num_drafts] * max(size / largest, 1.0)
        else:

            def larger(size: float) -> float:
                """The chance that a step is larger."""
                return math.exp(min((num_rows - size) / num_prompt_rows, 0.0))

            price, chance = 0.0, 1.0  # that it is larger than the buckets so far
            for size, row in sorted(self.prices[kind].items()):
                price += (chance - larger(size)) * row[num_drafts]
                chance = larger(size)
            excess = max(num_rows - largest, 0.0)
            excess += num_prompt_rows * (chance - larger(max(most_rows, largest)))
            price += (chance + excess / largest) * self.prices[kind][largest][num_drafts]
        return max(price * usual, self._least(kind, mean.num_decoding + 1))  # one more reads

    def usual(self, kind: StepKind) -> float:
        """What the latest steps of a kind took in units as `overruns` has them; 1 if none did."""
        keys = [key for key in self.last_noted if key[0] == kind]
        return self._overrun(max(keys, key=self.last_noted.__getitem__)) if keys else 1.0

    def _least(self, kind: StepKind, batch_size: float) -> float:
        """What the host does in a step; where too few were seen, in one with prompts or without."""
        for has_prompts in (kind.has_prompts, not kind.has_prompts):
            times = self.host_seconds.get(has_prompts)
            if times is not None and (median := times.median()) is not None:
                return median * (_HOST_REQUESTS + batch_size)
        return 0.0

    def _overrun(self, key: tuple[StepKind, int]) -> float:
        if self._is_forgotten(key):
            return 1.0
        return self.overruns[key].median() or 1.0

    def _is_forgotten(self, key: tuple[StepKind, int]) -> bool:
        last = self.last_noted.get(key)
        return last is None or self.num_noted - last > _REMEMBERED_STEPS

    def _prices(self, kind: StepKind, size: float) -> dict[int, float]:
        """Of the smallest size that is not below this one, or of the largest."""
        prices = self.prices.get(kind)
        if not prices:
            return {}
        return prices[min((one for one in prices if one >= size), default=max(prices))]


NOT_DRAFTED = -2  # any id outside the vocabulary is rejected; this one was not even proposed
_PROBE_STEPS = 6  # steps in a row with the same number of drafts while costs are measured
_NUM_PROBES = 4  # runs of them: K, 0, K, 0
_LEAST_GAIN = 1.02  # for which the number of drafts changes, or more passes run again
_NO_PASS_GAIN = 1.06  # for which all passes are left out
_CHOICE_EVERY = 16  # steps; a choice of drafts in each would take the host 2 % of a short one
_FIRST_LOOKS = 8  # at passes; later every fourth is taken
_FADING_BATCH = 0.95  # a check, of the most requests that ran: a batch fills up within a few
_LEAST_ROUNDS = 512  # that made drafts, before passes are left out
_LOOKED_AT = 32  # texts that run, at most, where it matters how they differ
_ROUNDS_OF_ALL = 4.0  # as which the rates of all texts count among those of one
_LATEST_ROUNDS = 48  # of each of them
_PARTS_OF_A_DRAIN = 8  # into which the last rounds of a batch are cut


@runtime_checkable
class DraftLength(Protocol):
    """Decides how many drafts are made. `FixedLength` is the shortest example."""

    @property
    def keeps(self) -> "Callable[[Tensor], Tensor] | None":
        """Asked after every pass: make this draft and go on? None: always, and nobody asks.

        It maps the largest probability of the draft distribution at temperature 1, `[R]` float, NaN
        where the logits are not finite, to `[R]` bool.
        """
        ...

    def limits(self, num_speculative_tokens: int) -> Sequence[int]:
        """What `num_drafts` may answer for K, the usual one first: captured steps are for these."""
        ...

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """Most drafts of this step for each request, 0..K; computed from host values alone."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Always K drafts."""

    keeps = None

    def limits(self, num_speculative_tokens: int) -> Sequence[int]:
        """K alone."""
        return (num_speculative_tokens,)

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """K."""
        return recent.plan.num_speculative_tokens


@dataclass(frozen=True)
class ConfidenceLength:
    """Up to K drafts; a request stops before the first one whose probability is below `p_min`.

    Attributes:
        p_min: in [0, 1]; 0 never stops, above 1 would never draft.
    """

    p_min: float

    def __post_init__(self) -> None:
        if not (isinstance(self.p_min, int | float) and 0.0 <= self.p_min <= 1.0):
            raise ConfigError(
                f"spec.draft_p_min must be in [0, 1], got {self.p_min!r}; set spec.draft_p_min=0.3."
            )

    def limits(self, num_speculative_tokens: int) -> Sequence[int]:
        """K alone."""
        return (num_speculative_tokens,)

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """K."""
        return recent.plan.num_speculative_tokens

    def keeps(self, probability: "Tensor") -> "Tensor":
        """Whether the draft is probable enough."""
        return probability >= self.p_min


@dataclass(frozen=True)
class BatchTableLength:
    """A number of drafts by batch size: verification rows are free in small batches only.

    Attributes:
        table: (least batch size, drafts) pairs with rising sizes, the first of them 1, or a mapping
            of these. Entry i holds for batch sizes in `[table[i][0], table[i+1][0])`.
    """

    table: tuple[tuple[int, int], ...] | Mapping[int, int]
    keeps = None

    def __post_init__(self) -> None:
        try:
            pairs = self.table.items() if isinstance(self.table, Mapping) else self.table
            table = tuple((size, number) for size, number in pairs)
            sizes = [size for size, _ in table]
            rising = all(low < high for low, high in itertools.pairwise(sizes))
            is_legal = sizes[:1] == [1] and rising and min(n for _, n in table) >= 0
        except (TypeError, ValueError):  # no pairs of numbers
            table, is_legal = (), False
        if not is_legal:
            raise ConfigError(
                "spec.draft_table must map rising batch sizes, from 1 on, to drafts >= 0, got "
                f"{self.table}; set spec.draft_table={{1:3,32:1}}."
            )
        object.__setattr__(self, "table", table)

    def limits(self, num_speculative_tokens: int) -> Sequence[int]:
        """Every number of the table, none above K."""
        numbers = {min(number, num_speculative_tokens) for number in dict(self.table).values()}
        return sorted(numbers, reverse=True)

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """The number of the largest batch size that is reached; never above K."""
        entry = max(pair for pair in dict(self.table).items() if pair[0] <= max(batch_size, 1))
        return min(entry[1], recent.plan.num_speculative_tokens)


@dataclass(frozen=True)
class ExpectedGainLength:
    """The n in 0..K with the most expected tokens per cost, from what recent rounds accepted.

    With a_i the chance of draft i given that it is reached, a step that makes n drafts gives
    `1 + a_1 + a_1 a_2 + ... + a_1..a_n` tokens and costs `1 + c n` steps that make none. The
    chances come from `RecentRounds`: fading counts and a prior. Where captured steps were timed and
    decide, n is chosen in the first step of a batch and every 16 steps, else in every step.

    Attributes:
        cost_ratio: c, price of one more draft (its pass or logits, and its verification row) in
            units of a step that makes none, >= 0. None: as captured steps were timed by batch size
            and number (`RecentRounds.costs`); where none were, measured by the clock over the
            first decode steps, which alternate between K drafts and none for it.
    """

    cost_ratio: float | None = None
    keeps = None

    def __post_init__(self) -> None:
        ratio = self.cost_ratio
        if ratio is not None and not (isinstance(ratio, int | float) and ratio >= 0.0):
            raise ConfigError(
                f"spec.draft_cost_ratio must be >= 0, got {ratio!r}; "
                "set spec.draft_cost_ratio=null to measure it."
            )

    def limits(self, num_speculative_tokens: int) -> Sequence[int]:
        """K..0."""
        return range(num_speculative_tokens, -1, -1)

    def num_drafts(self, *, batch_size: int, recent: RecentRounds) -> int:
        """The best n, or K and none in turn while the price is measured."""
        is_priced = bool(recent.times.prices) and self.cost_ratio is None
        if is_priced and recent.num_passes < recent.plan.num_speculative_tokens:
            return recent.num_passes
        if is_priced and not recent.is_due:
            return recent.num_drafts
        chances = recent.counts.conditional_acceptance()
        numbers = range(len(chances) + 1)
        if self.cost_ratio is not None:
            return best_num_drafts(chances, costs=[1.0 + self.cost_ratio * n for n in numbers])
        if costs := recent.costs(batch_size):
            ordered = [costs[n] for n in numbers]
            return best_num_drafts(chances, costs=ordered, current=recent.num_drafts)
        run = recent.num_steps // _PROBE_STEPS
        measured = recent.cost_ratio()
        if run < _NUM_PROBES or measured is None:
            return 0 if run % 2 else recent.plan.num_speculative_tokens
        return best_num_drafts(chances, costs=[1.0 + measured * n for n in numbers])

    def num_passes(
        self,
        *,
        running: Sequence["Request"],
        waiting: Iterable["Request"],
        is_admitting: bool,
        recent: RecentRounds,
    ) -> int:
        """m, passes of a round that run from now on.

        Fewer where that pays while texts wait (`_fewer_passes`): a look at the beginning of a batch
        and every 16 steps, and after eight looks that changed nothing every 64. More again where
        that pays once half of the batch began without a queue (`_more_passes`). Nothing changes
        before 512 rounds have told what drafts are worth.

        Args:
            running: requests that run.
            waiting: requests that wait.
            is_admitting: whether a text begins in this step.
            recent: what was accepted, how long steps take, how often texts end, and who began
                without a queue.
        """
        kept = _FADING_BATCH if recent.is_due else 1.0
        recent.most_running = max(len(running), kept * recent.most_running)
        if recent.num_rounds < _LEAST_ROUNDS:
            return recent.num_passes
        is_less = recent.num_passes < recent.plan.num_speculative_tokens
        if is_less and is_admitting and 2 * recent.num_unqueued >= len(running):
            return _more_passes(running, recent)
        if recent.is_due and (requests := list(waiting)):
            recent.num_looks += 1
            if recent.num_looks <= _FIRST_LOOKS or recent.num_looks % 4 == 0:
                return _fewer_passes(running, requests, recent)
        return recent.num_passes


def _fading(half_life: float) -> float:
    return 0.5 ** (1.0 / half_life)


def _fewer_passes(
    running: Sequence["Request"], waiting: Sequence["Request"], recent: RecentRounds
) -> int:
    """As many passes as now, or the fewer that pay best while texts wait.

    Those left out are so for the requests that run now and for those that follow them; once nobody
    waits the batch drains, where other numbers pay. So fewer passes must take less time for all
    that is in sight: until the last text has begun, prompts included, in a batch as large as was
    seen, which may be filling up, and then until that batch has ended. All passes are left out for
    6 % alone: then nothing tells any more what drafts are worth.
    """
    now = recent.num_passes
    fewer = {kind.num_passes for kind in recent.times.prices if kind.num_passes < now}
    if not fewer:
        return now
    texts, rounds = TextsToCome.like(running, recent), tokens_a_round(running, recent)
    batch_size = min(len(running) + len(waiting), round(recent.most_running))
    most_tokens = sum(request.max_tokens - request.num_tokens for request in waiting) / len(waiting)
    to_begin = len(waiting) * texts.mean_length(most_tokens)
    before_drain = to_begin + texts.num_left(running) - batch_size * texts.mean_rest()
    # Texts that run may be younger than at a time at random.
    num_tokens = max(before_drain, to_begin / 2, 1.0)
    rows_a_token = sum(request.num_tokens for request in waiting) / num_tokens

    def seconds(num_passes: int) -> float:
        rate = recent.rate(num_passes, batch_size, rows_a_token=rows_a_token)
        taken = num_tokens / rate + texts.drain_seconds(num_passes, batch_size, rounds, recent)
        return taken if num_passes else taken * _NO_PASS_GAIN

    taken = {m: seconds(m) for m in (now, *fewer)}
    return min(taken, key=lambda m: (taken[m], -m))


@dataclass(frozen=True)
class TextsToCome:
    """Texts like those that run: each ends at any token with the same chance, or at its limit."""

    chance: float  # p, that a text ends at a token, > 0
    most_tokens: float  # M, the limit

    @classmethod
    def like(cls, running: Sequence["Request"], recent: RecentRounds) -> "TextsToCome":
        """With the mean limit of those that run."""
        most_tokens = statistics.fmean(one.max_tokens - one.num_prompt_tokens for one in running)
        most_tokens = max(most_tokens, 1.0)
        chance = recent.num_stopped / max(recent.output_tokens, 1.0)
        return cls(max(chance, 1e-6 / most_tokens), most_tokens)

    def mean_length(self, most_tokens: float) -> float:
        """Tokens that a text still gets which may have so many more."""
        return -math.expm1(-self.chance * most_tokens) / self.chance

    def mean_rest(self) -> float:
        """Tokens that a text lacks at a time at random."""
        return 1.0 / self.chance - self.most_tokens * (1.0 / self._ended - 1.0)

    def num_left(self, running: Sequence["Request"]) -> float:
        """Tokens that texts which run lack."""
        return sum(self.mean_length(one.max_tokens - one.num_tokens) for one in running)

    def drain_seconds(
        self,
        num_passes: int,
        batch_size: int,
        tokens_a_round: "NDArray[np.float64]",
        recent: RecentRounds,
    ) -> float:
        """Seconds of steps until a batch has ended each of whose texts is at a time at random.

        Texts differ in the tokens that a round makes, `[S, K+1]` by the number of drafts: at the
        end of a batch the slow ones are left. They make the n that is best in half of the batch.
        """
        import numpy as np

        times, kind = recent.times, StepKind(num_passes, False)
        usual = times.usual(StepKind(recent.num_passes, False))
        costs = times.priced(kind, batch_size=max(batch_size // 2, 1), usual=usual)
        n = _best_for_cost(tokens_a_round.mean(axis=0).tolist(), costs)
        tokens = tokens_a_round[:, n]
        # Behind so many tokens a batch has at most a fourth of a text left.
        last = min(self.most_tokens, math.log(4 * batch_size) / self.chance)
        num_rounds = last / tokens.min()
        rounds = num_rounds * (np.arange(_PARTS_OF_A_DRAIN) + 0.5) / _PARTS_OF_A_DRAIN
        left = (np.exp(-self.chance * np.outer(rounds, tokens)) - 1.0) / self._ended + 1.0
        shares = left.clip(0.0).mean(axis=1)  # of the texts, after so many rounds
        goes_on = 1.0 - (1.0 - shares) ** batch_size  # the chance that any is left
        sizes = batch_size * shares / np.maximum(goes_on, 1e-9)
        seconds = [times.priced(kind, batch_size=size, usual=usual)[n] for size in sizes.tolist()]
        return num_rounds / _PARTS_OF_A_DRAIN * float(goes_on @ seconds)

    @property
    def _ended(self) -> float:
        """Share of the texts that end before their limit."""
        return -math.expm1(-self.chance * self.most_tokens)


def tokens_a_round(running: Sequence["Request"], recent: RecentRounds) -> "NDArray[np.float64]":
    """Tokens that a round makes of at most 32 of these texts, by the number of drafts, `[S, K+1]`.

    By their latest 48 rounds, and four more with the rates of all texts: for one that has just
    begun nothing else is known.
    """
    import numpy as np

    looked_at = running[:: -(-len(running) // _LOOKED_AT)]
    num_drafts = recent.plan.num_speculative_tokens
    most = [min(one.num_full_passes, num_drafts) for one in looked_at]
    made = _counts([one.num_drafted_per_round for one in looked_at], most, num_drafts)
    accepted = _counts([one.num_accepted_per_round for one in looked_at], most, num_drafts)
    # Rounds that made draft 1..K at least, and those that accepted it.
    made, accepted = (counts[:, :0:-1].cumsum(axis=1)[:, ::-1] for counts in (made, accepted))
    chances = recent.lasting_counts.conditional_acceptance()
    rates = (accepted + _ROUNDS_OF_ALL * np.cumprod(chances)) / (made + _ROUNDS_OF_ALL)
    tokens = np.ones((len(looked_at), num_drafts + 1))
    tokens[:, 1:] += rates.cumsum(axis=1)
    return tokens


def _counts(
    rounds: Sequence[Sequence[int]], most: Sequence[int], num_drafts: int
) -> "NDArray[np.int64]":
    """How many of the latest rounds of each text have 0..K, `[S, K+1]`; no more than `most` count.

    Drafts of passes that did not run from a text's first round on tell nothing of others.
    """
    import numpy as np

    latest = [one[-_LATEST_ROUNDS:] for one in rounds]
    lengths = [len(one) for one in latest]
    numbers = np.frombuffer(bytes(itertools.chain.from_iterable(latest)), np.uint8)
    numbers = np.minimum(numbers, np.repeat(most, lengths))
    rows = np.repeat(np.arange(len(latest)) * (num_drafts + 1), lengths)
    counts = np.bincount(rows + numbers, minlength=len(latest) * (num_drafts + 1))
    return counts.reshape(len(latest), num_drafts + 1)


def _more_passes(running: Sequence["Request"], recent: RecentRounds) -> int:
    """As many passes as now, or the more that pay best if texts go on to come as of late.

    Those that run lack the draft KV of more passes and gain nothing, so it is for a time in which
    half of the batch began without a queue: the last prompts of many are few.
    """
    now = recent.num_passes
    texts = TextsToCome.like(running, recent)
    length = texts.mean_length(texts.most_tokens)
    rows_a_token = recent.unqueued_tokens / (recent.num_unqueued * length)
    rates = {
        m: recent.rate(m, len(running), rows_a_token=rows_a_token)
        for m in {kind.num_passes for kind in recent.times.prices}
        if m >= now
    }
    best = max(rates, key=lambda m: (rates[m], -m), default=now)
    return best if best > now and rates[best] >= _LEAST_GAIN * rates[now] else now


def _best_for_cost(tokens: Sequence[float], costs: Mapping[int, float]) -> int:
    """The n with the most tokens for its cost; the smallest of equals."""
    return max(costs, key=lambda n: (tokens[n] / costs[n], -n))


def expected_tokens(conditional_acceptance: list[float]) -> list[float]:
    """Tokens of a step that makes 0..K drafts, the bonus included; arguments as below."""
    reach = itertools.accumulate(conditional_acceptance, lambda left, right: left * right)
    return list(itertools.accumulate(reach, initial=1.0))


def best_num_drafts(
    conditional_acceptance: list[float], *, costs: Sequence[float], current: int | None = None
) -> int:
    """The n that maximises expected tokens per cost; the smallest of equals.

    Args:
        conditional_acceptance: chance of draft 1..K, given that all before it are accepted.
        costs: of a step that makes 0..K drafts, in any unit, > 0.
        current: what steps make now; it stays unless another n is 2 % better, since the step in
            which the number changes verifies fewer drafts than it pays for.

    Example:
        chances (0.8, 0.5), costs 1, 1.2, 1.4: n = 0 gives 1 token per step, n = 1 gives
        1.8 / 1.2 = 1.5, n = 2 gives 2.2 / 1.4 = 1.57, so 2.
    """
    tokens = expected_tokens(conditional_acceptance)
    rates = [total / cost for total, cost in zip(tokens, costs, strict=True)]
    best = max(range(len(rates)), key=lambda n: (rates[n], -n))
    stays = current is not None and rates[best] < _LEAST_GAIN * rates[current]
    return cast(int, current) if stays else best
