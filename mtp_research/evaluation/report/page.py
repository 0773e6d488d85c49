"""A report on disk: one HTML page, its charts as files, its tables in LaTeX and Markdown, one CSV.

A `Section` holds what one run, all runs together or one study have to say; page, files and W&B take
their content from it, so that they cannot differ. `page.html.j2` lays it out: it loads nothing, has
no scripts and adapts to 400 pixels by CSS alone. Every string that comes from a file is bounded,
freed of control characters and escaped.
"""

# pandas ships no stubs, so that a selection of rows is taken for a Series, a DataFrame or an array.
# pyright: reportArgumentType=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
import pandas as pd
from markupsafe import Markup

from mtp_research.evaluation.report import comparable, notes
from mtp_research.evaluation.report.charts import Chart, Missing, chart_files, inline_svg, slug
from mtp_research.evaluation.report.frame import (
    figures_csv,
    frame_of,
    grid_latex,
    overview,
    run_tables,
    select,
    speed_tables,
    square,
)
from mtp_research.evaluation.report.grids import Grid, report_grids
from mtp_research.evaluation.report.notes import UNDEFINED, headline
from mtp_research.evaluation.report.run_charts import matrix_cells, run_charts, sweep_charts
from mtp_research.evaluation.report.stored import PromptEntry, Report, Run, mapping, rule_of
from mtp_research.evaluation.report.terminal import markdown_table
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.files import write_atomically

PAGE_FILE = "report.html"
FIGURES_FILE = "figures.csv"
MAX_CHARACTERS = 400  # of a string from a file
MAX_NOTE = 1000
MAX_FACT = 4000  # of a command, which is to be typed again
MAX_LISTED_PROMPTS = 300
_MAX_HEADLINES = 5


@dataclass(frozen=True)
class Section:
    """One part of a page."""

    name: str  # unique on the page; files of its tables and charts start with it
    title: str
    charts: Sequence[Chart | Missing]  # and what could not be drawn
    grids: Sequence[Grid]
    frame: pd.DataFrame = field(default_factory=pd.DataFrame)  # empty if it repeats others
    headline: str = ""  # the answer in one sentence, without its full stop
    caption: str = ""  # what all charts share: prompts, dtype, machine
    command: str = ""  # how the numbers were made
    facts: Mapping[str, str] = field(default_factory=dict)  # settings and provenance
    warnings: Sequence[str] = ()  # what a reader must know before the figures
    notes: Sequence[str] = ()  # definitions; a page shows each once
    prompts: Sequence[PromptEntry] = ()  # ids and hashes
    empty: Sequence[str] = ()  # conditions without a finished request: such a report is not whole

    @property
    def drawn(self) -> list[Chart]:
        """The charts that could be drawn."""
        return [one for one in self.charts if isinstance(one, Chart)]

    @property
    def missing(self) -> list[Missing]:
        """The others."""
        return [one for one in self.charts if isinstance(one, Missing)]


def results_sections(runs: Sequence[Run]) -> list[Section]:
    """One section a run; before them what several runs say together."""
    if len(runs) < 2:
        return [_run_section(run, is_alone=True) for run in runs]
    return [_shared_section(runs), *(_run_section(run, is_alone=False) for run in runs)]


def write_report(
    folder: Path, sections: Sequence[Section], *, on_chart: Callable[[], object] = lambda: None
) -> Path:
    """Write every file of a report; return the path of its page. `on_chart`: after each chart."""
    page, drawings = folder / PAGE_FILE, {}
    frames = [section.frame for section in sections if len(section.frame)]
    files: dict[Path, str | bytes] = {folder / "tables.md": _markdown(sections)}
    if frames:
        files[folder / FIGURES_FILE] = figures_csv(pd.concat(frames))
    for section in sections:
        source = f"{section.caption}. {section.command}"
        for number_, grid in enumerate(section.grids, start=1):
            stem = f"{section.name}-{number_:02d}-{slug(grid.title)}"
            files[folder / "tables" / f"{stem}.tex"] = grid_latex(grid, source=source)
        for number_, chart in enumerate(section.drawn, start=1):
            stem = f"{section.name}-{number_:02d}-{chart.stem}"
            drawn = chart_files(chart, description=f"{chart.note} {source}")
            files |= {folder / "charts" / f"{stem}.{kind}": data for kind, data in drawn.items()}
            drawings[section.name, chart.title] = inline_svg(chart, drawn["svg"])
            on_chart()
    files[page] = render_page(sections, drawings)
    try:
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                write_atomically(path, content)
    except OSError as fault:
        raise EnvironmentFault(
            f"--out must be a writable folder, got {folder} ({fault.strerror}); set --out PATH."
        ) from None
    return page


