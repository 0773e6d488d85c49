"""What an evaluation publishes: its figures, its tables and one last line for scripts.

Last stage of the flow: prompts -> decode loop -> statistics -> report. Tables are laid out in
`tables.py`; `results.py` keeps a report on disk.
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_research.evaluation.row_tables import cost_grid, grid_tables
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS
from mtp_research.evaluation.stats.outcome import ConditionResult, PromptEntry
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.evaluation.stats.summary import (
    ConditionSummary,
    PairedComparison,
    baseline_of,
    compare_to_reference,
    summarise,
)
from mtp_research.evaluation.tables import (
    Grid,
    condition_grids,
    paired_grid,
    plain_text,
    printable,
    rich_table,
)
from mtp_research.evaluation.timing_notes import skipped_conditions, timing_notes

if TYPE_CHECKING:
    from rich.table import Table

PAGE_WIDTH = 120  # columns
_NUM_LISTED = 5  # skipped prompts


@dataclass(frozen=True)
class Report:
    """One evaluation: what was asked, what was generated, and the figures.

    Attributes:
        dtype: of the target, such as `float32`.
        seed: of the bootstrap.
        prompts: what was asked; the ids are the request ids.
        skipped_prompts: ids of prompts that were not asked, because they fill the context.
        conditions: the decodings, with unique labels.
        summaries: figures of each condition, in the same order.
        paired: differences of each drafting condition to the reference of its K and group.
        config: the resolved configuration.
        run: command, code, versions and machine (`provenance.run_record`).
    """

    dtype: str
    seed: int
    prompts: tuple[PromptEntry, ...]
    conditions: tuple[ConditionResult, ...]
    summaries: tuple[ConditionSummary, ...]
    paired: tuple[PairedComparison, ...]
    config: Mapping[str, object]
    run: Mapping[str, object]
    skipped_prompts: tuple[str, ...] = ()


def build_report(
    conditions: Sequence[ConditionResult],
    *,
    prompts: Sequence[Prompt | PromptEntry],
    dtype: str,
    seed: int = 0,
    config: Mapping[str, object],
    run: Mapping[str, object],
    skipped_prompts: Sequence[str] = (),
) -> Report:
    """Compute every figure; see `Report` for the arguments.

    Raises:
        IntegrityError: the counters of a generation contradict each other.
    """
    labels = [condition.label for condition in conditions]
    assert len(set(labels)) == len(labels), f"condition labels must be unique, got {labels}"
    reference = config.get("reference")
    domains = {prompt.question_id: prompt.category for prompt in prompts}
    return Report(
        dtype=dtype,
        seed=seed,
        prompts=tuple(
            PromptEntry(prompt.question_id, prompt.category, prompt.format, prompt.sha256)
            for prompt in prompts
        ),
        conditions=tuple(conditions),
        summaries=tuple(
            summarise(
                condition, baseline=baseline_of(condition, conditions), domains=domains, seed=seed
            )
            for condition in conditions
        ),
        paired=compare_to_reference(
            conditions, reference=None if reference is None else str(reference), seed=seed
        ),
        config=config,
        run=run,
        skipped_prompts=tuple(skipped_prompts),
    )


def last_line(report: Report, *, folder: Path | None = None) -> str:
    """The main figures as one line of JSON, for scripts that read only the last line."""
    line = {
        "num_prompts": len(report.prompts),
        "num_skipped_prompts": len(report.skipped_prompts),
        "dtype": report.dtype,
        "conditions": {summary.label: _headline(summary) for summary in report.summaries},
        "results": None if folder is None else str(folder),
    }
    return json.dumps(line, allow_nan=False, separators=(",", ":"))


def render_text(report: Report) -> str:
    """All tables and notes as plain text, at most 120 columns for up to three conditions."""
    parts = [plain_text(grid) for grid in report_grids(report)]
    return "\n\n".join([*parts, "\n".join(report_notes(report))]) + "\n"


def render_table(report: Report) -> "list[Table]":
    """All tables for a rich console.

    Raises:
        ModuleNotFoundError: rich is not installed; `render_text` needs nothing.
    """
    return [rich_table(grid) for grid in report_grids(report)]


def print_report(report: Report, *, width: int = PAGE_WIDTH, stored_at: Path | None = None) -> None:
    """Tables and notes on standard output, drawn by rich where it is installed.

    Args:
        report: what to print.
        width: columns.
        stored_at: the results file, named at the end.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(render_text(report))
    else:
        console = Console(width=width, highlight=False)
        for table in render_table(report):
            console.print(table)
        console.print("\n".join(report_notes(report)), markup=False)
    if stored_at is not None:
        print(f"results: {stored_at}")


