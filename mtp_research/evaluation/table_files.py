"""Tables as CSV and LaTeX, and every acceptance figure in full precision as one CSV.

Names come from prompt files and overrides: LaTeX's special characters are escaped, and a cell that
a spreadsheet would take for a formula is marked as text.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from mtp_research.evaluation.entries import entries
from mtp_research.evaluation.runs import Run
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.statistics import AcceptanceStatistics
from mtp_research.evaluation.svg_parts import label_text
from mtp_research.evaluation.tables import Grid, printable

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
_FIGURES_HEADER = (
    "run", "head", "condition", "policy", "K", "domain", "figure", "value", "low", "high",
)  # fmt: skip


def grid_csv(grid: Grid) -> str:
    """The table as CSV: a header line, then its rows, cells as the table shows them."""
    return _csv([grid.header, *grid.rows])


def grid_latex(grid: Grid, *, source: str = "") -> str:
    """The table as a LaTeX `tabular`, its title and source in comments; needs no package."""
    columns = "l" + "r" * (len(grid.header) - 1)
    lines = [" & ".join(map(_latex, cells)) + r" \\" for cells in (grid.header, *grid.rows)]
    return "\n".join(
        [
            f"% {one_line(grid.title)}",
            *([f"% {one_line(source)}"] if source else []),
            rf"\begin{{tabular}}{{{columns}}}",
            r"\hline",
            lines[0],
            r"\hline",
            *lines[1:],
            r"\hline",
            r"\end{tabular}",
            "",
        ]
    )


def figures_csv(runs: Iterable[Run]) -> str:
    """Every acceptance figure with its interval, one a line; an empty domain means all prompts."""
    rows: list[Sequence[str]] = [_FIGURES_HEADER]
    for entry in entries(runs):
        summary = entry.summary
        start = (entry.run.name, entry.head_label, label_text(summary.label),
                 str(summary.policy or ""), str(summary.num_speculative_tokens))  # fmt: skip
        by_domain = {"": summary.acceptance} | summary.per_domain
        rows += [
            (*start, printable(domain), name, *map(_exact, figure))
            for domain, statistics in by_domain.items()
            for name, figure in _figures(statistics)
        ]
    return _csv(rows)


def one_line(text: str) -> str:
    """A title or command whole, on one line, without control characters: safe as a comment."""
    return "".join(c for c in text if c.isprintable())


def _figures(statistics: AcceptanceStatistics) -> Iterator[tuple[str, Estimate]]:
    yield "acceptance_length_micro", statistics.acceptance_length_micro
    yield "acceptance_length_macro", statistics.acceptance_length_macro
    yield "acceptance_rate", statistics.acceptance_rate
    yield "target_forwards_per_token", statistics.target_forwards_per_token
    for i, figure in enumerate(statistics.acceptance_rate_per_position, start=1):
        yield f"p_{i}", figure
    conditional = statistics.conditional_acceptance_rate_per_position
    for i, figure in enumerate(conditional, start=1):
        yield f"p_{i}/p_{i - 1}", figure


def _exact(value: float | None) -> str:
    return "" if value is None else repr(value)


def _csv(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(_no_formula, row) for row in rows])
    return text.getvalue()


def _no_formula(cell: str) -> str:
    """`'=1+1` for `=1+1`; a number with its sign and a lone dash stay as they are."""
    is_signed_number = cell[:1] in "+-" and cell[1:2].isdigit()
    risky = cell.startswith(("=", "@", "+", "-")) and cell != "-" and not is_signed_number
    return f"'{cell}" if risky else cell


def _latex(cell: str) -> str:
    return "".join(_LATEX.get(character, character) for character in cell)