def render_page(
    sections: Sequence[Section], drawings: Mapping[tuple[str, str], str], *,
    title: str = "Acceptance report",
) -> str:  # fmt: skip
    """The whole page; `drawings` holds inline svg by names of section and chart."""
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    named = {"word_columns": _word_columns, "prompt_grid": _prompt_grid}
    environment.filters |= {"clean": clean, "prose": _prose, **named}
    return environment.get_template("page.html.j2").render(
        title=title,
        sections=sections,
        drawings={key: Markup(svg) for key, svg in drawings.items()},  # of chart_files, escaped
        notes=list(dict.fromkeys(note for section in sections for note in section.notes)),
        max_note=MAX_NOTE,
        max_fact=MAX_FACT,
        max_prompts=MAX_LISTED_PROMPTS,
        max_headlines=_MAX_HEADLINES,
    )


def clean(text: object, limit: int = MAX_CHARACTERS) -> str:
    """Text from a file without control characters, at most `limit` characters."""
    raw = str(text)
    shown = "".join(c for c in raw[: 2 * limit] if c.isprintable())
    is_long = len(raw) > 2 * limit or len(shown) > limit
    return f"{shown[: limit - 3]}..." if is_long else shown


def record_facts(record: Mapping[str, object]) -> dict[str, str]:
    """How a run was made, from its record (`provenance.run_record`)."""
    git, versions = mapping(record, "git"), mapping(record, "versions")
    state = " with uncommitted changes" if git.get("dirty") else ""
    return known_facts({
        "command": command_of(record),
        "started": str(record.get("started_at") or ""),
        "code": f"{str(git.get('sha'))[:12]}{state}" if git else "",
        "machine": comparable.machine_of(record),
        "target hash": comparable.target_hash(record),
        "versions": pairs_text(versions, ("python", "torch", "triton", "transformers")),
    })  # fmt: skip


