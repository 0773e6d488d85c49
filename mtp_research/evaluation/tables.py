"""The tables of a report: metrics as rows, conditions as columns, readable at 120 columns.

A `Grid` is a table as text; `rich_table` draws it in a terminal, `plain_text` anywhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.summary import ConditionSummary, PairedComparison

if TYPE_CHECKING:
    from rich.table import Table

CONDITIONS_PER_TABLE = 3
MAX_NAME_CHARACTERS = 24
MAX_LABEL_CHARACTERS = 48  # of a condition in a table with one row each
UNDEFINED = "-"
_FINDINGS = ("WRONG", "MIXED", "HOLE")
# Rows that are left out where nothing was measured.
_OPTIONAL = (
    "  least / most of a pass",
    "tokens/s, decode only",
    "  ratio to baseline, decode",
    "tokens/s, batch full",
    "  ratio to baseline, full",
    "device / wall of a pass [s]",
    "peak memory [MiB]",
)

Cell = Callable[[ConditionSummary], str]


@dataclass(frozen=True)
class Grid:
    """One table as text: every row has one cell per entry of `header`."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def condition_grids(summaries: Sequence[ConditionSummary], *, title: str) -> list[Grid]:
    """Figures by condition, then acceptance length by domain; three conditions a table."""
    drafting = [summary for summary in summaries if summary.num_speculative_tokens > 0]
    figures = [_metric_grid(group, title) for group in _groups(summaries)]
    return figures + [_domain_grid(group) for group in _groups(drafting)]


def paired_grid(pair: PairedComparison) -> Grid:
    """The differences of one condition to another, prompt by prompt."""
    lengths = {
        "acceptance length (micro)": "acceptance_length_micro",
        "acceptance length (macro)": "acceptance_length_macro",
        "acceptance rate": "acceptance_rate",
    }
    positions = {f"  {name}": name for name in pair.differences if name.startswith("p_")}
    del positions["  p_1/p_0"]  # it is p_1
    wanted = lengths | dict(sorted(positions.items(), key=lambda item: "/" in item[0]))
    return Grid(
        title="Paired difference over the same prompts",
        header=("", f"{printable(pair.condition)} - {printable(pair.reference)}"),
        rows=tuple((row, interval(pair.differences[name], "+.3f")) for row, name in wanted.items()),
    )


def plain_text(grid: Grid) -> str:
    """The table in plain columns."""
    table = (grid.header, *grid.rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(grid.header))]
    lines = [_plain_row(row, widths) for row in table]
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([grid.title, rule, lines[0], rule, *lines[1:], rule])


def rich_table(grid: Grid) -> "Table":
    """The table for a rich console; cells are literal text, never markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(grid.title), title_justify="left")
    for position, name in enumerate(grid.header):
        table.add_column(Text(name), justify="right" if position else "left", no_wrap=True)
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def printable(text: str, *, limit: int = MAX_NAME_CHARACTERS) -> str:
    """A name from a file or an override: control characters escaped, at most `limit` characters."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return shown[: limit - 3] + "..." if len(shown) > limit else shown


def interval(figure: Estimate, form: str = ".3f") -> str:
    """`value [low, high]`, or a dash."""
    if figure.value is None or figure.low is None or figure.high is None:
        return UNDEFINED
    return f"{figure.value:{form}} [{figure.low:{form}}, {figure.high:{form}}]"


def number(value: float | None, form: str, *, scale: float = 1.0) -> str:
    """`value * scale`, or a dash."""
    return UNDEFINED if value is None else f"{value * scale:{form}}"


def _groups(summaries: Sequence[ConditionSummary]) -> list[Sequence[ConditionSummary]]:
    starts = range(0, len(summaries), CONDITIONS_PER_TABLE)
    return [summaries[start : start + CONDITIONS_PER_TABLE] for start in starts]


def _metric_grid(summaries: Sequence[ConditionSummary], title: str) -> Grid:
    num_positions = max(summary.num_speculative_tokens for summary in summaries)
    metrics = [*_acceptance_rows(num_positions), *_speed_rows(), *_honesty_rows()]
    rows = [(name, *(cell(summary) for summary in summaries)) for name, cell in metrics]
    return Grid(
        title=title,
        header=("", *(_heading(summary) for summary in summaries)),
        rows=tuple(row for row in rows if row[0] not in _OPTIONAL or set(row[1:]) != {UNDEFINED}),
    )


