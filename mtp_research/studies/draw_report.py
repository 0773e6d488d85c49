"""A page, tables and charts from the results of some evaluations, studies and training runs.

    mtp report results.json [more ...] [--out folder]

Takes results of `eval.py`, the `matrix.json` of `train.py experiment=policy_matrix`, the
`fault_price.json` of `eval.py experiment=fault_price` and the `metrics.jsonl` of `train.py`; a
folder stands for such files in it, else for those of its folders, such as the parts of a sweep.
Writes into the folder: `report.html` (one file that loads nothing), `figures.csv` (every figure as
a number), `tables.md`, `tables/*.tex` and `charts/*.svg`, `.pdf` and `.png`. Every number is
computed again from the counters of the files, and must equal the stored one.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_research.evaluation.report.stored import PACKED_FILE, RESULTS_FILE, read_runs
from mtp_research.evaluation.stats.fault_study import STUDY_FILE
from mtp_research.evaluation.stats.matrix_seeds import MATRIX_FILE
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import write_error
from mtp_research.training.tracking import METRICS_FILE

if TYPE_CHECKING:
    from mtp_research.evaluation.report.page import Section

_RESULTS = (RESULTS_FILE, PACKED_FILE)
_FILES = (MATRIX_FILE, STUDY_FILE, *_RESULTS, METRICS_FILE)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code: 0, 2 arguments, 3 integrity, 4 environment."""
    about = "One HTML page, CSV, LaTeX, Markdown and charts from the results of runs."
    parser = OptionParser(prog="mtp report", description=about)
    taken = "a file, its folder, or a folder of such folders"
    parser.add_argument("results", nargs="+", type=Path, help=taken)
    parser.add_argument("--out", type=Path, help="default: `report` beside the first file")
    options = parser.parse_args(argv)
    from mtp_research.evaluation.report.page import results_sections, write_report  # extra `report`

    first: Path = options.results[0]
    folder = options.out or (first if first.is_dir() else first.parent) / "report"
    try:
        files = [file for path in options.results for file in _files(path)]
        studies = [file for file in files if file.name in set(_FILES) - {*_RESULTS}]
        results = [file for file in files if file not in studies]
        with WorkProgress("computing figures again", total=len(results), unit="runs") as progress:
            runs = read_runs(results, on_read=progress.advance)
        sections = [*_study_sections(studies), *results_sections(runs)]
        num_charts = sum(len(section.drawn) for section in sections)
        with WorkProgress("drawing", total=num_charts, unit="charts") as progress:
            page = write_report(folder, sections, on_chart=progress.advance)
        _require_outputs(sections, page)
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        write_error(str(fault))
        return fault.exit_code
    sys.stdout.write(f"report: {page}\n")
    return 0


def _files(path: Path) -> list[Path]:
    """The file itself, or every file that a report can show: of the folder, else of those in it."""
    if not path.is_dir():
        return [path]
    parts = sorted((part for part in path.iterdir() if part.is_dir()), key=_number_order)
    for folders in ([path], parts):
        found = [one / name for one in folders for name in _FILES if (one / name).is_file()]
        if found:
            return found
    return [path]


def _number_order(path: Path) -> list[tuple[int, str]]:
    """`batch_8` before `batch_32`: numbers in a name count as numbers."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _study_sections(files: Sequence[Path]) -> "list[Section]":
    from mtp_research.evaluation.report.charts import slug
    from mtp_research.studies.study_pages import fault_section, matrix_section, training_section

    sections: list[Section] = []
    for number, file in enumerate(files, start=1):
        folder = slug(file.resolve().parent.name)
        names = (folder, f"{folder}-{slug(file.stem)}", f"{folder}-{number}")
        taken = {section.name for section in sections}
        name = next(name for name in names if name not in taken)
        if file.name == METRICS_FILE:
            sections.append(training_section(file, name=name))
        else:
            make = matrix_section if file.name == MATRIX_FILE else fault_section
            sections.append(make(file.parent, name=name))
    return sections


def _require_outputs(sections: "Sequence[Section]", page: Path) -> None:
    """Refuse to call a report whole in which a condition has no figure at all."""
    empty = [label for section in sections for label in section.empty]
    if empty:
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)}; their figures are "
            f"undefined, evaluate again. Report: {page}"
        )
