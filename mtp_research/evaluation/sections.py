"""What a report page holds, before any HTML: sections with settings, warnings, figures and tables.

The page (`html_page.py`), the table and chart files (`mtp_research.report`) and W&B
(`wandb_tables.py`) all take their content from here, so that they cannot differ.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mtp_research.evaluation.batch_table import RATIO_NOTE, batch_grids, drift_warnings
from mtp_research.evaluation.entries import drafting, entries, machine_of, target_hash
from mtp_research.evaluation.figures import Figure, Missing, run_figures, slug
from mtp_research.evaluation.policy_matrix import policy_matrices
from mtp_research.evaluation.report import Report, note_paragraphs
from mtp_research.evaluation.report_tables import overview_grid, run_grids
from mtp_research.evaluation.runs import Run, mapping
from mtp_research.evaluation.stats.outcome import PromptEntry
from mtp_research.evaluation.sweep_figures import sweep_figures
from mtp_research.evaluation.tables import Grid
from mtp_research.evaluation.words import FAULT_WORDS, HEAD_WORDS, LETTERS, POLICY_WORDS, RATES

_WARNINGS = ("warning:", "skipped:")


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Attributes:
        name: unique on the page; file names of its tables and charts start with it.
        title: heading.
        figures: charts, and what could not be drawn.
        grids: tables.
        caption: what all figures share: prompts, dtype, machine.
        command: how the numbers were made.
        facts: settings and provenance, by name.
        warnings: what a reader must know before the figures.
        notes: definitions; a page shows each once.
        prompts: ids and hashes.
        empty: conditions without any finished request; a report with one is not whole.
    """

    name: str
    title: str
    figures: Sequence[Figure | Missing]
    grids: Sequence[Grid]
    caption: str = ""
    command: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    prompts: Sequence[PromptEntry] = ()
    empty: Sequence[str] = ()

    @property
    def charts(self) -> list[Figure]:
        """The figures that could be drawn."""
        return [figure for figure in self.figures if isinstance(figure, Figure)]


def results_sections(runs: Sequence[Run]) -> list[Section]:
    """One section a run; before them what several runs say together."""
    if len(runs) < 2:
        return [_run_section(run, is_alone=True) for run in runs]
    return [_shared_section(runs), *(_run_section(run, is_alone=False) for run in runs)]


def _shared_section(runs: Sequence[Run]) -> Section:
    found = entries(runs)
    speeds = batch_grids(found)
    matrices = [matrix.grid for matrix in policy_matrices(found)]
    return Section(
        name="all",
        title="All runs",
        figures=sweep_figures(found),
        grids=[overview_grid(drafting(found)), *speeds, *matrices],
        caption=", ".join(dict.fromkeys(machine_of(run.report.run) for run in runs)),
        command="; ".join(command_of(run.report.run) for run in runs),
        warnings=drift_warnings(found),
        notes=[
            LETTERS,
            "Conditions share a chart or a matrix only where target, machine, prompts, dtype, "
            "temperature, verification rule, limits of the text, K and batch size agree, but for "
            "the one on the axis. Batch sizes may have prompts of their own: then only speeds "
            "share a chart, each over plain decoding of its own prompts.",
            *([RATIO_NOTE] if speeds else []),
        ],
    )


def _run_section(run: Run, *, is_alone: bool) -> Section:
    report, found = run.report, entries([run])
    paragraphs = note_paragraphs(report)
    shared = sweep_figures(found) if is_alone else []
    matrices = [matrix.grid for matrix in policy_matrices(found)] if is_alone else []
    speeds = batch_grids(found) if is_alone else []
    return Section(
        name=slug(run.name),
        title=run.name,
        figures=[*shared, *run_figures(report)],
        grids=[*run_grids(report), *speeds, *matrices],
        caption=f"n = {len(report.prompts)} prompts, {report.dtype}, {machine_of(report.run)}",
        command=command_of(report.run),
        facts=record_facts(report.run) | _settings(report),
        warnings=[text for text in paragraphs if text.startswith(_WARNINGS)],
        notes=[
            *(LETTERS, HEAD_WORDS, POLICY_WORDS, FAULT_WORDS, RATES),
            *(text for text in paragraphs if not text.startswith(_WARNINGS)),
            *([RATIO_NOTE] if speeds else []),
        ],
        prompts=report.prompts,
        empty=[
            f"{run.name}: {one.label}" for one in report.summaries if not one.acceptance.num_prompts
        ],
    )


def record_facts(record: Mapping[str, object]) -> dict[str, str]:
    """How a run was made, from its record (`provenance.run_record`)."""
    git, versions = mapping(record, "git"), mapping(record, "versions")
    state = " with uncommitted changes" if git.get("dirty") else ""
    facts = {
        "command": command_of(record),
        "started": str(record.get("started_at") or ""),
        "code": f"{str(git.get('sha'))[:12]}{state}" if git else "",
        "machine": machine_of(record),
        "target hash": target_hash(record),
        "versions": _pairs(versions, ("python", "torch", "triton", "transformers")),
    }
    return {name: value for name, value in facts.items() if value}


def command_of(record: Mapping[str, object]) -> str:
    """The command of a run, as it can be typed again."""
    return str(record.get("command") or "")


def _settings(report: Report) -> dict[str, str]:
    """What the conditions of a run were decoded with."""
    config, found = report.config, report.summaries
    facts = {
        "target": str(mapping(config, "model").get("path") or ""),
        "heads": _each(s.head for s in found) or str(mapping(config, "spec").get("head") or ""),
        "drafts K": _each(s.num_speculative_tokens for s in found),
        "batch": _each(s.max_num_requests for s in found),
        "temperature": _each(s.temperature for s in found),
        "verification": _each(s.verify for s in found),
        "sampling": _pairs(mapping(config, "sampling"), ("top_k", "top_p", "max_new_tokens")),
        "dtype, seed": f"{report.dtype}, {report.seed}",
        "passes": _each(s.speed.num_passes for s in found),
    }
    return {name: value for name, value in facts.items() if value}


def _each(values: Iterable[object]) -> str:
    """Different values in the order of their first use."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _pairs(values: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {values[name]}" for name in names if name in values)