def report_grids(report: Report) -> list[Grid]:
    """Figures by condition, acceptance length by domain, paired differences, time of a step."""
    title = f"Acceptance and speed, {len(report.prompts)} prompts, {report.dtype}"
    if _is_grid(report):
        grids = grid_tables(report.summaries, report.paired, title=title)
    else:
        grids = condition_grids(report.summaries, title=title)
        grids += [paired_grid(pair) for pair in report.paired]
    costs = cost_grid(report.summaries)
    return [*grids, costs] if costs.rows else grids


def _is_grid(report: Report) -> bool:
    """Whether a list for a key gave more conditions than policies."""
    grid = report.config.get("grid")
    return isinstance(grid, Mapping) and any(len(values) > 1 for values in grid.values())


def report_notes(report: Report) -> list[str]:
    """The lines of `note_paragraphs`, at most 120 columns wide."""
    return [part for text in note_paragraphs(report) for part in textwrap.wrap(text, PAGE_WIDTH)]


def note_paragraphs(report: Report) -> list[str]:
    """What a reader of the tables has to know: warnings first, then how figures are defined."""
    warnings = [w for summary in report.summaries for w in summary.acceptance.warnings]
    return [
        *_skipped_note(report),
        *skipped_conditions(report.run.get("skipped_conditions")),
        *(f"warning: {warning}" for warning in dict.fromkeys(warnings)),
        *_draft_length_note(report),
        *timing_notes(report.conditions, report.summaries),
        f"acceptance length (micro) = {FORMULAS['acceptance_length_micro']}",
        f"acceptance length (macro) = {FORMULAS['acceptance_length_macro']}",
        f"[low, high] = {100 * LEVEL:.0f} % cluster bootstrap over prompts, {NUM_DRAWS} draws, "
        f"seed {report.seed}; r = rejected drafts of a round",
        ACCEPTED_WARNING,
    ]


def _draft_length_note(report: Report) -> list[str]:
    """A step without drafts is no round, which flatters a rule that drafts where it is easy."""
    spec = report.config.get("spec")
    rule = spec.get("draft_length", "fixed") if isinstance(spec, Mapping) else "fixed"
    if rule == "fixed":
        return []
    return [
        f"warning: spec.draft_length={rule}: steps without drafts are no rounds; compare such "
        "runs by target forwards per token, not by acceptance length"
    ]


def _skipped_note(report: Report) -> list[str]:
    skipped = report.skipped_prompts
    if not skipped:
        return []
    listed = ", ".join(printable(name) for name in skipped[:_NUM_LISTED])
    return [
        f"skipped: {len(skipped)} of {len(skipped) + len(report.prompts)} prompts leave no room in "
        f"the context and are in no figure: {listed}{', ...' * (len(skipped) > _NUM_LISTED)}"
    ]


def _headline(summary: ConditionSummary) -> dict[str, object]:
    acceptance, speed = summary.acceptance, summary.speed
    return {
        "num_speculative_tokens": summary.num_speculative_tokens,
        "acceptance_length": [_rounded(x) for x in acceptance.acceptance_length_micro],
        "acceptance_rate": _rounded(acceptance.acceptance_rate.value),
        "tokens_per_s": _rounded(speed.tokens_per_s_end_to_end),
        "ratio_to_baseline": _rounded(speed.ratio_end_to_end),
        "audit": summary.audit,
        "lossless": summary.lossless,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
