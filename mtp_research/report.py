"""A page, tables and charts from the results of some evaluations.

    python -m mtp_research.report results.json [more ...] [--out folder]

Takes results of `eval.py`, the `matrix.json` of `train.py experiment=policy_matrix` and the
`fault_price.json` of `eval.py experiment=fault_price`; a folder stands for such files in it, else
for those of its folders, such as the parts of a sweep. Writes into the folder: `report.html` (one
file that loads nothing), `figures.csv` (every acceptance figure in full precision),
`tables/*.csv`, `tables/*.tex` and `charts/*.svg`. Every number is computed again from the counters
of the files, and must equal the stored one.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mtp_research.evaluation.figures import slug
from mtp_research.evaluation.html_page import render_page
from mtp_research.evaluation.results import RESULTS_FILE
from mtp_research.evaluation.runs import Run, read_runs
from mtp_research.evaluation.sections import Section, results_sections
from mtp_research.evaluation.stats.fault_study import STUDY_FILE
from mtp_research.evaluation.stats.matrix_seeds import MATRIX_FILE
from mtp_research.evaluation.study_sections import fault_section, matrix_section
from mtp_research.evaluation.svg_parts import standalone
from mtp_research.evaluation.table_files import figures_csv, grid_csv, grid_latex
from mtp_research.runtime.errors import EnvironmentFault, IntegrityError
from mtp_research.runtime.files import write_atomically
from mtp_research.runtime.provenance import redact

PAGE_FILE = "report.html"
_STUDIES = {MATRIX_FILE: matrix_section, STUDY_FILE: fault_section}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code: 0, 2 arguments, 3 integrity, 4 environment."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.report",
        description="One HTML page, CSV, LaTeX and SVG from the results of evaluations.",
    )
    parser.add_argument(
        "results", nargs="+", type=Path, help="a JSON file, its folder, or a folder of such folders"
    )
    parser.add_argument("--out", type=Path, help="default: `report` beside the first file")
    options = parser.parse_args(argv)
    folder = options.out or _folder(options.results[0]) / "report"
    try:
        files = [file for path in options.results for file in _files(path)]
        runs = read_runs([file for file in files if file.name not in _STUDIES])
        studies = _study_sections([file for file in files if file.name in _STUDIES])
        sections = [*studies, *results_sections(runs)]
        page = write_report(folder, sections, runs)
        _require_outputs(sections, page)
    except (IntegrityError, EnvironmentFault) as fault:
        sys.stderr.write(f"error: {redact(str(fault))}\n")
        return fault.exit_code
    sys.stdout.write(f"report: {page}\n")
    return 0


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _files(path: Path) -> list[Path]:
    """The file itself, or every file that a report can show: of the folder, else of those in it."""
    names = (MATRIX_FILE, STUDY_FILE, RESULTS_FILE)
    if not path.is_dir():
        return [path]
    parts = sorted((part for part in path.iterdir() if part.is_dir()), key=_number_order)
    for folders in ([path], parts):
        found = [one / name for one in folders for name in names if (one / name).is_file()]
        if found:
            return found
    return [path]


def _number_order(path: Path) -> list[tuple[int, str]]:
    """`batch_8` before `batch_32`: numbers in a name count as numbers."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _study_sections(files: Sequence[Path]) -> list[Section]:
    """A section for each; its name is the folder's, and unique."""
    sections: list[Section] = []
    for number, file in enumerate(files, start=1):
        folder = slug(file.resolve().parent.name)
        names = (folder, f"{folder}-{slug(file.stem)}", f"{folder}-{number}")
        taken = {section.name for section in sections}
        unique = next(name for name in names if name not in taken)
        sections.append(_STUDIES[file.name](file.parent, name=unique))
    return sections


def write_report(folder: Path, sections: Sequence[Section], runs: Sequence[Run]) -> Path:
    """Write every file of a report; return the path of its page.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    page = folder / PAGE_FILE
    files = {page: render_page(sections), folder / "figures.csv": figures_csv(runs)}
    for section in sections:
        files |= _section_files(folder, section)
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
    except OSError as fault:
        raise EnvironmentFault(
            f"--out must be a writable folder, got {folder} ({fault.strerror}); set --out PATH."
        ) from None
    return page


def _section_files(folder: Path, section: Section) -> dict[Path, str]:
    """Tables and charts of a section, numbered in the order of the page."""
    files = {}
    source = f"{section.caption}. {section.command}"
    for number, grid in enumerate(section.grids, start=1):
        stem = f"{section.name}-{number:02d}-{slug(grid.title)}"
        files[folder / "tables" / f"{stem}.csv"] = grid_csv(grid)
        files[folder / "tables" / f"{stem}.tex"] = grid_latex(grid, source=source)
    for number, figure in enumerate(section.charts, start=1):
        stem = f"{section.name}-{number:02d}-{figure.stem}"
        description = f"{figure.title}. {figure.note} {source}"
        chart = standalone(figure.markup, description=description)
        files[folder / "charts" / f"{stem}.svg"] = chart
    return files


def _require_outputs(sections: Sequence[Section], page: Path) -> None:
    """Refuse to call a report whole in which a condition has no figure at all.

    Raises:
        IntegrityError: names the conditions; the report is written all the same.
    """
    empty = [label for section in sections for label in section.empty]
    if empty:
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)}; their figures are "
            f"undefined, evaluate again. Report: {page}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
