"""What the tables of an evaluation hold: its figures as text, one `Grid` a table.

One condition a column shows every figure; a list for a key gives more conditions, which get a row
each. How a table is printed is `terminal`'s matter. Letter: K drafts per step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtp_research.config.schema import BACKENDS
from mtp_research.evaluation.report.notes import (
    UNDEFINED,
    interval,
    number,
)
from mtp_research.evaluation.report.stored import Report, has_engines, printable
from mtp_research.evaluation.stats.agreement import Agreement
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.summary import ConditionSummary, PairedComparison

MAX_LABEL_CHARACTERS = 48  # of a condition in a table with one row each
PER_TABLE = 3  # conditions side by side, what 120 columns hold
FINDINGS = ("WRONG", "MIXED", "HOLE")
# Rows of the short table; p_i/p_{i-1} stand behind the rate, and speed where it was measured.
_SHORT = (
    *("acceptance length (micro)", "acceptance length (macro)", "acceptance rate"),
    *("target forwards per token", "tokens/s, end to end", "  ratio to baseline"),
    *("rounds with r >= 2", "audit WRONG/MIXED/HOLE", "lossless"),
)
# Rows that are left out where nothing was measured.
_OPTIONAL = (
    *("  least / most of a pass", "tokens/s, decode only", "  ratio to baseline, decode"),
    *("tokens/s, batch full", "  ratio to baseline, full", "device / wall of a pass [s]"),
    "peak memory [MiB]",
)

Cell = Callable[[ConditionSummary], str]


@dataclass(frozen=True)
class Grid:
    """One table as text: every row has one cell per entry of `header`."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def report_grids(report: Report, *, per_table: int = PER_TABLE) -> list[Grid]:
    """Figures by condition, acceptance length by domain, paired differences, time of a step."""
    summaries, title = report.summaries, _title(report)
    drafting = [summary for summary in summaries if summary.result.num_speculative_tokens > 0]
    if _has_lists(report):
        grids = [
            _length_grid(summaries, title),
            _decode_grid(summaries),
            _position_grid(drafting),
            _domain_row_grid(drafting),
            _paired_row_grid(report.paired),
        ]
    else:
        grids = [_metric_grid(some, title) for some in _groups(summaries, per_table)]
        grids += [_domain_grid(some) for some in _groups(drafting, per_table)]
        grids += [paired_grid(pair) for pair in report.paired]
    grids.append(_agreement_grid(report.agreements))
    grids += [_cost_grid(summaries), *_asked_grids(summaries)]
    return [grid for grid in grids if grid.rows]


def _title(report: Report) -> str:
    return f"Acceptance and speed, {len(report.prompts)} prompts, {report.dtype}"


def _has_lists(report: Report) -> bool:
    grid = report.config.get("grid")
    is_grid = isinstance(grid, Mapping) and any(len(values) > 1 for values in grid.values())
    return is_grid or has_engines(report)


def paired_grid(pair: PairedComparison) -> Grid:
    """The differences of one condition to another, prompt by prompt."""
    wanted = {
        "acceptance length (micro)": "acceptance_length_micro",
        "acceptance length (macro)": "acceptance_length_macro",
        "acceptance rate": "acceptance_rate",
    }
    # p_1/p_0 is p_1
    positions = [name for name in pair.differences if name.startswith("p_") and name != "p_1/p_0"]
    wanted |= {f"  {name}": name for name in sorted(positions, key=lambda name: "/" in name)}
    rows = ((row, interval(pair.differences[name], "+.3f")) for row, name in wanted.items())
    header = ("", f"{printable(pair.condition)} - {printable(pair.reference)}")
    return Grid("Paired difference over the same prompts", header, tuple(rows))


def short_grids(report: Report, *, per_table: int = PER_TABLE) -> list[Grid]:
    """The main figures; the differences too, where there are more than the headline's."""
    title = _title(report)
    if _has_lists(report):
        main = [_length_grid(report.summaries, title)]
    else:
        whole = [_metric_grid(some, title) for some in _groups(report.summaries, per_table)]
        main = [replace(one, rows=tuple(filter(_is_main, one.rows))) for one in whole]
    main += [_paired_row_grid(report.paired)] if len(report.paired) > 1 else []
    main += [_agreement_grid(report.agreements)] if report.agreements else []
    return main + [grid for grid in _asked_grids(report.summaries) if grid.rows]


