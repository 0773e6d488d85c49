"""What an evaluation prints: warnings, the answer in a sentence, a short table.

Every table and definition is in `table.txt`, on the page, and printed with `verbose=true`. What is
wider than the terminal is folded: fewer conditions side by side, then one below the other. Needs
neither pandas nor a screen; rich draws the tables of `verbose=true` where it is installed.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_research.evaluation.report.grids import PER_TABLE, Grid, report_grids, short_grids
from mtp_research.evaluation.report.notes import (
    WARNINGS,
    headline,
    note_paragraphs,
)
from mtp_research.evaluation.report.stored import Report
from mtp_research.runtime.files import write_atomically

if TYPE_CHECKING:
    from rich.table import Table

PAGE_WIDTH = 120  # columns
TABLE_FILE = "table.txt"


def print_report(
    report: Report,
    *,
    verbose: bool = False,
    width: int | None = None,
    stored_at: Path | None = None,
) -> None:
    """The answer on standard output, with `verbose` every table and definition.

    By default as wide as the terminal, at most `PAGE_WIDTH`.
    """
    if width is None:
        has_screen = sys.stdout.isatty()
        width = min(PAGE_WIDTH, shutil.get_terminal_size().columns) if has_screen else PAGE_WIDTH
    if verbose:
        _print_all(report, width)
    else:
        print(render_short(report, width=width))
    if stored_at is not None:
        more = "" if verbose else f"; all tables and definitions: {TABLE_FILE} there, verbose=true"
        line = f"results: {stored_at}{more}"
        print(textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False))


def render_short(report: Report, *, width: int = PAGE_WIDTH) -> str:
    """Warnings, the answer and the main figures, as plain text of at most `width` columns."""
    tables = map(plain_text, _fitting(short_grids, report, width))
    return "\n\n".join([*_opening(report, width), *tables])


def render_text(report: Report, *, width: int = PAGE_WIDTH) -> str:
    """Everything as plain text of at most `width` columns: warnings and the answer first."""
    parts = [*_opening(report, width), *map(plain_text, _fitting(report_grids, report, width))]
    return "\n\n".join([*parts, "\n".join(_definitions(report, width))]) + "\n"


def _print_all(report: Report, width: int) -> None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        print(render_text(report, width=width))
        return
    console = Console(width=width, highlight=False)
    for part in _opening(report, width):
        console.print(part, markup=False)
    for grid in _fitting(report_grids, report, width):
        console.print(rich_table(grid))
    console.print("\n".join(_definitions(report, width)), markup=False)


def _opening(report: Report, width: int) -> list[str]:
    """Warnings, then the answer: what must be read."""
    lines = [text for text in note_paragraphs(report) if text.startswith(WARNINGS)]
    parts = ["\n".join(part for text in lines for part in textwrap.wrap(text, width))]
    return [one for one in (*parts, textwrap.fill(headline(report), width)) if one]


def _definitions(report: Report, width: int) -> list[str]:
    lines = [text for text in note_paragraphs(report) if not text.startswith(WARNINGS)]
    return [part for text in lines for part in textwrap.wrap(text, width)]


def write_table(folder: Path, report: Report) -> None:
    """Write `table.txt`, whole or not at all."""
    write_atomically(folder / TABLE_FILE, render_text(report))


def plain_text(grid: Grid) -> str:
    """The table in plain columns."""
    table = (grid.header, *grid.rows)
    widths = [max(len(row[column]) for row in table) for column in range(len(grid.header))]
    lines = []
    for first, *others in table:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    rule = "-" * max(len(line) for line in lines)
    return "\n".join([grid.title, rule, lines[0], rule, *lines[1:], rule])


def rich_table(grid: Grid) -> "Table":
    """The table for a rich console; cells are literal text, never markup."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(grid.title), title_justify="left")
    for position, name in enumerate(grid.header):
        table.add_column(Text(name), justify="right" if position else "left")
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for the pages under docs/; cells hold no bar."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _fitting(make: Callable[..., list[Grid]], report: Report, width: int) -> list[Grid]:
    """Tables with as many conditions side by side as `width` columns hold, else none."""
    for per_table in range(PER_TABLE, 1, -1):
        grids = make(report, per_table=per_table)
        if all(_width(grid) < width for grid in grids):
            return grids
    return [fitted(grid, width) for grid in make(report, per_table=1)]


def fitted(grid: Grid, width: int) -> Grid:
    """The table itself, or folded where it is wider than `width` columns."""
    return grid if _width(grid) < width else _folded(grid)


def _width(grid: Grid) -> int:
    """Columns of the table with its frame."""
    columns = zip(grid.header, *grid.rows, strict=True)
    return 1 + sum(max(map(len, column)) + 3 for column in columns)


def _folded(grid: Grid) -> Grid:
    """One line a cell: each row below the other, its cells named by the header."""
    if len(grid.header) <= 2:
        return grid
    rows = []
    for name, *cells in grid.rows:
        rows.append((name.strip(), ""))
        rows += ((f"  {head}", cell) for head, cell in zip(grid.header[1:], cells, strict=True))
    return Grid(grid.title, (grid.header[0], ""), tuple(rows))
