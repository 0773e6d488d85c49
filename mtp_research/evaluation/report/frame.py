"""Every figure of some runs as one long pandas frame: what charts, tables, CSV and W&B are made of.

One row a figure: whose it is (`IDENTITY`), over which domain (`ALL`: every prompt), against which
reference, and value, low, high and n, the number of prompts behind it. Values are numbers in full
precision, NaN where undefined. A `Grid` is a table of it as text, for page, LaTeX and Markdown.
Letter: K drafts per step.
"""

# pandas ships no stubs, so that a selection of rows is taken for a Series, a DataFrame or an array.
# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from mtp_research.evaluation.report.comparable import Entry
from mtp_research.evaluation.report.grids import Grid, label_text
from mtp_research.evaluation.report.notes import UNDEFINED, interval, number
from mtp_research.evaluation.report.stored import printable
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.speed import divide
from mtp_research.evaluation.stats.statistics import AcceptanceStatistics, acceptance_by_context

IDENTITY = ("run", "head", "condition", "policy", "K", "batch", "temperature", "lossless")
COLUMNS = (*IDENTITY, "domain", "figure", "reference", "value", "low", "high", "n")
TEXTS = ("run", "head", "condition", "policy", "lossless", "domain", "figure", "reference")
ALL = "all"
LENGTH = "acceptance_length_micro"
CONTEXT = "acceptance_length_context_"  # and the range of tokens
ACCEPTING = "rounds_accepting_"  # and the number of drafts: a share of all rounds
STEP_PARTS = ("target", "verify", "draft", "host")
_SLOTS = ("WRONG", "MIXED", "HOLE", "PROVISIONAL")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
Row = dict[str, object]


class Column(NamedTuple):
    """A column of a table: the figure or the part of `IDENTITY` that it shows.

    `form` is a format for value, low and high, or makes the cell of a row of the frame.
    """

    header: str
    source: str
    form: str | Callable[[pd.Series], str] = ".3f"


