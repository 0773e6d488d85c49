"""The draft-KV auditor: does every slot hold what a recompute of the policy would put there?

It watches the rows of each pass as symbols (which tokens a row consumed, which kind of hidden
vector it read) and compares slots `<= p` of every module with the committed text:

    WRONG        a consumed token differs from the committed text
    MIXED        tokens right, but the hidden vector is a draft's although the target's is known
    HOLE         never written by that module
    PROVISIONAL  depends on tokens that are not committed yet; normal

What a step wrote is copied to the host once, when its round ends, and only where a watched request
took part: `num_requests_per_watched` = n watches about one request in n, chosen by a hash of its id
so that equal runs watch equal requests. A watched request is watched in every step, so its counts
are exact.

The clean policies report 0 WRONG, 0 MIXED, 0 HOLE on any history; `policy.simulate` counts the
faults of the others.

Letters: K drafts per step, p frontier row, q slot, m draft step.
"""

import functools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar, cast

import numpy as np
from torch import Tensor

from mtp_research.policy.fields import HiddenPolicy
from mtp_research.policy.plan import DraftPlan, HiddenKind, PassPlan

Check = TypeVar("Check", bound=Callable[..., None])


class Verdict(StrEnum):
    """State of one slot of one module; clean slots have none."""

    WRONG = "WRONG"
    MIXED = "MIXED"
    HOLE = "HOLE"
    PROVISIONAL = "PROVISIONAL"

    def __repr__(self) -> str:
        """The word alone, so that a Counter of verdicts reads as a table."""
        return self.value


FAULTS = (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)


@dataclass
class SlotLog:
    """What the draft KV layers hold for one request; L layers."""

    consumed: np.ndarray  # `[L, capacity, K]` int64, tokens of each slot, -1 for none
    # `[L, capacity]` int8, 1 for a draft's hidden vector, 0 for another, -1 for a hole
    from_draft: np.ndarray

    @classmethod
    def empty(cls, num_layers: int, num_speculative_tokens: int) -> "SlotLog":
        """A log without slots."""
        return cls(
            np.full((num_layers, 0, num_speculative_tokens), -1, dtype=np.int64),
            np.full((num_layers, 0), -1, dtype=np.int8),
        )

    def reserve(self, capacity: int) -> None:
        """Make room for slots `[0, capacity)`; new ones are holes."""
        missing = capacity - self.from_draft.shape[1]
        if missing > 0:
            missing += capacity  # grow geometrically
            more = ((0, 0), (0, missing))
            self.consumed = np.pad(self.consumed, (*more, (0, 0)), constant_values=-1)
            self.from_draft = np.pad(self.from_draft, more, constant_values=-1)


def judge_slots(
    log: SlotLog,
    *,
    policy: HiddenPolicy,
    decisive: np.ndarray,
    text: np.ndarray,
    first: int,
    frontier: int,
) -> np.ndarray:
    """Which of the slots `[first, frontier]` get a verdict, `[verdicts, L, slots]` bool.

    `text` begins at slot `first`; `decisive` as `_decisive_columns`. All layers at once, as this
    is what an audited round waits for.
    """
    slots = np.arange(first, frontier + 1)
    consumed, kind = log.consumed[:, first : frontier + 1], log.from_draft[:, first : frontier + 1]
    num_layers, num_columns = decisive.shape
    shift = np.arange(num_columns) if policy.shift_tokens else 0
    wanted = slots[:, None] - first + 1 + shift
    known = wanted < len(text)
    expected = text[np.minimum(wanted, len(text) - 1)]
    decisive = decisive[:, None]
    hole = kind < 0
    wrong = ~hole & (decisive & known & (consumed != expected)).any(axis=-1)
    provisional = ~hole & ~wrong & (decisive & ~known).any(axis=-1)
    # A window row should hold H_{q+m}, which is known once row q+m is verified.
    offset = np.arange(num_layers)[:, None] if policy.hidden == "shifted_target" else 0
    is_draft_made = (kind == 1) & (slots + offset <= frontier)
    mixed = ~hole & ~wrong & ~provisional & is_draft_made
    return np.stack((wrong, mixed, hole, provisional))


