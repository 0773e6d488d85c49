"""Tables that only the report page has: context length, audit, time, overview of several runs.

The others are those of `report.report_grids` and `policy_matrix.py`. Letter: K drafts per step.
"""

from collections.abc import Sequence

from mtp_research.evaluation.context_buckets import ContextBucket, acceptance_by_context
from mtp_research.evaluation.report import Report, report_grids
from mtp_research.evaluation.runs import Entry, mapping
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
    """Acceptance length by context length; prompts are the most that any condition has there."""
    by_label = buckets_by_label(report)
    lows = sorted({bucket.low for buckets in by_label.values() for bucket in buckets})
    rows = []
    for low in lows:
        found = [next((b for b in bs if b.low == low), None) for bs in by_label.values()]
        num_prompts = max(bucket.num_prompts for bucket in found if bucket is not None)
        cells = (UNDEFINED if b is None else interval(b.acceptance_length) for b in found)
        rows.append((f"[{low}, {2 * low})", str(num_prompts), *cells))
    return Grid(
        title="Acceptance length (micro) by context length",
        header=("context [tokens]", "prompts", *map(printable, by_label)),
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
        rows.append((printable(summary.label), UNDEFINED if slots is None else str(slots), *cells))
    return Grid("Audit of the draft KV", ("condition", "slots", *_FINDINGS), tuple(rows))


def time_grid(report: Report) -> Grid:
    """Wall seconds by kind of step, where they were measured."""
    rows = tuple(
        (
            printable(summary.label),
            number(summary.speed.wall_s - summary.speed.decode_wall_s, ".2f"),
            number(summary.speed.decode_wall_s, ".2f"),
            number(summary.speed.wall_s, ".2f"),
        )
        for summary in report.summaries
        if summary.speed.decode_wall_s is not None
    )
    header = ("condition", "steps with prompt rows [s]", "decode-only steps [s]", "all [s]")
    return Grid("Wall time by kind of step", header, rows)


def overview_grid(found: Sequence[Entry]) -> Grid:
    """One row per drafting condition of every run."""
    header = ("run", "head", "condition", "K", "batch", "T", "prompts", "acceptance length",
              "rate", "tokens/s", "to baseline", "lossless")  # fmt: skip
    return Grid("All runs", header, tuple(_overview_row(entry) for entry in found))


def _overview_row(entry: Entry) -> tuple[str, ...]:
    summary = entry.summary
    temperature = mapping(entry.run.report.config, "sampling").get("temperature")
    return (
        entry.run.name,
        entry.run.head_label,
        printable(summary.label),
        str(summary.num_speculative_tokens),
        printable(str(entry.run.batch_size)),
        printable(str(temperature)),
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
