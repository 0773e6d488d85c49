"""The figures of a report page, from the figures of its runs.

Letters: K drafts per step, R requests decoded at a time.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.policy_matrix import describe, policy_matrices
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.report_tables import buckets_by_label
from mtp_research.evaluation.runs import Entry, Setting
from mtp_research.evaluation.summary import ConditionSummary
from mtp_research.evaluation.svg import (
    MAX_SERIES,
    Series,
    heat_map,
    interval_chart,
    stacked_bars,
)

_UNDEFINED = Estimate(None)
_MIN_PROMPTS_OF_BUCKET = 5  # below, an interval over prompts says nothing


class Figure(NamedTuple):
    """One chart: what it shows, its SVG, and what a reader has to know."""

    title: str
    markup: str
    note: str = ""

    @property
    def stem(self) -> str:
        """The title as a file name."""
        return slug(self.title)


def slug(text: str) -> str:
    """A name made of lower-case letters, digits and dashes, at most 60 characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "untitled"


def run_figures(report: Report) -> list[Figure]:
    """Per-position curves, acceptance by domain and by context length, wall time of one run."""
    drafting = [s for s in report.summaries if s.num_speculative_tokens > 0]
    figures = [_positions(drafting), _domains(drafting), _contexts(report)] if drafting else []
    timed = [s for s in report.summaries if s.speed.decode_wall_s is not None]
    if timed:
        figures.append(_times(timed))
    return figures


def shared_figures(entries: Sequence[Entry]) -> list[Figure]:
    """Policy matrices, and acceptance and speed against batch size, over several runs."""
    figures = [
        Figure(
            title=matrix.title,
            markup=heat_map(matrix.values, rows=matrix.rows, columns=matrix.columns),
        )
        for matrix in policy_matrices(entries)
    ]
    by_setting: dict[Setting, list[Entry]] = {}
    for entry in entries:
        if str(entry.run.batch_size).isdecimal():
            by_setting.setdefault(entry.setting._replace(batch_size="any"), []).append(entry)
    for setting, members in sorted(by_setting.items()):
        if len({entry.run.batch_size for entry in members}) > 1:
            figures += _batches(setting, members)
    return figures


def _positions(drafting: Sequence[ConditionSummary]) -> Figure:
    longest = max(summary.num_speculative_tokens for summary in drafting)
    series = []
    for summary in drafting:
        rates = summary.acceptance.acceptance_rate_per_position
        missing = longest - len(rates)
        series.append(Series(_heading(summary), (*rates, *[_UNDEFINED] * missing)))
    return Figure(
        title="Acceptance by draft position",
        markup=interval_chart(
            series, x_labels=[str(i) for i in range(1, longest + 1)], y_label="p_i"
        ),
        note=_note("p_i = rounds with at least i accepted drafts / rounds.", len(series)),
    )


def _domains(drafting: Sequence[ConditionSummary]) -> Figure:
    domains = sorted({domain for summary in drafting for domain in summary.per_domain})
    series = []
    for summary in drafting:
        found = [summary.per_domain.get(domain) for domain in domains]
        points = (_UNDEFINED if f is None else f.acceptance_length_micro for f in found)
        series.append(Series(_heading(summary), tuple(points)))
    return Figure(
        title="Acceptance length by domain",
        markup=interval_chart(
            series, x_labels=domains, y_label="tokens per round", floor=1.0, is_connected=False
        ),
        note=_note("", len(series)),
    )


def _contexts(report: Report) -> Figure:
    by_label = {
        label: [bucket for bucket in buckets if bucket.num_prompts >= _MIN_PROMPTS_OF_BUCKET]
        for label, buckets in buckets_by_label(report).items()
    }
    lows = sorted({bucket.low for buckets in by_label.values() for bucket in buckets})
    series = []
    for label, buckets in by_label.items():
        lengths = {bucket.low: bucket.acceptance_length for bucket in buckets}
        series.append(Series(label, tuple(lengths.get(low, _UNDEFINED) for low in lows)))
    return Figure(
        title="Acceptance length by context length",
        markup=interval_chart(
            series, x_labels=[f"{low}+" for low in lows], y_label="tokens per round", floor=1.0
        ),
        note=_note(
            "Rounds by the number of tokens before their first draft; lengths that fewer than "
            f"{_MIN_PROMPTS_OF_BUCKET} prompts reach are in the table only.",
            len(series),
        ),
    )


def _times(timed: Sequence[ConditionSummary]) -> Figure:
    seconds = []
    for summary in timed:
        decode = summary.speed.decode_wall_s or 0.0
        seconds.append((max(summary.speed.wall_s - decode, 0.0), decode))
    return Figure(
        title="Wall time by kind of step",
        markup=stacked_bars(
            seconds,
            rows=[_heading(summary) for summary in timed],
            parts=["with prompt rows", "decode only"],
            unit="s",
        ),
    )


def _batches(setting: Setting, members: Sequence[Entry]) -> list[Figure]:
    sizes = sorted({int(str(entry.run.batch_size)) for entry in members})
    by_name: dict[str, dict[int, ConditionSummary]] = {}
    for entry in members:
        name = f"{entry.run.head_label} {entry.summary.label}"
        by_name.setdefault(name, {})[int(str(entry.run.batch_size))] = entry.summary

    def chart(figure: Callable[[ConditionSummary], Estimate], y_label: str, floor: float) -> str:
        series = [
            Series(name, tuple(figure(at[n]) if n in at else _UNDEFINED for n in sizes))
            for name, at in by_name.items()
        ]
        return interval_chart(series, x_labels=list(map(str, sizes)), y_label=y_label, floor=floor)

    shared = describe(setting).rpartition(", batch")[0]
    lengths = chart(lambda s: s.acceptance.acceptance_length_micro, "tokens per round", 1.0)
    speeds = chart(lambda s: Estimate(s.speed.tokens_per_s_end_to_end), "tokens/s", 0.0)
    note = _note("Most requests at a time (engine.max_num_requests).", len(by_name))
    return [
        Figure(f"Acceptance length by batch size ({shared})", lengths, note),
        Figure(f"Tokens per second by batch size ({shared})", speeds, note),
    ]


def _heading(summary: ConditionSummary) -> str:
    return f"{summary.label} (K={summary.num_speculative_tokens})"


def _note(text: str, num_series: int) -> str:
    if num_series <= MAX_SERIES:
        return text
    return f"{text} The first {MAX_SERIES} of {num_series} conditions; the table has all.".strip()
