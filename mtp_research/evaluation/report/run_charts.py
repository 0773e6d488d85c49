"""Which charts the results of evaluations give, as rows of the frame; and what could not be drawn.

Figures of one run by condition, then figures over settings and runs: policy matrices, acceptance
and speed against batch size, K and temperature. A chart that the files have no data for is a
`Missing` with the reason. Letter: K drafts per step.
"""

# pandas ships no stubs, so that a selection of rows is taken for a Series, a DataFrame or an array.
# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

from collections.abc import Iterator, Sequence

import pandas as pd

from mtp_research.evaluation.report import comparable
from mtp_research.evaluation.report.charts import (
    MAX_SERIES,
    Chart,
    Missing,
    grouped_bars,
    heat_map,
    interval_chart,
    stacked_bars,
)
from mtp_research.evaluation.report.frame import ACCEPTING, ALL, CONTEXT, LENGTH, STEP_PARTS, select
from mtp_research.evaluation.stats.bootstrap import LEVEL

TOKENS_PER_ROUND = "tokens per round"
PROMPT_INTERVAL = f"{100 * LEVEL:.0f} % bootstrap over prompts."
FRAMED = "Framed: the policy that shows the heads what they were trained on."
_MIN_PROMPTS_OF_BUCKET = 5  # below, an interval over prompts says nothing
_MAX_BARS = 24
_MAX_TOGETHER = 6  # more lines in one chart cannot be told apart
_NO_DRAFTS = "every condition decodes without drafts (K = 0)"
_SWEPT: dict[comparable.SweptPart, tuple[str, str]] = {  # in titles, and on the axis
    "batch_size": ("batch size", "batch size R [requests]"),
    "num_speculative_tokens": ("number of drafts", "drafts per step K"),
    "temperature": ("temperature", "sampling temperature"),
}


def run_charts(frame: pd.DataFrame) -> list[Chart | Missing]:
    """Of one run: acceptance by position, domain and context, accepted drafts, time split."""
    of_position = frame[frame["figure"].str.fullmatch(r"p_\d+") & (frame["domain"] == ALL)]
    of_domain = frame[(frame["figure"] == LENGTH) & (frame["domain"] != ALL) & (frame["K"] > 0)]
    of_context = frame[frame["figure"].str.startswith(CONTEXT)]
    reached = of_context.groupby("figure")["n"].transform("max") >= _MIN_PROMPTS_OF_BUCKET
    enough = of_context[reached & (of_context["n"] >= _MIN_PROMPTS_OF_BUCKET)]
    counts = frame[frame["figure"].str.startswith(ACCEPTING) & (frame["domain"] == ALL)]
    few = f"no range of context lengths is reached by {_MIN_PROMPTS_OF_BUCKET} prompts"
    return [
        *position_charts(of_position, "Acceptance by draft position", PROMPT_INTERVAL),
        *_grouped("Rounds by number of accepted drafts", [
            grouped_bars(f"Rounds by number of accepted drafts{heading}",
                         _ticked(part, part["figure"].str.removeprefix(ACCEPTING)),
                         x="accepted drafts of a round", y="share of rounds",
                         note=f"The bonus token is not counted.{note}")
            for heading, note, part in _groups(counts)], _NO_DRAFTS),
        *_grouped("Acceptance length by domain", [
            interval_chart(f"Acceptance length by domain{heading}",
                           _ticked(part, part["domain"]).sort_values("tick", kind="stable"),
                           x="domain of the prompt", y=TOKENS_PER_ROUND, floor=1.0,
                           is_connected=False, note="The bonus token is counted. Whiskers: "
                           f"{PROMPT_INTERVAL}{note}")
            for heading, note, part in _groups(of_domain)], _NO_DRAFTS),
        *_grouped("Acceptance length by context length", [
            interval_chart(f"Acceptance length by context length{heading}",
                           _by_range(part), x="context [tokens]", y=TOKENS_PER_ROUND, floor=1.0,
                           note="Rounds by the number of tokens before their first draft; lengths "
                           f"that fewer than {_MIN_PROMPTS_OF_BUCKET} prompts reach are in the "
                           f"table only. Whiskers: {PROMPT_INTERVAL}{note}")
            for heading, note, part in _groups(enough)],
            few if len(of_context) else _NO_DRAFTS),
        _step_parts(frame),
        _times(frame),
    ]  # fmt: skip


