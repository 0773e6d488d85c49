"""The matrix of heads x decode policy over some conditions, for each setting they share.

Conditions that differ in any part of `Setting`, such as target, prompts, K or machine, never meet
in one matrix. Letters: K drafts per step, N MTP modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_research.evaluation.entries import Entry, Setting, drafting
from mtp_research.evaluation.figures import PROMPT_INTERVAL
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.tables import Grid, interval, printable
from mtp_research.policy.plan import MATCHING_POLICY

_MAX_TARGET, _MAX_TEXT = 48, 80  # characters


@dataclass(frozen=True)
class PolicyMatrix:
    """One row per head, one column per policy; None where it was not decoded.

    Attributes:
        setting: what all cells share.
        rows: names of the heads.
        columns: policies.
        cells: entries by row and column.
    """

    setting: Setting
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[Entry | None, ...], ...]

    @property
    def title(self) -> str:
        """What is shown."""
        return "Acceptance length by head and decode policy"

    @property
    def note(self) -> str:
        """What the cells share, what their intervals are, and what a frame means."""
        framed = " Framed: the policy that shows the head what it was trained on."
        shown = f"{describe(self.setting)}. Below each value: {PROMPT_INTERVAL}"
        return f"{shown}{framed if self.matches else ''}"

    @property
    def values(self) -> list[list[Estimate]]:
        """Acceptance lengths (micro)."""
        return [
            [
                Estimate(None) if e is None else e.summary.acceptance.acceptance_length_micro
                for e in row
            ]
            for row in self.cells
        ]

    @property
    def matches(self) -> set[tuple[int, int]]:
        """(row, column) of the cells whose policy matches the training unroll of their head."""
        return {
            (j, i)
            for j, row in enumerate(self.cells)
            for i, entry in enumerate(row)
            if entry and MATCHING_POLICY.get(entry.unroll or "") == entry.summary.policy
        }

    @property
    def grid(self) -> Grid:
        """Acceptance lengths (micro) with their intervals."""
        rows = [
            (name, *map(interval, row)) for name, row in zip(self.rows, self.values, strict=True)
        ]
        return Grid(
            f"{self.title} ({describe(self.setting)})", ("head", *self.columns), tuple(rows)
        )


def policy_matrices(entries: Sequence[Entry]) -> list[PolicyMatrix]:
    """A matrix for every setting that at least two heads share, in the order of the entries."""
    by_setting: dict[Setting, list[Entry]] = {}
    for entry in drafting(entries):
        if entry.summary.policy is not None:  # `oracle` and `null` draft without one
            by_setting.setdefault(entry.setting, []).append(entry)
    made = [_matrix(setting, members) for setting, members in by_setting.items()]
    return [matrix for matrix in made if len(matrix.rows) > 1]


def describe(setting: Setting, *, without: str = "") -> str:
    """A setting in words, the part `without` left out."""
    parts = {
        "num_speculative_tokens": f"K={setting.num_speculative_tokens}",
        "prompts_sha256": f"{setting.num_prompts} prompts {setting.prompts_sha256[:8]}",
        "target": f"target {printable(setting.target, limit=_MAX_TARGET)}",
        "dtype": printable(setting.dtype),
        "temperature": f"T={printable(setting.temperature)}",
        "verify": f"{printable(setting.verify)} verification",
        "draft_sampling": f"{printable(setting.draft_sampling)} drafts",
        "batch_size": f"batch {printable(setting.batch_size)}",
        "text": printable(setting.text, limit=_MAX_TEXT),
        "machine": printable(setting.machine, limit=_MAX_TEXT),
    }
    left_out = {without, "verify"} if without == "temperature" else {without}
    left_out |= set() if setting.target else {"target"}
    # A blanked part differs between the conditions that are described together.
    left_out |= {"prompts_sha256"} if not setting.num_prompts else set()
    left_out |= {"num_speculative_tokens"} if not setting.num_speculative_tokens else set()
    return ", ".join(text for part, text in parts.items() if part not in left_out)


def told_apart(descriptions: Sequence[str]) -> list[str]:
    """The parts of each description that not all share, such as `, batch 4`; a lone one has none.

    Args:
        descriptions: by `describe`.
    """
    parts = [description.split(", ") for description in descriptions]
    shared = set(parts[0]).intersection(*parts) if parts else set()
    return ["".join(f", {part}" for part in own if part not in shared) for own in parts]


def _matrix(setting: Setting, members: Sequence[Entry]) -> PolicyMatrix:
    columns = sorted({str(entry.summary.policy) for entry in members})
    cells = {(_row(entry), str(entry.summary.policy)): entry for entry in members}
    heads = {_row(entry): entry.head_label for entry in members}
    shown = list(heads.values())
    return PolicyMatrix(
        setting=setting,
        # Two runs with heads of one kind, such as two seeds, are told apart by the run.
        rows=tuple(
            label if shown.count(label) == 1 else printable(f"{label}, {run}")
            for (run, _), label in heads.items()
        ),
        columns=tuple(map(printable, columns)),
        cells=tuple(tuple(cells.get((head, column)) for column in columns) for head in heads),
    )


def _row(entry: Entry) -> tuple[str, str]:
    return entry.run.name, entry.head_label
