"""The figures of one results file, from its figures by condition.

A figure that the file has no data for is a `Missing` with the reason, so that a reader knows what
was left out. Figures over several settings or runs: `sweep_figures.py`. Letter: K drafts per step.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mtp_research.evaluation.report import Report
from mtp_research.evaluation.report_tables import buckets_by_label
from mtp_research.evaluation.stats.bootstrap import LEVEL, Estimate
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.evaluation.svg import Axes, Series, interval_chart, stacked_bars
from mtp_research.evaluation.svg_parts import MAX_SERIES

TOKENS_PER_ROUND = "tokens per round"
UNDEFINED_FIGURE = Estimate(None)
PROMPT_INTERVAL = f"{100 * LEVEL:.0f} % bootstrap over prompts."
_MIN_PROMPTS_OF_BUCKET = 5  # below, an interval over prompts says nothing
_MAX_BARS = 24
_MAX_TOGETHER = 6  # more lines in one chart cannot be told apart
_NO_DRAFTS = "every condition decodes without drafts (K = 0)"


class Figure(NamedTuple):
    """One chart: what it shows, its SVG, and what a reader has to know."""

    title: str
    markup: str
    note: str = ""

    @property
    def stem(self) -> str:
        """The title as a file name."""
        return slug(self.title)


class Missing(NamedTuple):
    """A figure that cannot be drawn, and why."""

    title: str
    reason: str


def slug(text: str) -> str:
    """A name made of lower-case letters, digits and dashes, at most 60 characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "untitled"


def run_figures(report: Report) -> list[Figure | Missing]:
    """Per-position curves, acceptance by domain and by context length, time split of one run."""
    return [
        *_positions(report),
        *_domains(report),
        *_contexts(report),
        _step_parts(report.summaries),
        _times(report.summaries),
    ]


class Group(NamedTuple):
    """Conditions that share a chart; `heading` tells it from the others, `note` what is not in."""

    heading: str
    note: str
    members: list[ConditionSummary]


def drafting_groups(summaries: Sequence[ConditionSummary]) -> list[Group]:
    """Conditions with drafts at the first batch size: in one chart while they are few.

    Else there is one for each K and temperature. Batch size changes speed, not acceptance:
    `sweep_figures.py` shows both against it.
    """
    drafting = [s for s in summaries if s.num_speculative_tokens > 0]
    sizes = list(dict.fromkeys(s.max_num_requests for s in drafting))
    note = f" At batch {sizes[0]}." if len(sizes) > 1 else ""
    shown = [s for s in drafting if s.max_num_requests == sizes[0]]
    if len(shown) <= _MAX_TOGETHER:
        return [Group("", note, shown)] if shown else []
    by_setting: dict[tuple[int, str], list[ConditionSummary]] = {}
    has_temperatures = len({s.temperature for s in shown}) > 1
    for one in shown:
        temperature = f", T={one.temperature or 0:g}" if has_temperatures else ""
        by_setting.setdefault((one.num_speculative_tokens, temperature), []).append(one)
    groups = []
    for (num_drafts, temperature), members in sorted(by_setting.items()):
        parts = [members[i : i + MAX_SERIES] for i in range(0, len(members), MAX_SERIES)]
        for number, part in enumerate(parts, start=1):
            which = f", part {number} of {len(parts)}" if len(parts) > 1 else ""
            groups.append(Group(f", K={num_drafts}{temperature}{which}", note, part))
    return groups


def _positions(report: Report) -> Iterator[Figure | Missing]:
    title = "Acceptance by draft position"
    groups = drafting_groups(report.summaries)
    if not groups:
        yield Missing(title, _NO_DRAFTS)
    for heading, note, drafting in groups:
        longest = max(summary.num_speculative_tokens for summary in drafting)
        series = []
        for summary in drafting:
            rates = summary.acceptance.acceptance_rate_per_position
            missing = longest - len(rates)
            series.append(Series(summary.label, (*rates, *[UNDEFINED_FIGURE] * missing)))
        ticks = tuple(str(i) for i in range(1, longest + 1))
        axes = Axes("draft position i", "acceptance p_i, share of rounds", ticks)
        yield Figure(
            f"{title}{heading}",
            interval_chart(series, axes=axes),
            "p_i = rounds with at least i accepted drafts / rounds. "
            f"Whiskers: {PROMPT_INTERVAL}{note}",
        )


