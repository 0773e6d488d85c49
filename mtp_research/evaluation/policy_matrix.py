"""The matrix train unroll x decode policy over several runs, for each setting they share.

Runs that differ in prompts, K, dtype, temperature, verification rule or batch size never meet in
one matrix. Letters: K drafts per step, N MTP modules.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_research.evaluation.runs import Entry, Setting
from mtp_research.evaluation.summary import ConditionSummary
from mtp_research.evaluation.tables import UNDEFINED, Grid, interval, printable


@dataclass(frozen=True)
class PolicyMatrix:
    """One row per run, one column per condition label; None where a run has no such condition."""

    setting: Setting
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[tuple[ConditionSummary | None, ...], ...]

    @property
    def title(self) -> str:
        """What the rows share."""
        return f"Acceptance length by head and decode policy ({describe(self.setting)})"

    @property
    def values(self) -> list[list[float | None]]:
        """Acceptance lengths (micro)."""
        return [
            [None if s is None else s.acceptance.acceptance_length_micro.value for s in row]
            for row in self.cells
        ]

    @property
    def grid(self) -> Grid:
        """Acceptance lengths (micro) with their intervals."""
        rows = [
            (name, *(UNDEFINED if s is None else _length(s) for s in row))
            for name, row in zip(self.rows, self.cells, strict=True)
        ]
        return Grid(self.title, ("head", *self.columns), tuple(rows))


def policy_matrices(entries: Sequence[Entry]) -> list[PolicyMatrix]:
    """A matrix for every setting that at least two runs share, in the order of the settings."""
    by_setting: dict[Setting, list[Entry]] = {}
    for entry in entries:
        by_setting.setdefault(entry.setting, []).append(entry)
    made = [_matrix(setting, members) for setting, members in sorted(by_setting.items())]
    return [matrix for matrix in made if len(matrix.rows) > 1]


def describe(setting: Setting) -> str:
    """A setting in words."""
    return (
        f"K={setting.num_speculative_tokens}, {setting.num_prompts} prompts "
        f"{setting.prompts_sha256[:8]}, {printable(setting.dtype)}, "
        f"T={printable(setting.temperature)}, {printable(setting.verify)} verification, "
        f"batch {printable(setting.batch_size)}"
    )


def _matrix(setting: Setting, members: Sequence[Entry]) -> PolicyMatrix:
    labels = sorted({entry.summary.label for entry in members})
    summaries = {(entry.run.name, entry.summary.label): entry.summary for entry in members}
    heads = {entry.run.name: entry.run.head_label for entry in members}
    shown = list(heads.values())
    return PolicyMatrix(
        setting=setting,
        # Two runs with heads of one kind, such as two seeds, are told apart by the run.
        rows=tuple(head if shown.count(head) == 1 else run for run, head in heads.items()),
        columns=tuple(map(printable, labels)),
        cells=tuple(tuple(summaries.get((run, label)) for label in labels) for run in heads),
    )


def _length(summary: ConditionSummary) -> str:
    return interval(summary.acceptance.acceptance_length_micro)