def _decisive_columns(policy: HiddenPolicy, *, num_layers: int, num_columns: int) -> np.ndarray:
    """Columns of `consumed` that decide whether a row of a layer is right, `[L, K]` bool."""
    if not policy.shift_tokens:
        return np.tile(np.arange(num_columns) == 0, (num_layers, 1))
    if policy.hidden == "chain":
        return np.tri(num_layers, num_columns, dtype=bool)
    return np.eye(num_layers, num_columns, dtype=bool)


def _timed(check: Check) -> Check:
    """Count what a method of the auditor takes in `seconds`."""

    @functools.wraps(check)
    def timed(self: "Auditor", *args: object, **kwargs: object) -> None:
        started = time.perf_counter()
        check(self, *args, **kwargs)
        self.seconds += time.perf_counter() - started

    return cast(Check, timed)


class _Written(NamedTuple):
    """One pass as it was run, still on the device."""

    plan: PassPlan
    token_ids: Tensor
    request_ids: Sequence[str | None]  # None: the request has ended or was preempted since


@dataclass(repr=False)
class Auditor:
    """Symbolic shadow of the draft KV layers."""

    plan: DraftPlan  # what is being run
    num_requests_per_watched: int = 1  # n, about one request in n is watched, >= 1
    num_requests: int = 0  # watched requests that ended
    num_rounds: int = 0  # drafting rounds checked
    num_dirty_rounds: int = 0  # rounds after which some checked slot was WRONG, MIXED or HOLE
    # per layer, verdict counts over all slots <= p of finished watched requests
    totals: list[Counter] = field(default_factory=list)
    num_slots: int = 0  # slots counted in `totals`, per layer
    seconds: float = 0.0  # of its own work; on a GPU also of waiting for the rows that it reads
    _logs: dict[str, SlotLog] = field(default_factory=dict, repr=False)
    _blocks: dict[int, SlotLog] = field(default_factory=dict, repr=False)
    _left_out: set[str] = field(default_factory=set, repr=False)
    _previous: np.ndarray | None = field(default=None, repr=False)
    _pending: list[_Written | None] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        num_layers, num_columns = self.plan.num_kv_layers, self.plan.num_speculative_tokens
        self.totals = [Counter() for _ in range(num_layers)]
        self._decisive = _decisive_columns(
            self.plan.policy, num_layers=num_layers, num_columns=num_columns
        )

    def __repr__(self) -> str:
        """One line: the counts over all layers."""
        total = sum(self.totals, Counter())
        counts = ", ".join(f"{total[verdict]} {verdict}" for verdict in FAULTS)
        return f"Auditor({counts} in {self.num_slots} slots of {len(self.totals)} layers)"

    def watches(self, request_id: str) -> bool:
        """Whether this request is among the watched ones."""
        is_chosen = zlib.crc32(request_id.encode()) % self.num_requests_per_watched == 0
        return is_chosen and request_id not in self._left_out

    def record(self, plan: PassPlan, *, token_ids: Tensor, request_ids: list[str]) -> None:
        """Note what a pass writes; nothing is copied to the host before `apply_step`."""
        if any(self.watches(request_id) for request_id in request_ids):
            self._pending.append(_Written(plan, token_ids, request_ids))

    @_timed
    def end_round(self, request_id: str, token_ids: list[int], *, frontier: int) -> None:
        """Check the slots a round can have touched (the last 2K + 2) and count the round."""
        if not self.watches(request_id):
            return
        first = max(0, frontier - 2 * self.plan.num_speculative_tokens - 1)
        judged = self._judge(request_id, token_ids, frontier=frontier, first=first)
        self.num_rounds += 1
        self.num_dirty_rounds += bool(judged[: len(FAULTS)].any())

    @_timed
    def finish(self, request_id: str, token_ids: list[int], *, frontier: int) -> None:
        """Count every slot <= p of a watched request that ends, and forget it."""
        if frontier < 0 or not self.watches(request_id):
            self.forget(request_id)
            return
        for total, count in zip(
            self.totals, self.inspect(request_id, token_ids, frontier=frontier), strict=True
        ):
            total.update(count)
        self.num_slots += frontier + 1
        self.num_requests += 1
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the log of a request whose pages were freed, and what a step in flight wrote for it.

        The id is free from here on: what was recorded under it must not reach its next owner.
        """
        self._logs.pop(request_id, None)
        self._left_out.discard(request_id)
        for index, written in enumerate(self._pending):
            if written is not None and request_id in written.request_ids:
                names = [None if name == request_id else name for name in written.request_ids]
                self._pending[index] = written._replace(request_ids=names)

    def keep_block(self, block_id: int, *, request_id: str, first_slot: int, size: int) -> None:
        """Keep the log of `size` slots of a request as that of a cached block."""
        self._blocks.pop(block_id, None)
        if self.watches(request_id):
            slots = slice(first_slot, first_slot + size)
            log = self._log(request_id, slots.stop)
            self._blocks[block_id] = SlotLog(
                log.consumed[:, slots].copy(), log.from_draft[:, slots].copy()
            )

    def take_blocks(self, request_id: str, block_ids: Sequence[int], *, size: int) -> None:
        """A request starts with cached blocks: their logs are checked against its own text.

        A request that takes a block of one that was not watched is not watched either.
        """
        if not all(block_id in self._blocks for block_id in block_ids):
            self._left_out.add(request_id)
        if not self.watches(request_id):
            return
        for index, block_id in enumerate(block_ids):
            slots, kept = slice(index * size, (index + 1) * size), self._blocks[block_id]
            log = self._log(request_id, slots.stop)
            log.consumed[:, slots] = kept.consumed
            log.from_draft[:, slots] = kept.from_draft

    def inspect(
        self, request_id: str, token_ids: list[int], *, frontier: int, first: int = 0
    ) -> list[Counter]:
        """Verdict counts per layer over slots `[first, frontier]`."""
        judged = self._judge(request_id, token_ids, frontier=frontier, first=first)
        return [Counter(dict(zip(Verdict, of, strict=True))) for of in judged.sum(-1).T.tolist()]

    def _judge(
        self, request_id: str, token_ids: list[int], *, frontier: int, first: int
    ) -> np.ndarray:
        return judge_slots(
            self._log(request_id, frontier + 1),
            policy=self.plan.policy,
            decisive=self._decisive,
            # A round looks at its last slots only, so that its cost does not grow with the text.
            text=np.asarray(token_ids[first:], dtype=np.int64),
            first=first,
            frontier=frontier,
        )

    def end_step(self) -> None:
        """The passes recorded from here on belong to the next step."""
        self._pending.append(None)

    @_timed
    def apply_step(self) -> None:
        """Write the passes of the oldest step that was not applied into the logs.

        With deferred output the next step has been recorded before the host looks at this one.
        """
        while self._pending and (written := self._pending.pop(0)) is not None:
            self._apply(written)

    def drop_steps(self) -> None:
        """Forget the steps that were not applied."""
        self._pending.clear()

    def _apply(self, written: _Written) -> None:
        plan, policy = written.plan, self.plan.policy
        num_drafts = self.plan.num_speculative_tokens
        tokens = np.full((len(plan.position), num_drafts), -1, dtype=np.int64)
        column = plan.draft_step if policy.shift_tokens else 0
        if policy.hidden == "chain" and plan.draft_step > 0:
            assert self._previous is not None, "a chain pass follows a pass"
            tokens[:] = self._previous
        tokens[:, column] = written.token_ids.cpu().numpy()
        self._previous = tokens
        writes = plan.writes.cpu().numpy()
        first_row = plan.layout.query_start_loc.tolist()
        position = plan.position.cpu().numpy()
        from_draft = plan.hidden_kind.cpu().numpy() == HiddenKind.DRAFT
        for row, request_id in enumerate(written.request_ids):
            rows = slice(first_row[row], first_row[row + 1])
            mine, slots = writes[rows], position[rows][writes[rows]]
            if len(slots) and request_id is not None and self.watches(request_id):
                log = self._log(request_id, int(slots[-1]) + 1)
                log.consumed[plan.kv_layer, slots] = tokens[rows][mine]
                log.from_draft[plan.kv_layer, slots] = from_draft[rows][mine]

    def _log(self, request_id: str, capacity: int) -> SlotLog:
        if (log := self._logs.get(request_id)) is None:
            sizes = self.plan.num_kv_layers, self.plan.num_speculative_tokens
            log = self._logs[request_id] = SlotLog.empty(*sizes)
        log.reserve(capacity)
        return log
