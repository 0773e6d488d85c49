"""The figures, charts and scalars of a report on Weights & Biases.

One numeric table `figures`, the long frame, and one `wandb.Html` a chart, under keys that are the
same for every run; the main figures as the run's summary, by which a sweep ranks; the results file
as an artifact. W&B never ends a run: without key or network there is one warning, and the report on
disk is whole. The libraries of a report are imported only when something is sent.
"""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from mtp_research.config.schema import LoggerConfig
from mtp_research.evaluation.report.stored import (
    GENERATIONS_FILE,
    RESULTS_FILE,
    Report,
    Run,
    longest,
)
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.runtime.provenance import redact_tree

if TYPE_CHECKING:
    from mtp_research.evaluation.report.page import Section

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0  # of a service that does not answer; W&B's own 90 s are a long time to warn
FIGURES_KEY = "figures"
GENERATIONS_KEY = "generations"
MAX_GENERATIONS = 200  # rows of that table
_GENERATION_COLUMNS = ("id", "turn", "condition", "prompt", "text", "accepted", "finish", "score")
Scalars = Mapping[str, float | str]


def publish_report(report: Report, *, output_dir: Path, settings: LoggerConfig) -> bool:
    """`publish` one evaluation."""

    def sections() -> "list[Section]":
        from mtp_research.evaluation.report.page import results_sections

        return results_sections([Run(output_dir.name, report)])

    return publish(
        sections,
        results=output_dir / RESULTS_FILE,
        settings=settings,
        config=report.config,
        scalars=report_scalars(report),
    )


def report_scalars(report: Report) -> dict[str, float | str]:
    """Figures by `label/name`, and those of the condition of the greatest length by `best/name`.

    Names: `acceptance_length` (micro), `acceptance_rate`, `tokens_per_s` (end to end),
    `ratio_to_baseline`. A figure that was not measured is left out. Only conditions that draft can
    be best; `best/condition` is the label.
    """
    scalars: dict[str, float | str] = {}
    for summary in report.summaries:
        found = _main_figures(summary)
        scalars |= {f"{summary.result.label}/{name}": value for name, value in found.items()}
    if best := longest(report):
        scalars["best/condition"] = best.result.label
        scalars |= {f"best/{name}": value for name, value in _main_figures(best).items()}
    return scalars


def publish(
    make_sections: "Callable[[], Sequence[Section]]",
    *,
    results: Path,
    settings: LoggerConfig,
    config: Mapping[str, object],
    scalars: Scalars,
) -> bool:
    """Send figures, charts and scalars where W&B is asked for; returns whether all was sent.

    Only the first rank sends, and the sections are made only then. W&B keeps its files beside
    `results`; `WANDB_MODE` overrides the settings, secrets of `config` are redacted here, `scalars`
    are the run's summary.
    """
    mode = os.environ.get("WANDB_MODE") or settings.wandb
    is_off = "disabled" in (settings.wandb, mode)
    if is_off or os.environ.get("RANK", "0") != "0":
        return False
    try:
        _send(make_sections(), results, mode=mode, settings=settings, config=config,
              scalars=scalars)  # fmt: skip
    # Whatever W&B and its transport raise, the report is worth more than its copy.
    except Exception as fault:
        logger.warning("W&B is off (%s); figures and charts are in %s only", fault, results.parent)
        return False
    return True


def _main_figures(summary: ConditionSummary) -> dict[str, float]:
    figures = {
        "acceptance_length": summary.acceptance.acceptance_length_micro.value,
        "acceptance_rate": summary.acceptance.acceptance_rate.value,
        "tokens_per_s": summary.speed.end_to_end.value,
        "ratio_to_baseline": summary.speed.ratio_end_to_end,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _send(
    sections: "Sequence[Section]",
    results: Path,
    *,
    mode: str,
    settings: LoggerConfig,
    config: Mapping[str, object],
    scalars: Scalars,
) -> None:
    import pandas as pd
    import wandb

    from mtp_research.evaluation.report.charts import chart_files

    if mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key; run `wandb login` or set logger.wandb=offline")
    run = wandb.init(
        project=settings.project,
        dir=str(results.parent),
        mode=cast(Literal["offline", "online"], mode),  # checked here or by W&B
        tags=list(settings.tags),
        config=cast(dict[str, object], redact_tree(dict(config))),
        job_type="report",
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S),
    )
    run.summary.update(dict(scalars))
    frames = [section.frame for section in sections if len(section.frame)]
    if frames:
        frame = pd.concat(frames).astype(object)
        rows = frame.where(frame.notna(), None).to_numpy().tolist()
        run.log({FIGURES_KEY: wandb.Table(columns=list(frame.columns), data=rows)})
    for section in sections:
        for chart in section.drawn:
            about = f"{chart.note} {section.caption}. {section.command}"
            svg = chart_files(chart, description=about)["svg"].decode()
            run.log({f"charts/{chart.stem}": wandb.Html(svg, inject=False)})
    if rows := generation_rows(results.parent / GENERATIONS_FILE):
        texts = pd.DataFrame(rows, dtype=object).to_numpy().tolist()
        run.log({GENERATIONS_KEY: wandb.Table(columns=list(_GENERATION_COLUMNS), data=texts)})
    if results.is_file():
        artifact = wandb.Artifact(f"results-{run.id}", type="results")
        artifact.add_file(str(results))
        run.log_artifact(artifact)
    run.finish()


def generation_rows(path: Path) -> list[Sequence[object]]:
    """Rows of the table of texts, one a turn: all conditions of a prompt, then the next prompt."""
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    order = {name: place for place, name in enumerate(dict.fromkeys(one["id"] for one in lines))}
    rows: list[Sequence[object]] = []
    for line in sorted(lines, key=lambda one: order[one["id"]]):
        for number, turn in enumerate(line["turns"], start=1):
            accepted = " ".join(map(str, turn["accepted"]))
            shown = (turn["asked"], turn["text"], accepted, turn["finish_reason"], line["score"])
            rows.append([line["id"], number, line["condition"], *shown])
    return rows[:MAX_GENERATIONS]