def known_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Those that say something."""
    return {name: value for name, value in facts.items() if value.strip()}


def command_of(record: Mapping[str, object]) -> str:
    """The command of a run, as it can be typed again."""
    return str(record.get("command") or "")


def pairs_text(values: Mapping[str, object], names: Iterable[str]) -> str:
    """The named values, such as `python 3.12, torch 2.11`."""
    return ", ".join(f"{name} {values[name]}" for name in names if name in values)


def _shared_section(runs: Sequence[Run]) -> Section:
    found = comparable.entries(runs)
    frame = frame_of(found)
    speeds, matrices = speed_grids(frame, found), _matrix_grids(frame, found)
    return Section(
        name="all",
        title="All runs",
        charts=sweep_charts(frame, found),
        grids=[overview(select(frame, comparable.drafting(found))), *speeds, *matrices],
        caption=", ".join(dict.fromkeys(comparable.machine_of(run.report.run) for run in runs)),
        command="; ".join(command_of(run.report.run) for run in runs),
        warnings=comparable.drift_warnings(found),
        notes=[
            notes.LETTERS,
            "Conditions share a chart or a matrix only where target, machine, prompts, dtype, "
            "temperature, verification rule, limits of the text, K, rule for the number of drafts "
            "and batch size agree, but for the one on the axis. Batch sizes may have prompts of "
            "their own: then only speeds share a chart, each over plain decoding of its own "
            "prompts.",
            *([notes.RATIO_NOTE] if speeds else []),
        ],
    )


def _run_section(run: Run, *, is_alone: bool) -> Section:
    report, found = run.report, comparable.entries([run])
    frame, paragraphs = frame_of(found), notes.note_paragraphs(run.report)
    machine = comparable.machine_of(report.run)
    shared = sweep_charts(frame, found) if is_alone else []
    speeds = speed_grids(frame, found) if is_alone else []
    matrices = _matrix_grids(frame, found) if is_alone else []
    return Section(
        name=slug(run.name),
        title=run.name,
        charts=[*shared, *run_charts(frame)],
        grids=[*report_grids(report), *run_tables(frame), *speeds, *matrices],
        frame=frame,
        headline=headline(report),
        caption=f"n = {len(report.prompts)} prompts, {report.dtype}, {machine}",
        command=command_of(report.run),
        facts=record_facts(report.run) | _settings(report),
        warnings=[text for text in paragraphs if text.startswith(notes.WARNINGS)],
        notes=[
            *(notes.LETTERS, notes.HEAD_WORDS, notes.POLICY_WORDS, notes.FAULT_WORDS, notes.RATES),
            *(text for text in paragraphs if not text.startswith(notes.WARNINGS)),
            *([notes.RATIO_NOTE] if speeds else []),
        ],
        prompts=report.prompts,
        empty=[
            f"{run.name}: {one.result.label}"
            for one in report.summaries
            if not one.acceptance.num_prompts
        ],
    )


def speed_grids(frame: pd.DataFrame, found: Sequence[comparable.Entry]) -> list[Grid]:
    """Speed against K = 0 by batch size and K, a table or two for each head and policy."""
    grids = []
    for (setting, name), members in comparable.speed_groups(found).items():
        shared = comparable.describe(setting, without="batch_size")
        grids += speed_tables(select(frame, members), name, shared)
    return grids


def _matrix_grids(frame: pd.DataFrame, found: Sequence[comparable.Entry]) -> list[Grid]:
    title = "Acceptance length by head and decode policy"
    return [
        square(
            matrix_cells(frame, matrix), f"{title} ({comparable.describe(matrix.setting)})", "head"
        )
        for matrix in comparable.policy_matrices(found)
    ]


def _settings(report: Report) -> dict[str, str]:
    def each(values: Iterable[object]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    config, found = report.config, report.conditions
    return known_facts({
        "target": str(mapping(config, "model").get("path") or ""),
        "heads": each(s.head for s in found) or str(mapping(config, "spec").get("head") or ""),
        "head conventions": "; ".join(
            f"{name}: {phrase}" for name, phrase in notes.head_conventions(report.run).items()
        ),
        "engines": each(s.first.backend for s in found),
        "drafts K": each(s.num_speculative_tokens for s in found),
        "number of drafts": each(rule_of(s, report) for s in found if s.num_speculative_tokens > 0),
        "batch": each(s.max_num_requests for s in found),
        "temperature": each(s.temperature for s in found),
        "verification": each(s.verify for s in found),
        "sampling": pairs_text(mapping(config, "sampling"), ("top_k", "top_p", "max_new_tokens")),
        "dtype, seed": f"{report.dtype}, {report.seed}",
        "passes": each(len(s.passes) for s in found),
    })  # fmt: skip


def _markdown(sections: Sequence[Section]) -> str:
    parts = []
    for section in sections:
        parts += [f"## {clean(section.title)}", *(clean(w, MAX_NOTE) for w in section.warnings)]
        for grid in section.grids:
            cells = [[cell.replace("|", "/") for cell in row] for row in (grid.header, *grid.rows)]
            parts.append(f"{clean(grid.title)}\n\n{markdown_table(cells[0], cells[1:])}")
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    """A caption or note in which no line begins with a unit or ends within `K = 0` or at `*`."""
    shown = re.sub(r" (?=%|MiB\b)|(?<=\*) ", "\u00a0", clean(text, MAX_NOTE))
    return re.sub(r"\b([A-Za-z]) = (?=\d)", "\\1\u00a0=\u00a0", shown)


def _word_columns(grid: Grid) -> list[bool]:
    """Which columns hold names, which stand at their left; numbers stand at their right."""
    cells = [[row[i] for row in grid.rows] for i in range(len(grid.header))]
    known = [[cell for cell in column if cell not in ("", UNDEFINED)] for column in cells]
    return [
        bool(column) and not any(re.match(r"[-+]?\d", cell) for cell in column) for column in known
    ]


def _prompt_grid(prompts: Sequence[PromptEntry]) -> Grid:
    """Ids and hashes of the prompts; a results file holds no text of theirs."""
    rows = [(p.question_id, p.category, p.format, p.sha256[:16]) for p in prompts]
    header = ("id", "category", "format", "sha256")
    return Grid("sha256 is of format and text", header, tuple(rows[:MAX_LISTED_PROMPTS]))