def _asked_grids(summaries: Sequence[ConditionSummary]) -> list[Grid]:
    """Figures that are there because the run asked for them: empty tables in any other."""
    drafting = [summary for summary in summaries if summary.result.num_speculative_tokens > 0]
    return [_thinking_grid(drafting), _score_grid(summaries)]


def _is_main(row: tuple[str, ...]) -> bool:
    return row[0] in _SHORT or "/p_" in row[0]


def label_text(label: str) -> str:
    """A condition's label, of which more is kept than of other names: its end tells the setting."""
    return printable(label, limit=MAX_LABEL_CHARACTERS)


def _groups(summaries: Sequence[ConditionSummary], size: int) -> list[Sequence[ConditionSummary]]:
    return [summaries[start : start + size] for start in range(0, len(summaries), size)]


def _metric_grid(summaries: Sequence[ConditionSummary], title: str) -> Grid:
    """Every figure of some conditions; one that has no p_i, because its K is smaller, a dash."""
    num_positions = max(summary.result.num_speculative_tokens for summary in summaries)
    metrics = [*_acceptance_rows(num_positions), *_speed_rows(), *_honesty_rows()]
    rows = [(name, *(cell(summary) for summary in summaries)) for name, cell in metrics]
    shown = (row for row in rows if row[0] not in _OPTIONAL or set(row[1:]) != {UNDEFINED})
    return Grid(title, ("", *map(_heading, summaries)), tuple(shown))


def _heading(summary: ConditionSummary) -> str:
    return f"{printable(summary.result.label)} (K={summary.result.num_speculative_tokens})"


def _acceptance_rows(num_positions: int) -> list[tuple[str, Cell]]:
    """Lengths, rate, p_1 .. p_K and p_2/p_1 .. p_K/p_{K-1}; p_1/p_0 is p_1."""

    def position(i: int, figures: str) -> Cell:
        def cell(summary: ConditionSummary) -> str:
            found: Sequence[Estimate] = getattr(summary.acceptance, figures)
            return interval(found[i - 1]) if i <= len(found) else UNDEFINED

        return cell

    rates, places = "acceptance_rate_per_position", range(1, num_positions + 1)
    return [
        ("prompts finished", lambda s: f"{s.acceptance.num_prompts} of {s.num_prompts}"),
        ("acceptance length (micro)", lambda s: interval(s.acceptance.acceptance_length_micro)),
        ("acceptance length (macro)", lambda s: interval(s.acceptance.acceptance_length_macro)),
        ("acceptance rate", lambda s: interval(s.acceptance.acceptance_rate)),
        *((f"  p_{i}", position(i, rates)) for i in places),
        *((f"  p_{i}/p_{i - 1}", position(i, f"conditional_{rates}")) for i in places[1:]),
    ]


def _speed_rows() -> list[tuple[str, Cell]]:
    def several(form: str, *values: float | None, scale: float = 1.0) -> str:
        return " / ".join(number(value, form, scale=scale) for value in values)

    def spread(s: ConditionSummary) -> str:
        ends = (s.speed.end_to_end.low, s.speed.end_to_end.high)
        return UNDEFINED if s.speed.num_passes == 1 else several(".1f", *ends)

    def device(s: ConditionSummary) -> str:
        seconds = (s.speed.device_s, s.speed.first.wall_s)
        return UNDEFINED if s.speed.device_s is None else several(".2f", *seconds)

    def memory(s: ConditionSummary) -> str:
        return number(s.result.first.peak_memory_bytes, ".0f", scale=2.0**-20)

    def inter_token(s: ConditionSummary) -> str:
        return several(".2f", s.speed.inter_token_s_median, s.speed.inter_token_s_p95, scale=1e3)

    return [
        ("target forwards per token", lambda s: interval(s.acceptance.target_forwards_per_token)),
        ("tokens/s, end to end", lambda s: number(s.speed.end_to_end.value, ".1f")),
        ("  least / most of a pass", spread),
        ("  ratio to baseline", lambda s: number(s.speed.ratio_end_to_end, ".3f")),
        ("tokens/s, decode only", lambda s: number(s.speed.decode.value, ".1f")),
        ("  ratio to baseline, decode", lambda s: number(s.speed.ratio_decode, ".3f")),
        ("tokens/s, batch full", lambda s: number(s.speed.full.value, ".1f")),
        ("  ratio to baseline, full", lambda s: number(s.speed.ratio_full, ".3f")),
        ("device / wall of a pass [s]", device),
        ("first token [ms], median", lambda s: number(s.speed.ttft_s_median, ".1f", scale=1e3)),
        ("next token [ms], median / p95", inter_token),
        ("rows per target step", lambda s: number(s.result.first.rows_per_step, ".1f")),
        ("peak memory [MiB]", memory),
    ]


