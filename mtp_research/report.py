"""A page, tables and charts from the results of some evaluations.

    python -m mtp_research.report results.json [more.json ...] --out folder

Writes into the folder: `report.html` (one file that loads nothing), `figures.csv` (every acceptance
figure in full precision), `tables/*.csv` and `tables/*.tex`, `charts/*.svg`. Every number is
computed again from the per-request counters and must equal the stored one.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_research.errors import EnvironmentFault, IntegrityError
from mtp_research.evaluation.figures import Figure, run_figures, shared_figures, slug
from mtp_research.evaluation.html_page import render_page
from mtp_research.evaluation.policy_matrix import policy_matrices
from mtp_research.evaluation.report_tables import overview_grid, run_grids
from mtp_research.evaluation.results import write_atomically
from mtp_research.evaluation.runs import Run, entries, read_runs
from mtp_research.evaluation.svg import standalone
from mtp_research.evaluation.table_files import figures_csv, grid_csv, grid_latex
from mtp_research.evaluation.tables import Grid
from mtp_research.provenance import redact

PAGE_FILE = "report.html"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code: 0, 2 arguments, 3 integrity, 4 environment."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.report",
        description="One HTML page, CSV, LaTeX and SVG from the results of evaluations.",
    )
    parser.add_argument("results", nargs="+", type=Path, help="results.json, or its folder")
    parser.add_argument("--out", required=True, type=Path, help="folder of the report")
    options = parser.parse_args(argv)
    try:
        runs = read_runs(options.results)
        page = write_report(options.out, runs)
        _require_outputs(runs, page)
    except (IntegrityError, EnvironmentFault) as fault:
        sys.stderr.write(f"error: {redact(str(fault))}\n")
        return fault.exit_code
    sys.stdout.write(f"report: {page}\n")
    return 0


def write_report(folder: Path, runs: Sequence[Run]) -> Path:
    """Write every file of a report; return the path of its page.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    files = {folder / PAGE_FILE: render_page(runs), folder / "figures.csv": figures_csv(runs)}
    for stem, grid in _named_grids(runs):
        files[folder / "tables" / f"{stem}.csv"] = grid_csv(grid)
        files[folder / "tables" / f"{stem}.tex"] = grid_latex(grid)
    for stem, figure in _named_figures(runs):
        files[folder / "charts" / f"{stem}.svg"] = standalone(figure.markup)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
    except OSError as fault:
        raise EnvironmentFault(
            f"--out must be a writable folder, got {folder} ({fault.strerror}); set --out PATH."
        ) from None
    return folder / PAGE_FILE


def _named_grids(runs: Sequence[Run]) -> Iterator[tuple[str, Grid]]:
    """Every table with its file name, numbered in the order of the page."""
    found = entries(runs)
    shared = [overview_grid(found), *(m.grid for m in policy_matrices(found))]
    named = [("all", shared)] if len(runs) > 1 else []
    named += [(slug(run.name), run_grids(run.report)) for run in runs]
    for name, grids in named:
        for number, grid in enumerate(grids, start=1):
            yield f"{name}-{number:02d}-{slug(grid.title)}", grid


def _named_figures(runs: Sequence[Run]) -> Iterator[tuple[str, Figure]]:
    named = [("all", shared_figures(entries(runs)))] if len(runs) > 1 else []
    named += [(slug(run.name), run_figures(run.report)) for run in runs]
    for name, figures in named:
        for number, figure in enumerate(figures, start=1):
            yield f"{name}-{number:02d}-{figure.stem}", figure


def _require_outputs(runs: Sequence[Run], page: Path) -> None:
    """Refuse to call a report whole in which a condition has no figure at all.

    Raises:
        IntegrityError: names the conditions; the report is written all the same.
    """
    empty = [
        f"{run.name}: {summary.label}"
        for run in runs
        for summary in run.report.summaries
        if not summary.acceptance.num_prompts
    ]
    if empty:
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)}; their figures are "
            f"undefined, evaluate again. Report: {page}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