def make_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The frame of some rows; what a row lacks is empty or NaN."""
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    frame["domain"] = frame["domain"].fillna(ALL)
    for name in TEXTS:
        frame[name] = frame[name].fillna("").astype(str)
    for name in ("temperature", "value", "low", "high"):
        frame[name] = pd.to_numeric(frame[name]).astype(float)
    for name in ("K", "batch", "n"):
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype("Int64")
    return frame


def frame_of(found: Sequence[Entry]) -> pd.DataFrame:
    """Every figure of every condition."""
    return make_frame([row for entry in found for row in _entry_rows(entry)])


def row_of(identity: Mapping[str, object], figure: str, one: Estimate, **others: object) -> Row:
    """One row of the frame: `others` are domain, reference and n."""
    return {**identity, "figure": figure, **one._asdict(), **others}


def select(frame: pd.DataFrame, members: Sequence[Entry]) -> pd.DataFrame:
    """The rows of some conditions, in their order."""
    keys = pd.MultiIndex.from_frame(frame[["run", "condition"]])
    parts = [frame[keys == (printable(run), label_text(label))] for run, label in
             (entry.key for entry in members)]  # fmt: skip
    return pd.concat(parts) if parts else frame.iloc[:0]


def table(frame: pd.DataFrame, title: str, columns: Sequence[Column]) -> Grid:
    """One row a condition in the order of the frame, its figures over all prompts."""
    rows = []
    for _, own in frame[frame["domain"] == ALL].groupby(["run", "condition"], sort=False):
        at = own.drop_duplicates("figure").set_index("figure")
        rows.append(tuple(_cell(at, own.iloc[0], column) for column in columns))
    return Grid(title, tuple(column.header for column in columns), tuple(rows))


def run_tables(frame: pd.DataFrame) -> list[Grid]:
    """What the page of one run has beside the printed tables: context length, audit, time."""
    contexts = frame[frame["figure"].str.startswith(CONTEXT)]
    most = contexts.groupby("figure", sort=False)["n"].max()
    lows = sorted(most.index, key=lambda name: int(name.removeprefix(CONTEXT).split("-")[0]))
    ranges = [Column(f"{name.removeprefix(CONTEXT)}, n={most[name]}", name) for name in lows]
    slots = frame[frame["figure"].isin([f"audit_{name}" for name in ("slots", *_SLOTS)])]
    seconds = frame[frame["condition"].isin(frame[frame["figure"] == "decode_s"]["condition"])]
    full = [Column("of them, batch full [s]", "full_s", ".2f")]
    has_full = bool((seconds["figure"] == "full_s").any())
    tables = [
        table(contexts, "Acceptance length (micro) by context length [tokens]", [
            Column("condition", "condition"), *ranges]),
        table(slots, "Audit of the draft KV", [
            Column("condition", "condition"), Column("slots", "audit_slots", ".0f"),
            *(Column(name, f"audit_{name}", _share) for name in _SLOTS)]),
        table(seconds, "Wall time by kind of step", [
            Column("condition", "condition"),
            Column("steps with prompt rows [s]", "prompt_rows_s", ".2f"),
            Column("decode-only steps [s]", "decode_s", ".2f"),
            *(full if has_full else []), Column("all [s]", "wall_s", ".2f")]),
    ]  # fmt: skip
    return [one for one in tables if one.rows]


def overview(frame: pd.DataFrame) -> Grid:
    """One row a condition of every run."""
    return table(frame, "All runs", [
        Column("run", "run"), Column("head", "head"), Column("condition", "condition"),
        Column("K", "K"), Column("batch", "batch"), Column("T", "temperature"),
        Column("prompts", "prompts_finished", lambda one: f"{one['value']:.0f} of {one['n']}"),
        Column("acceptance length", LENGTH), Column("rate", "acceptance_rate", _value),
        Column("tokens/s", "tokens_per_s", lambda one: f"{one['value']:.1f}"),
        Column("to baseline", "ratio", _value), Column("lossless", "lossless"),
    ])  # fmt: skip


def speed_tables(frame: pd.DataFrame, title: str, shared: str) -> list[Grid]:
    """Speed against K = 0 of one head and policy by batch size and K, see `notes.RATIO_NOTE`.

    Steps with every place taken have a table of their own, where there are any: beside the others
    they would not fit into 1280 pixels.
    """
    place = [Column("batch", "batch"), Column("K", "K"),
             Column("prompts", "prompts_finished", lambda one: str(one["n"]))]  # fmt: skip

    def speeds(name: str, suffix: str) -> list[Column]:
        return [
            Column(f"{name} [tokens/s]", f"tokens_per_s{suffix}", ".1f"),
            Column(f"K = 0, {name} [tokens/s]", f"baseline_tokens_per_s{suffix}", ".1f"),
            Column(f"ratio, {name}", f"ratio{suffix}"),
        ]

    drift = Column("drift of K = 0", "baseline_drift", "+.1%")
    ends = [drift, Column("lossless", "lossless"), Column("run", "run")]
    all_steps = [*place, *speeds("end to end", ""), *speeds("decode only", "_decode"), *ends]
    grids = [table(frame, f"Speed by batch size and K, {title} ({shared})", all_steps)]
    if frame["figure"].isin(["tokens_per_s_full", "baseline_tokens_per_s_full"]).any():
        full = [*place, *speeds("batch full", "_full"), Column("run", "run")]
        heading = f"Speed by batch size and K, batch full, {title} ({shared})"
        grids.append(table(frame, heading, full))
    return grids


def square(cells: pd.DataFrame, title: str, corner: str) -> Grid:
    """A matrix of values with intervals from rows with `row` and `column`."""
    at = {(one["row"], one["column"]): interval(estimate_of(one)) for _, one in cells.iterrows()}
    names, heads = (list(dict.fromkeys(cells[side])) for side in ("column", "row"))
    rows = ((head, *(at.get((head, name), UNDEFINED) for name in names)) for head in heads)
    return Grid(title, (corner, *names), tuple(rows))


def figures_csv(frame: pd.DataFrame) -> str:
    """The frame as CSV; a name that a spreadsheet would take for a formula is marked as text."""
    safe = frame.copy()
    for name in TEXTS:
        safe[name] = [f"'{text}" if text.startswith(tuple("=@+-")) else text for text in safe[name]]
    return safe.to_csv(index=False)


def grid_latex(grid: Grid, *, source: str = "") -> str:
    """The table as a LaTeX `table`: needs the package booktabs; the source is a comment."""
    cells = pd.DataFrame([[_latex(cell) for cell in row] for row in grid.rows])
    header, layout = list(map(_latex, grid.header)), "l" + "r" * (len(grid.header) - 1)
    text = cells.to_latex(index=False, header=header, caption=_latex(grid.title),
                          column_format=layout)  # fmt: skip
    comment = "".join(c for c in source if c.isprintable())
    return f"% {comment}\n{text}" if comment else text


def estimate_of(row: pd.Series) -> Estimate:
    """Value, low and high of a row of the frame; None for NaN."""
    return Estimate(*(None if pd.isna(row[name]) else row[name] for name in Estimate._fields))


def _entry_rows(entry: Entry) -> Iterator[Row]:
    summary, setting = entry.summary, entry.setting
    identity = {
        "run": printable(entry.run.name),
        "head": entry.head_label,
        "condition": label_text(summary.result.label),
        "policy": summary.result.policy,
        "K": summary.result.num_speculative_tokens,
        "batch": setting.batch_size,
        "temperature": setting.temperature if setting.temperature != "None" else None,
        "lossless": printable(summary.result.lossless),
    }
    for domain, figures in summary.per_domain.items():
        shown = {"domain": printable(domain), "n": figures.num_prompts}
        yield from (row_of(identity, name, one, **shown) for name, one in _acceptance(figures))
    shown = {"n": summary.acceptance.num_prompts}
    for name, one in _acceptance(summary.acceptance):
        yield row_of(identity, name, one, **shown)
    found = [*_counts(entry), *_text_figures(entry), *_speeds(entry), *_differences(entry)]
    for name, one, others in found:
        if one.value is not None:
            yield row_of(identity, name, one, **(shown | others))


def _acceptance(figures: AcceptanceStatistics) -> Iterator[tuple[str, Estimate]]:
    for name in (LENGTH, "acceptance_length_macro", "acceptance_rate", "target_forwards_per_token"):
        yield name, getattr(figures, name)
    positions = figures.acceptance_rate_per_position
    for i, one in enumerate(positions, start=1):
        yield f"p_{i}", one
    for i, one in enumerate(figures.conditional_acceptance_rate_per_position, start=1):
        yield f"p_{i}/p_{i - 1}", one
    at_least = [1.0, *(one.value for one in positions), 0.0]
    for i, (ours, more) in enumerate(itertools.pairwise(at_least)):
        if positions and ours is not None and more is not None:
            yield f"{ACCEPTING}{i}", Estimate(ours - more)


def _counts(entry: Entry) -> Iterator[tuple[str, Estimate, Row]]:
    summary, speed, report = entry.summary, entry.summary.speed, entry.run.report
    figures: dict[str, float | None] = {
        "num_rounds": summary.acceptance.num_rounds,
        "num_rounds_two_rejected": summary.acceptance.num_rounds_two_rejected,
        "num_output_tokens": summary.acceptance.num_output_tokens,
        "wall_s": speed.first.wall_s,
        "full_s": speed.first.full_wall_s,
        "device_s": speed.device_s,
        "first_token_s": speed.ttft_s_median,
        "next_token_s": speed.inter_token_s_median,
        "next_token_s_p95": speed.inter_token_s_p95,
        "drift": speed.drift,
        "rows_per_step": summary.result.first.rows_per_step,
        "peak_memory_bytes": summary.result.first.peak_memory_bytes,
    }
    if speed.first.wall_s is not None and speed.first.decode_wall_s is not None:
        figures["decode_s"] = speed.first.decode_wall_s
        figures["prompt_rows_s"] = speed.first.wall_s - speed.first.decode_wall_s
    if (cost := summary.cost) is not None:
        figures |= {f"step_{part}_s": getattr(cost, f"{part}_s") for part in STEP_PARTS}
        names = ("draft_cost", "verify_cost", "predicted_ratio")
        figures |= {name: getattr(cost, name) for name in names}
    yield from ((name, Estimate(value), {}) for name, value in figures.items())
    finished = Estimate(summary.acceptance.num_prompts)
    yield "prompts_finished", finished, {"n": summary.num_prompts}
    audit = summary.result.audit or {}
    for name, count in audit.items():
        yield f"audit_{name}", Estimate(count), {"n": audit.get("slots")}
    if summary.result.num_speculative_tokens > 0:
        own = next(one for one in report.conditions if one.label == summary.result.label)
        buckets = acceptance_by_context(own.records, seed=report.seed, prompt_of=own.prompt_of)
        for one in buckets:
            name = f"{CONTEXT}{one.low}-{one.high - 1}"
            yield name, one.acceptance_length, {"n": one.num_prompts}


def _text_figures(entry: Entry) -> Iterator[tuple[str, Estimate, Row]]:
    """Acceptance by part of the text, right answers, and prompts whose next turn did not fit."""
    summary, plain = entry.summary, entry.baseline
    if (split := summary.thinking) is not None:
        yield f"{LENGTH}_thinking", split.acceptance_length_thinking, {}
        yield f"{LENGTH}_answer", split.acceptance_length_answer, {}
    if (score := summary.score) is not None:
        shown: Row = {"n": score.num_prompts}
        yield "score_points", score.points, shown
        if score.points_to_baseline is not None and plain is not None:
            label = label_text(plain.summary.result.label)
            yield "score_points_difference", score.points_to_baseline, shown | {"reference": label}
    if max((prompt.num_turns for prompt in entry.run.report.prompts), default=1) > 1:
        yield "prompts_cut", Estimate(len(summary.result.cut_prompts)), {}


def _speeds(entry: Entry) -> Iterator[tuple[str, Estimate, Row]]:
    plain, speed = entry.baseline, entry.summary.speed
    shown: Row = {"reference": "" if plain is None else label_text(plain.summary.result.label)}
    base = None if plain is None else plain.summary.speed
    for suffix, name in {"": "end_to_end", "_decode": "decode", "_full": "full"}.items():
        ours: Estimate = getattr(speed, name)
        theirs: Estimate = Estimate(None) if base is None else getattr(base, name)
        ends = divide(ours.low, theirs.high), divide(ours.high, theirs.low)
        ratio = Estimate(divide(ours.value, theirs.value), *ends)
        yield f"tokens_per_s{suffix}", ours, {}
        yield f"baseline_tokens_per_s{suffix}", theirs, shown
        yield f"ratio{suffix}", ratio, shown
    if plain is not None:
        yield "baseline_drift", Estimate(plain.summary.speed.drift), shown


def _differences(entry: Entry) -> Iterator[tuple[str, Estimate, Row]]:
    """To the reference of the same K, batch size and temperature, prompt by prompt."""
    for pair in entry.run.report.paired:
        if pair.condition == entry.summary.result.label:
            shown: Row = {"reference": label_text(pair.reference)}
            for name, one in pair.differences.items():
                yield f"{name}_difference", one, shown


def _cell(at: pd.DataFrame, first: pd.Series, column: Column) -> str:
    if column.source in IDENTITY:
        value = first[column.source]
        return UNDEFINED if pd.isna(value) else str(value)
    if column.source not in at.index:
        return UNDEFINED
    row = at.loc[column.source]
    if callable(column.form):
        return UNDEFINED if pd.isna(row["value"]) else column.form(row)
    one, has_passes = estimate_of(row), not column.source.startswith("acceptance_length")
    is_lone = one.low is None or (has_passes and one.low == one.high)
    return number(one.value, column.form) if is_lone else interval(one, column.form)


def _value(row: pd.Series) -> str:
    return f"{row['value']:.3f}"


def _share(row: pd.Series) -> str:
    """A count, and its percentage of n."""
    count, n = row["value"], row["n"]
    return f"{count:.0f}" if pd.isna(n) or not n else f"{count:.0f} ({100 * count / n:.2f} %)"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