def _honesty_rows() -> list[tuple[str, Cell]]:
    return [
        ("rounds", lambda s: str(s.acceptance.num_rounds)),
        ("rounds with r >= 2", lambda s: str(s.acceptance.num_rounds_two_rejected)),
        ("audit " + "/".join(FINDINGS), _audit_cell),
        ("lossless", lambda s: printable(s.result.lossless)),
    ]


def _audit_cell(summary: ConditionSummary) -> str:
    audit = summary.result.audit
    return UNDEFINED if audit is None else " / ".join(str(audit[name]) for name in FINDINGS)


def _domain_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    rows = []
    for domain in sorted({domain for summary in summaries for domain in summary.per_domain}):
        figures = [summary.per_domain[domain] for summary in summaries]
        num_prompts = max(figure.num_prompts for figure in figures)
        cells = (interval(figure.acceptance_length_micro) for figure in figures)
        rows.append((printable(domain), str(num_prompts), *cells))
    header = ("domain", "prompts", *map(_heading, summaries))
    return Grid("Acceptance length (micro) by domain", header, tuple(rows))


def _row_grid(
    title: str, columns: Mapping[str, Cell], summaries: Sequence[ConditionSummary]
) -> Grid:
    """One row a condition."""
    cells = columns.values()
    rows = ((label_text(s.result.label), *(cell(s) for cell in cells)) for s in summaries)
    return Grid(title, ("condition", *columns), tuple(rows))


def _length_grid(summaries: Sequence[ConditionSummary], title: str) -> Grid:
    columns: dict[str, Cell] = {
        "acceptance length": lambda s: interval(s.acceptance.acceptance_length_micro),
        "rate": lambda s: number(s.acceptance.acceptance_rate.value, ".3f"),
        "tokens/s": lambda s: _rate(s.speed.end_to_end, s.speed.num_passes),
        "ratio": lambda s: number(s.speed.ratio_end_to_end, ".3f"),
        "lossless": lambda s: printable(s.result.lossless),
    }
    if any(summary.result.first.backend for summary in summaries):
        columns = {"engine": lambda s: printable(s.result.first.backend or UNDEFINED), **columns}
    return _row_grid(title, columns, summaries)


def _agreement_grid(agreements: Sequence[Agreement]) -> Grid:
    """Texts and rounds of other engines that are those of our loop."""
    rows = [
        (
            *(label_text(one.condition), label_text(one.reference)),
            f"{one.num_equal_texts} of {one.num_texts}",
            f"{one.num_equal_rounds} of {one.num_rounds}" if one.num_rounds else UNDEFINED,
            f"{one.num_whole_texts} of {one.num_equal_texts}" if one.num_rounds else UNDEFINED,
        )
        for one in agreements
    ]
    header = ("condition", "against", "equal texts", "equal rounds in them", "all rounds equal")
    return Grid("Other engines, text by text and round by round", header, tuple(rows))


def _decode_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    has_full = any(summary.speed.full.value is not None for summary in summaries)
    columns: dict[str, Cell] = {
        "decode only": lambda s: _rate(s.speed.decode, s.speed.num_passes),
        "ratio, decode": lambda s: number(s.speed.ratio_decode, ".3f"),
        "batch full": lambda s: _rate(s.speed.full, s.speed.num_passes),
        "ratio, full": lambda s: number(s.speed.ratio_full, ".3f"),
    }
    title = "Tokens/s of steps without prompt rows"
    return _row_grid(title, columns, summaries if has_full else ())


def _rate(tokens_per_s: Estimate, num_passes: int) -> str:
    is_lone = num_passes == 1
    return number(tokens_per_s.value, ".1f") if is_lone else interval(tokens_per_s, ".1f")