def _domains(report: Report) -> Iterator[Figure | Missing]:
    title = "Acceptance length by domain"
    groups = drafting_groups(report.summaries)
    if not groups:
        yield Missing(title, _NO_DRAFTS)
    for heading, note, drafting in groups:
        domains = sorted({domain for summary in drafting for domain in summary.per_domain})
        series = []
        for summary in drafting:
            found = [summary.per_domain.get(domain) for domain in domains]
            points = (UNDEFINED_FIGURE if f is None else f.acceptance_length_micro for f in found)
            series.append(Series(summary.label, tuple(points)))
        axes = Axes("domain of the prompt", TOKENS_PER_ROUND, tuple(domains))
        markup = interval_chart(series, axes=axes, floor=1.0, is_connected=False)
        text = f"The bonus token is counted. Whiskers: {PROMPT_INTERVAL}{note}"
        yield Figure(f"{title}{heading}", markup, text)


def _contexts(report: Report) -> Iterator[Figure | Missing]:
    title = "Acceptance length by context length"
    by_label = {
        label: {b.low: b for b in buckets if b.num_prompts >= _MIN_PROMPTS_OF_BUCKET}
        for label, buckets in buckets_by_label(report).items()
    }
    lows = sorted({low for buckets in by_label.values() for low in buckets})
    if not lows:
        few = f"no range of context lengths is reached by {_MIN_PROMPTS_OF_BUCKET} prompts"
        yield Missing(title, few if by_label else _NO_DRAFTS)
        return
    for heading, note, drafting in drafting_groups(report.summaries):
        series = []
        for summary in drafting:
            buckets = by_label[summary.label]
            points = (
                buckets[low].acceptance_length if low in buckets else UNDEFINED_FIGURE
                for low in lows
            )
            series.append(Series(summary.label, tuple(points)))
        ticks = tuple(f"{low}-{2 * low - 1}" for low in lows)
        axes = Axes("context [tokens]", TOKENS_PER_ROUND, ticks)
        yield Figure(
            f"{title}{heading}",
            interval_chart(series, axes=axes, floor=1.0),
            "Rounds by the number of tokens before their first draft; lengths that fewer than "
            f"{_MIN_PROMPTS_OF_BUCKET} prompts reach are in the table only. "
            f"Whiskers: {PROMPT_INTERVAL}{note}",
        )


def _step_parts(summaries: Sequence[ConditionSummary]) -> Figure | Missing:
    title = "Mean decode step by part"
    found = [(s.label, s.cost) for s in summaries if s.cost is not None][:_MAX_BARS]
    if not found:
        return Missing(title, "the parts of a step were not timed")
    return Figure(
        title,
        stacked_bars(
            [
                [1e3 * part for part in (c.target_s, c.verify_s, c.draft_s, c.host_s)]
                for _, c in found
            ],
            rows=[label for label, _ in found],
            parts=["target", "verify", "draft", "host"],
            unit="ms",
        ),
        "Milliseconds of a step without prompt rows. Target: its forward pass and logits; verify: "
        "of the drafts; draft: all draft passes; host: the rest of the wall time."
        f"{_first_bars(summaries)}",
    )


def _times(summaries: Sequence[ConditionSummary]) -> Figure | Missing:
    title = "Wall time by kind of step"
    seconds = {
        summary.label: (max(speed.wall_s - speed.decode_wall_s, 0.0), speed.decode_wall_s)
        for summary in summaries[:_MAX_BARS]
        if (speed := summary.speed).wall_s is not None and speed.decode_wall_s is not None
    }
    if not seconds:
        return Missing(title, "the file holds no times of decode-only steps")
    return Figure(
        title,
        stacked_bars(
            list(seconds.values()),
            rows=list(seconds),
            parts=["steps with prompt rows", "decode-only steps"],
            unit="s",
        ),
        f"Seconds for all prompts, warm-up excluded.{_first_bars(summaries)}",
    )


def _first_bars(summaries: Sequence[ConditionSummary]) -> str:
    """A note where a bar chart does not hold every condition."""
    is_cut = len(summaries) > _MAX_BARS
    return f" The first {_MAX_BARS} of {len(summaries)} conditions." if is_cut else ""