def position_charts(
    rows: pd.DataFrame, title: str, intervals: str, *, reason: str = _NO_DRAFTS
) -> list[Chart | Missing]:
    """Curves of p_i: the rows p_1 .. p_K of some conditions, in groups that one chart can hold."""
    charts = [
        interval_chart(
            f"{title}{heading}",
            _ticked(part, part["figure"].str[2:]).sort_values("tick", key=_as_int, kind="stable"),
            x="draft position i",
            y="acceptance p_i, share of rounds",
            note="p_i = rounds with at least i accepted drafts / rounds. "
            f"Whiskers: {intervals}{note}",
        )
        for heading, note, part in _groups(rows)
    ]
    return _grouped(title, charts, reason)


def sweep_charts(frame: pd.DataFrame, found: Sequence[comparable.Entry]) -> list[Chart | Missing]:
    """Policy matrices, then acceptance and tokens/s along every part that is swept."""
    charts: list[Chart | Missing] = []
    matrices = comparable.policy_matrices(found)
    apart = comparable.told_apart([comparable.describe(matrix.setting) for matrix in matrices])
    for matrix, which in zip(matrices, apart, strict=True):
        cells = matrix_cells(frame, matrix)
        framed = f" {FRAMED}" if cells["is_match"].any() else ""
        note = f"{comparable.describe(matrix.setting)}. Below each value: {PROMPT_INTERVAL}{framed}"
        title = f"Acceptance length by head and decode policy{which}"
        charts.append(heat_map(title, cells, rows="heads", unit=TOKENS_PER_ROUND, note=note))
    if not matrices:
        reason = "fewer than two heads decoded the same prompts under one setting"
        charts.append(Missing("Policy matrix", reason))
    for part, (words, _) in _SWEPT.items():
        made = comparable.sweeps(found, part)
        names = comparable.told_apart([sweep.shared for sweep in made])
        for sweep, which in zip(made, names, strict=True):
            charts += _sweep_charts(frame, sweep, f"{words}{which}")
        if not made:
            reason = f"all comparable conditions ran at one {words}"
            charts.append(Missing(f"Acceptance and speed by {words}", reason))
    return charts


def matrix_cells(frame: pd.DataFrame, matrix: comparable.PolicyMatrix) -> pd.DataFrame:
    """The acceptance lengths of a matrix, with `row`, `column` and `is_match`."""
    parts = [
        _of_figure(select(frame, [entry]), LENGTH).assign(
            row=row, column=column, is_match=entry.is_match
        )
        for (row, column), entry in matrix.cells.items()
    ]
    return pd.concat(parts)


def _of_figure(frame: pd.DataFrame, figure: str) -> pd.DataFrame:
    return frame[(frame["figure"] == figure) & (frame["domain"] == ALL)]


def _ticked(rows: pd.DataFrame, ticks: pd.Series) -> pd.DataFrame:
    return rows.assign(series=rows["condition"], tick=ticks)


def _as_int(texts: pd.Series) -> pd.Series:
    return texts.str.split("-").str[0].astype(int)


def _by_range(rows: pd.DataFrame) -> pd.DataFrame:
    ranges = _ticked(rows, rows["figure"].str.removeprefix(CONTEXT))
    return ranges.sort_values("tick", key=_as_int, kind="stable")


def _grouped(title: str, charts: Sequence[Chart], reason: str) -> list[Chart | Missing]:
    return list(charts) or [Missing(title, reason)]


