"""What a slot of the draft KV should hold, compared with what was written there; see `audit`.

Letters: K drafts per step, p frontier row, q slot, m draft step.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mtp_research.policy import HiddenPolicy


class Verdict(StrEnum):
    """State of one slot of one module; clean slots have none."""

    WRONG = "WRONG"
    MIXED = "MIXED"
    HOLE = "HOLE"
    PROVISIONAL = "PROVISIONAL"


@dataclass
class LayerLog:
    """What one draft KV layer holds for one request.

    Attributes:
        consumed: `[capacity, K]` int64, tokens of each slot, -1 for none.
        from_draft: `[capacity]` int8, 1 for a draft's hidden vector, 0 for another, -1 for a hole.
    """

    consumed: np.ndarray
    from_draft: np.ndarray

    @classmethod
    def empty(cls, num_speculative_tokens: int) -> "LayerLog":
        """A log without slots."""
        return cls(
            np.full((0, num_speculative_tokens), -1, dtype=np.int64), np.full(0, -1, dtype=np.int8)
        )

    def reserve(self, capacity: int) -> None:
        """Make room for slots `[0, capacity)`; new ones are holes."""
        missing = capacity - len(self.from_draft)
        if missing > 0:
            missing += capacity  # grow geometrically
            self.consumed = np.pad(self.consumed, ((0, missing), (0, 0)), constant_values=-1)
            self.from_draft = np.pad(self.from_draft, (0, missing), constant_values=-1)


def judge_layer(
    log: LayerLog, *, policy: HiddenPolicy, layer: int, text: np.ndarray, slots: np.ndarray
) -> Counter:
    """Verdict counts of some slots of one layer.

    Args:
        log: what was written.
        policy: what was run.
        layer: KV layer, 0-based among the draft layers.
        text: committed tokens from position `slots[0]` on, int64.
        slots: rising run of slots that ends at the frontier p, int64.
    """
    columns = _columns(policy, layer)
    consumed = log.consumed[slots][:, columns]
    shift = np.asarray(columns) if policy.shift_tokens else 0
    wanted = slots[:, None] - slots[0] + 1 + shift
    known = wanted < len(text)
    expected = text[np.minimum(wanted, len(text) - 1)]
    hole = log.from_draft[slots] < 0
    wrong = ~hole & (known & (consumed != expected)).any(axis=1)
    provisional = ~hole & ~wrong & (~known).any(axis=1)
    # A window row should hold H_{q+m}, which is known once row q+m is verified.
    offset = layer if policy.hidden == "shifted_target" else 0
    is_draft_made = (log.from_draft[slots] == 1) & (slots + offset <= slots[-1])
    mixed = ~hole & ~wrong & ~provisional & is_draft_made
    counts = {
        Verdict.WRONG: wrong,
        Verdict.MIXED: mixed,
        Verdict.HOLE: hole,
        Verdict.PROVISIONAL: provisional,
    }
    return Counter({verdict: int(mask.sum()) for verdict, mask in counts.items()})


def _columns(policy: HiddenPolicy, layer: int) -> list[int]:
    """Columns of `consumed` that decide whether a row of this layer is right."""
    if not policy.shift_tokens:
        return [0]
    return list(range(layer + 1)) if policy.hidden == "chain" else [layer]
