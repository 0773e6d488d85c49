"""The draft-KV auditor: does every slot hold what a recompute of the policy would put there?

It watches the rows of each pass as symbols (which tokens a row consumed, which kind of hidden
vector it read) and compares slots `<= p` of every module with the committed text:

    WRONG        a consumed token differs from the committed text
    MIXED        tokens right, but the hidden vector is a draft's although the target's is known
    HOLE         never written by that module
    PROVISIONAL  depends on tokens that are not committed yet; normal

The clean policies report 0 WRONG, 0 MIXED, 0 HOLE on any history. The others, priced:

    python -m mtp_research.decode.audit --policy window --k 3 --accept 0.8 --rounds 20000 --seed 0

Letters: K drafts per step, p frontier row, m draft step.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from torch import Tensor

from mtp_research.policy import HiddenKind, HiddenPolicy, PassPlan


class Verdict(StrEnum):
    """State of one slot of one module; clean slots have none."""

    WRONG = "WRONG"
    MIXED = "MIXED"
    HOLE = "HOLE"
    PROVISIONAL = "PROVISIONAL"


@dataclass
class _LayerLog:
    """What one draft KV layer holds for one request.

    Attributes:
        consumed: `[capacity, K]` int64, tokens of each slot, -1 for none.
        from_draft: `[capacity]` int8, 1 for a draft's hidden vector, 0 for another, -1 for a hole.
    """

    consumed: np.ndarray
    from_draft: np.ndarray


@dataclass
class Auditor:
    """Symbolic shadow of the draft KV layers.

    Attributes:
        policy: what is being run.
        num_speculative_tokens: K.
        num_kv_layers: draft layers.
        num_rounds: drafting rounds checked.
        num_dirty_rounds: rounds after which some checked slot was WRONG, MIXED or HOLE.
        totals: per layer, verdict counts over all slots <= p of finished requests.
        num_slots: slots counted in `totals`, per layer.
    """

    policy: HiddenPolicy
    num_speculative_tokens: int
    num_kv_layers: int
    num_rounds: int = 0
    num_dirty_rounds: int = 0
    totals: list[Counter] = field(default_factory=list)
    num_slots: int = 0
    _logs: dict[str, list[_LayerLog]] = field(default_factory=dict, repr=False)
    _previous: np.ndarray | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """One counter a layer."""
        self.totals = [Counter() for _ in range(self.num_kv_layers)]

    def record(self, plan: PassPlan, *, token_ids: Tensor, request_ids: list[str]) -> None:
        """Note what a pass writes.

        Args:
            plan: the executed plan.
            token_ids: `[T]` tokens its rows consumed.
            request_ids: ids of the batch rows.
        """
        tokens = np.full((len(plan.position), self.num_speculative_tokens), -1, dtype=np.int64)
        column = plan.draft_step if self.policy.shift_tokens else 0
        if self.policy.hidden == "chain" and plan.draft_step > 0:
            assert self._previous is not None, "a chain pass follows a pass"
            tokens[:] = self._previous
        tokens[:, column] = token_ids.cpu().numpy()
        self._previous = tokens
        writes = plan.writes.cpu().numpy()
        first_row = plan.query_start_loc.tolist()
        position = plan.position.cpu().numpy()
        from_draft = plan.hidden_kind.cpu().numpy() == HiddenKind.DRAFT
        for row, request_id in enumerate(request_ids):
            rows = slice(first_row[row], first_row[row + 1])
            mine, slots = writes[rows], position[rows][writes[rows]]
            if len(slots):
                log = self._log(request_id, plan.kv_layer, int(slots[-1]) + 1)
                log.consumed[slots] = tokens[rows][mine]
                log.from_draft[slots] = from_draft[rows][mine]

    def end_round(self, request_id: str, token_ids: list[int], *, frontier: int) -> None:
        """Check the slots a round can have touched (the last 2K + 2) and count the round."""
        first = max(0, frontier - 2 * self.num_speculative_tokens - 1)
        counts = self.inspect(request_id, token_ids, frontier=frontier, first=first)
        faults = sum(
            count[verdict]
            for count in counts
            for verdict in (Verdict.WRONG, Verdict.MIXED, Verdict.HOLE)
        )
        self.num_rounds += 1
        self.num_dirty_rounds += faults > 0

    def finish(self, request_id: str, token_ids: list[int], *, frontier: int) -> None:
        """Count every slot <= p of a request that ends, and forget it."""
        for total, count in zip(
            self.totals, self.inspect(request_id, token_ids, frontier=frontier), strict=True
        ):
            total.update(count)
        self.num_slots += frontier + 1
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Drop the log of a request whose pages were freed."""
        self._logs.pop(request_id, None)

    def inspect(
        self, request_id: str, token_ids: list[int], *, frontier: int, first: int = 0
    ) -> list[Counter]:
        """Verdict counts per layer over slots `[first, frontier]`."""
        # A round looks at its last slots only, so that its cost does not grow with the text.
        text = np.asarray(token_ids[first:], dtype=np.int64)
        slots = np.arange(first, frontier + 1)
        return [
            self._inspect_layer(self._log(request_id, layer, frontier + 1), layer, text, slots)
            for layer in range(self.num_kv_layers)
        ]

    def _inspect_layer(
        self, log: _LayerLog, layer: int, text: np.ndarray, slots: np.ndarray
    ) -> Counter:
        """Verdict counts of `slots`; `text` starts at the first of them."""
        columns = self._columns(layer)
        consumed = log.consumed[slots][:, columns]
        shift = np.asarray(columns) if self.policy.shift_tokens else 0
        wanted = slots[:, None] - slots[0] + 1 + shift
        known = wanted < len(text)
        expected = text[np.minimum(wanted, len(text) - 1)]
        hole = log.from_draft[slots] < 0
        wrong = ~hole & (known & (consumed != expected)).any(axis=1)
        provisional = ~hole & ~wrong & (~known).any(axis=1)
        # A window row should hold H_{q+m}, which is known once row q+m is verified.
        offset = layer if self.policy.hidden == "shifted_target" else 0
        mixed = (
            ~hole
            & ~wrong
            & ~provisional
            & (log.from_draft[slots] == 1)
            & (slots + offset <= slots[-1])
        )
        counts = {
            Verdict.WRONG: wrong,
            Verdict.MIXED: mixed,
            Verdict.HOLE: hole,
            Verdict.PROVISIONAL: provisional,
        }
        return Counter({verdict: int(mask.sum()) for verdict, mask in counts.items()})

    def _columns(self, layer: int) -> list[int]:
        """Columns of `consumed` that decide whether a row of this layer is right."""
        if not self.policy.shift_tokens:
            return [0]
        return list(range(layer + 1)) if self.policy.hidden == "chain" else [layer]

    def _log(self, request_id: str, layer: int, capacity: int) -> _LayerLog:
        logs = self._logs.setdefault(
            request_id,
            [
                _LayerLog(
                    np.full((0, self.num_speculative_tokens), -1, dtype=np.int64),
                    np.full(0, -1, dtype=np.int8),
                )
                for _ in range(self.num_kv_layers)
            ],
        )
        log = logs[layer]
        missing = capacity - len(log.from_draft)
        if missing > 0:
            missing += capacity  # grow geometrically
            log.consumed = np.pad(log.consumed, ((0, missing), (0, 0)), constant_values=-1)
            log.from_draft = np.pad(log.from_draft, (0, missing), constant_values=-1)
        return log


if __name__ == "__main__":
    # The simulation runs the loop's row plan on symbols; the auditor itself needs none of it.
    from mtp_research.decode.simulate import main

    raise SystemExit(main())