def _position_grid(drafting: Sequence[ConditionSummary]) -> Grid:
    most = max((summary.result.num_speculative_tokens for summary in drafting), default=0)
    rows = []
    for summary in drafting:
        figures = summary.acceptance
        rates = [number(rate.value, ".3f") for rate in figures.acceptance_rate_per_position]
        rates += [UNDEFINED] * (most - len(rates))
        rounds = str(figures.num_rounds_two_rejected)
        rows.append((label_text(summary.result.label), *rates, rounds, _audit_cell(summary)))
    positions = (f"p_{i}" for i in range(1, most + 1))
    header = ("condition", *positions, "rounds with r >= 2", "WRONG/MIXED/HOLE")
    return Grid("Acceptance by draft position, and audit", header, tuple(rows))


def _domain_row_grid(drafting: Sequence[ConditionSummary]) -> Grid:
    domains = sorted({domain for summary in drafting for domain in summary.per_domain})
    rows = []
    for summary in drafting:
        found = [summary.per_domain.get(domain) for domain in domains]
        values = (None if one is None else one.acceptance_length_micro.value for one in found)
        rows.append((label_text(summary.result.label), *(number(value, ".3f") for value in values)))
    header = ("condition", *map(printable, domains))
    return Grid("Acceptance length (micro) by domain", header, tuple(rows))


def _paired_row_grid(pairs: Sequence[PairedComparison]) -> Grid:
    """Differences to a reference of equal K, batch size and temperature, named by what differs."""
    rows = []
    for pair in pairs:
        shared = set(pair.condition.split()) - set(BACKENDS)
        other = " ".join(word for word in pair.reference.split() if word not in shared)
        names = ("acceptance_length_micro", "acceptance_rate")
        cells = (interval(pair.differences[name], "+.3f") for name in names)
        rows.append((label_text(pair.condition), label_text(other), *cells))
    header = ("condition", "minus", "acceptance length (micro)", "acceptance rate")
    return Grid("Paired difference over the same prompts", header, tuple(rows))


def _cost_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    """Where a step without prompt rows spends its time, and the speed-up that this predicts."""

    def seconds(name: str) -> Cell:
        return lambda s: number(getattr(s.cost, f"{name}_s"), ".2f", scale=1e3)

    def model(figure: Callable[[ConditionSummary], float | None]) -> Cell:
        return lambda s: number(figure(s) if s.result.num_speculative_tokens else None, ".3f")

    columns = {name: seconds(name) for name in ("target", "verify", "draft", "host")} | {
        "c": model(lambda s: s.cost and s.cost.draft_cost),
        "v": model(lambda s: s.cost and s.cost.verify_cost),
        "predicted": model(lambda s: s.cost and s.cost.predicted_ratio),
        "measured": model(lambda s: s.speed.ratio_decode),
    }
    title = "Step without prompt rows [ms], and speed-up = tau / (1 + K c + v)"
    return _row_grid(title, columns, [one for one in summaries if one.cost is not None])


def _thinking_grid(drafting: Sequence[ConditionSummary]) -> Grid:
    rows = []
    for summary in drafting:
        if (split := summary.thinking) is not None:
            inside, outside = split.acceptance_length_thinking, split.acceptance_length_answer
            cells = (interval(inside), str(split.num_rounds_thinking), interval(outside))
            label = label_text(summary.result.label)
            rows.append((label, *cells, str(split.num_rounds_answer)))
    header = ("condition", "in thinking", "rounds", "in the answer", "rounds")
    return Grid("Acceptance length (micro) by part of the text", header, tuple(rows))


def _score_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    """What is right, what a rule loses to K = 0, and the speed that it gives for that."""

    def lost(summary: ConditionSummary) -> str:
        points = summary.score and summary.score.points_to_baseline
        return interval(points, "+.1f") if points else UNDEFINED

    columns: dict[str, Cell] = {
        "right": lambda s: f"{s.score.num_right} of {s.score.num_prompts}" if s.score else "",
        "score [points]": lambda s: interval(s.score.points, ".1f") if s.score else "",
        "minus K = 0": lost,
        "tokens/s": lambda s: number(s.speed.end_to_end.value, ".1f"),
        "ratio": lambda s: number(s.speed.ratio_end_to_end, ".3f"),
    }
    scored = [summary for summary in summaries if summary.score is not None]
    return _row_grid("Right answers, and speed", columns, scored)