def _groups(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Ends of title and note, and rows, of the conditions that share a chart.

    At the first batch size, since it changes speed and not acceptance; together while they are few,
    else one chart for each K and temperature.
    """
    sizes = list(dict.fromkeys(rows["batch"].dropna()))
    note = f" At batch {sizes[0]}." if len(sizes) > 1 else ""
    shown = rows[rows["batch"] == sizes[0]] if len(sizes) > 1 else rows
    if shown["condition"].nunique() <= _MAX_TOGETHER:
        if len(shown):
            yield "", note, shown
        return
    has_temperatures = shown["temperature"].nunique() > 1
    for (num_drafts, temperature), own in shown.groupby(["K", "temperature"], dropna=False):
        names = list(dict.fromkeys(own["condition"]))
        parts = [names[i : i + MAX_SERIES] for i in range(0, len(names), MAX_SERIES)]
        at = f", T={temperature:g}" if has_temperatures else ""
        for number, part in enumerate(parts, start=1):
            which = f", part {number} of {len(parts)}" if len(parts) > 1 else ""
            yield f", K={num_drafts}{at}{which}", note, own[own["condition"].isin(part)]


def _step_parts(frame: pd.DataFrame) -> Chart | Missing:
    title = "Mean decode step by part"
    parts = _wide(frame, {f"step_{part}_s": part for part in STEP_PARTS})
    if not len(parts):
        return Missing(title, "the parts of a step were not timed")
    note = (
        "Milliseconds of a step without prompt rows. Target: its forward pass and logits; verify: "
        "of the drafts; draft: all draft passes; host: the rest of the wall time."
    )
    return stacked_bars(
        title, 1e3 * parts[:_MAX_BARS], unit="ms", note=note + _first_bars(len(parts))
    )


def _times(frame: pd.DataFrame) -> Chart | Missing:
    title = "Wall time by kind of step"
    names = {"prompt_rows_s": "steps with prompt rows", "decode_s": "decode-only steps"}
    seconds = _wide(frame, names).clip(lower=0.0)
    if not len(seconds):
        return Missing(title, "the file holds no times of decode-only steps")
    note = f"Seconds for all prompts, warm-up excluded.{_first_bars(len(seconds))}"
    return stacked_bars(title, seconds[:_MAX_BARS], unit="s", note=note)


def _wide(frame: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    chosen = frame[frame["figure"].isin(list(names))]
    wide = chosen.pivot_table(index="condition", columns="figure", values="value", sort=False)
    return wide.reindex(columns=list(names)).dropna().rename(columns=names)


def _first_bars(num_conditions: int) -> str:
    is_cut = num_conditions > _MAX_BARS
    return f" The first {_MAX_BARS} of {num_conditions} conditions." if is_cut else ""


def _sweep_charts(frame: pd.DataFrame, sweep: comparable.Sweep, name: str) -> Iterator[Chart]:
    shared, note = sweep.shared, ""
    if len(sweep.rows) > MAX_SERIES:
        note = f"The first {MAX_SERIES} of {len(sweep.rows)} heads and policies. "
    if sweep.has_parts:
        note += f"Prompts: {_prompts_by_value(sweep)}; each point over its own. "
    axis = _SWEPT[sweep.part][1]
    points = _points(frame, sweep)
    if not sweep.has_parts:
        yield interval_chart(f"Acceptance length by {name}", _of_figure(points, LENGTH), x=axis,
                             y=TOKENS_PER_ROUND, floor=1.0,
                             note=f"{note}Whiskers: {PROMPT_INTERVAL} {shared}.")  # fmt: skip
    if sweep.part == "temperature":
        return
    has_passes = any(entry.summary.speed.num_passes > 1 for entry in sweep.members)
    passes = "Whiskers: slowest and fastest pass. " if has_passes else ""
    plain = points[points["figure"] == "baseline_tokens_per_s"].assign(series="K = 0")
    speeds = [_of_figure(points, "tokens_per_s"), plain.drop_duplicates("tick")]
    yield interval_chart(f"Tokens per second by {name}", pd.concat(speeds), x=axis,
                         y="tokens/s, end to end", note=f"{note}{passes}{shared}.")  # fmt: skip
    if len(plain):
        spread = "Whiskers: slowest pass over the fastest of K = 0, and the other way round. "
        yield interval_chart(f"Speed-up over K = 0 by {name}", _of_figure(points, "ratio"), x=axis,
                             y="tokens/s over that of K = 0",
                             note=f"{note}{spread if has_passes else ''}{shared}.")  # fmt: skip


def _points(frame: pd.DataFrame, sweep: comparable.Sweep) -> pd.DataFrame:
    """The rows of the sweep's conditions, with `series` and `tick`, by ascending tick."""
    parts = [
        select(frame, [entry]).assign(series=name, tick=f"{value:g}")
        for i, value in enumerate(sweep.values)
        for name, row in sweep.rows.items()
        if (entry := row[i]) is not None
    ]
    return pd.concat(parts)


def _prompts_by_value(sweep: comparable.Sweep) -> str:
    """How many prompts each value has, such as `16 at batch size 1, 32 at batch size 8`."""
    counts: dict[float, set[int]] = {value: set() for value in sweep.values}
    for row in sweep.rows.values():
        for value, entry in zip(sweep.values, row, strict=True):
            if entry is not None:
                counts[value].add(entry.setting.num_prompts)
    shown = (
        f"{' or '.join(map(str, sorted(found)))} at {_SWEPT[sweep.part][0]} {value:g}"
        for value, found in counts.items()
    )
    return ", ".join(shown)
