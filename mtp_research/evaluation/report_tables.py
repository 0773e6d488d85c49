"""Tables that only the report page has: context length, audit, time, overview of several runs.

The others are those of `report.report_grids` and `policy_matrix.py`. Letter: K drafts per step.
"""

from collections.abc import Sequence

from mtp_research.evaluation.entries import Entry
from mtp_research.evaluation.report import Report, report_grids
from mtp_research.evaluation.stats.statistics import ContextBucket, acceptance_by_context
from mtp_research.evaluation.svg_parts import label_text
from mtp_research.evaluation.tables import UNDEFINED, Grid, interval, number, printable

_FINDINGS = ("WRONG", "MIXED", "HOLE", "PROVISIONAL")


def run_grids(report: Report) -> list[Grid]:
    """Every table of one run; those without a row are left out."""
    grids = [*report_grids(report), context_grid(report), audit_grid(report), time_grid(report)]
    return [grid for grid in grids if grid.rows]


def buckets_by_label(report: Report) -> dict[str, tuple[ContextBucket, ...]]:
    """Acceptance by context length of every drafting condition."""
    return {
        condition.label: acceptance_by_context(condition.records, seed=report.seed)
        for condition in report.conditions
        if condition.num_speculative_tokens > 0
    }


def context_grid(report: Report) -> Grid:
    """Acceptance length by context length; n is the most prompts that any condition has there."""
    by_label = buckets_by_label(report)
    lows = sorted({bucket.low for buckets in by_label.values() for bucket in buckets})
    by_low = {
        label: {bucket.low: bucket for bucket in buckets} for label, buckets in by_label.items()
    }
    num_prompts = {
        low: max(found[low].num_prompts for found in by_low.values() if low in found)
        for low in lows
    }
    rows = [
        (
            label_text(label),
            *(interval(found[low].acceptance_length) if low in found else UNDEFINED
              for low in lows),
        )
        for label, found in by_low.items()
    ]  # fmt: skip
    return Grid(
        title="Acceptance length (micro) by context length [tokens]",
        header=("condition", *(f"{low}-{2 * low - 1}, n={num_prompts[low]}" for low in lows)),
        rows=tuple(rows),
    )


def audit_grid(report: Report) -> Grid:
    """Draft KV slots by finding, and their share of the slots looked at."""
    rows = []
    for summary in report.summaries:
        audit = summary.audit
        if audit is None:
            continue
        slots = audit.get("slots")
        cells = [_finding(audit.get(name), slots) for name in _FINDINGS]
        rows.append((label_text(summary.label), UNDEFINED if slots is None else str(slots), *cells))
    return Grid("Audit of the draft KV", ("condition", "slots", *_FINDINGS), tuple(rows))


def time_grid(report: Report) -> Grid:
    """Wall seconds by kind of step, where they were measured."""
    has_full = any(summary.speed.full_wall_s is not None for summary in report.summaries)
    rows = tuple(
        (
            label_text(summary.label),
            number(speed.wall_s - speed.decode_wall_s, ".2f"),
            number(speed.decode_wall_s, ".2f"),
            *([number(speed.full_wall_s, ".2f")] if has_full else []),
            number(speed.wall_s, ".2f"),
        )
        for summary in report.summaries
        if (speed := summary.speed).wall_s is not None and speed.decode_wall_s is not None
    )
    full = ("of them, batch full [s]",) if has_full else ()
    header = ("condition", "steps with prompt rows [s]", "decode-only steps [s]", *full, "all [s]")
    return Grid("Wall time by kind of step", header, rows)


def overview_grid(found: Sequence[Entry]) -> Grid:
    """One row per drafting condition of every run."""
    header = ("run", "head", "condition", "K", "batch", "T", "prompts", "acceptance length",
              "rate", "tokens/s", "to baseline", "lossless")  # fmt: skip
    return Grid("All runs", header, tuple(_overview_row(entry) for entry in found))


def _overview_row(entry: Entry) -> tuple[str, ...]:
    summary, setting = entry.summary, entry.setting
    return (
        entry.run.name,
        entry.head_label,
        label_text(summary.label),
        str(summary.num_speculative_tokens),
        printable(setting.batch_size),
        printable(setting.temperature),
        f"{summary.acceptance.num_prompts} of {summary.num_prompts}",
        interval(summary.acceptance.acceptance_length_micro),
        number(summary.acceptance.acceptance_rate.value, ".3f"),
        number(summary.speed.tokens_per_s_end_to_end, ".1f"),
        number(summary.speed.ratio_end_to_end, ".3f"),
        printable(summary.lossless),
    )


def _finding(count: int | None, slots: int | None) -> str:
    if count is None:
        return UNDEFINED
    return f"{count} ({100 * count / slots:.2f} %)" if slots else str(count)