def _acceptance_rows(num_positions: int) -> list[tuple[str, Cell]]:
    """Lengths, rate, p_1 .. p_K and p_2/p_1 .. p_K/p_{K-1}; p_1/p_0 is p_1."""
    rows: list[tuple[str, Cell]] = [
        ("prompts finished", lambda s: f"{s.acceptance.num_prompts} of {s.num_prompts}"),
        ("acceptance length (micro)", lambda s: interval(s.acceptance.acceptance_length_micro)),
        ("acceptance length (macro)", lambda s: interval(s.acceptance.acceptance_length_macro)),
        ("acceptance rate", lambda s: interval(s.acceptance.acceptance_rate)),
    ]
    rows += [(f"  p_{i}", _position(i)) for i in range(1, num_positions + 1)]
    rows += [(f"  p_{i}/p_{i - 1}", _conditional(i)) for i in range(2, num_positions + 1)]
    return rows


def _position(i: int) -> Cell:
    return lambda s: _at(s.acceptance.acceptance_rate_per_position, i)


def _conditional(i: int) -> Cell:
    return lambda s: _at(s.acceptance.conditional_acceptance_rate_per_position, i)


def _at(figures: Sequence[Estimate], i: int) -> str:
    """The figure of position i (from 1); a condition with a smaller K has none."""
    return interval(figures[i - 1]) if i <= len(figures) else UNDEFINED


def _speed_rows() -> list[tuple[str, Cell]]:
    return [
        ("target forwards per token", lambda s: interval(s.acceptance.target_forwards_per_token)),
        ("tokens/s, end to end", lambda s: number(s.speed.tokens_per_s_end_to_end, ".1f")),
        ("  least / most of a pass", _spread),
        ("  ratio to baseline", lambda s: number(s.speed.ratio_end_to_end, ".3f")),
        ("tokens/s, decode only", lambda s: number(s.speed.tokens_per_s_decode, ".1f")),
        ("  ratio to baseline, decode", lambda s: number(s.speed.ratio_decode, ".3f")),
        ("tokens/s, batch full", lambda s: number(s.speed.tokens_per_s_full, ".1f")),
        ("  ratio to baseline, full", lambda s: number(s.speed.ratio_full, ".3f")),
        ("device / wall of a pass [s]", _device),
        ("first token [ms], median", lambda s: number(s.speed.ttft_s_median, ".1f", scale=1e3)),
        ("next token [ms], median / p95", _inter_token),
        ("rows per target step", lambda s: number(s.rows_per_step, ".1f")),
        ("peak memory [MiB]", lambda s: number(s.peak_memory_bytes, ".0f", scale=2.0**-20)),
    ]


def _honesty_rows() -> list[tuple[str, Cell]]:
    return [
        ("rounds", lambda s: str(s.acceptance.num_rounds)),
        ("rounds with r >= 2", lambda s: str(s.acceptance.num_rounds_two_rejected)),
        ("audit " + "/".join(_FINDINGS), audit_cell),
        ("lossless", lambda s: printable(s.lossless)),
    ]


def _spread(summary: ConditionSummary) -> str:
    speed = summary.speed
    if speed.num_passes == 1:
        return UNDEFINED
    ends = (speed.tokens_per_s_end_to_end_low, speed.tokens_per_s_end_to_end_high)
    return " / ".join(number(end, ".1f") for end in ends)


def _device(summary: ConditionSummary) -> str:
    speed = summary.speed
    if speed.device_s is None:
        return UNDEFINED
    return " / ".join(number(seconds, ".2f") for seconds in (speed.device_s, speed.wall_s))


def _inter_token(summary: ConditionSummary) -> str:
    speed = summary.speed
    parts = (speed.inter_token_s_median, speed.inter_token_s_p95)
    return " / ".join(number(part, ".2f", scale=1e3) for part in parts)


def audit_cell(summary: ConditionSummary) -> str:
    """Slots by finding, or a dash."""
    audit = summary.audit
    return UNDEFINED if audit is None else " / ".join(str(audit[name]) for name in _FINDINGS)


def _domain_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    domains = sorted({domain for summary in summaries for domain in summary.per_domain})
    rows = []
    for domain in domains:
        figures = [summary.per_domain[domain] for summary in summaries]
        num_prompts = max(figure.num_prompts for figure in figures)
        cells = (interval(figure.acceptance_length_micro) for figure in figures)
        rows.append((printable(domain), str(num_prompts), *cells))
    return Grid(
        title="Acceptance length (micro) by domain",
        header=("domain", "prompts", *(_heading(summary) for summary in summaries)),
        rows=tuple(rows),
    )


def _heading(summary: ConditionSummary) -> str:
    return f"{printable(summary.label)} (K={summary.num_speculative_tokens})"


def _plain_row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
    return "  ".join([first.ljust(widths[0]), *numbers]).rstrip()
