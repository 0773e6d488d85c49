"""The tables, charts and scalars of a report on Weights & Biases.

One `wandb.Table` a table, one `wandb.Html` a chart, and the main figures as the run's summary, by
which a sweep ranks. `wandb.Image` takes pixels only, which another program would have to draw; an
SVG inside `Html` stays sharp at every size. W&B never ends a run: without key or network there is
one warning, and the report on disk is whole.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from mtp_research.config.schema import LoggerConfig
from mtp_research.evaluation.figures import slug
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.runs import Run
from mtp_research.evaluation.sections import Section, results_sections
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.evaluation.svg_parts import standalone
from mtp_research.runtime.provenance import redact_tree

logger = logging.getLogger(__name__)

INIT_TIMEOUT_S = 30.0  # of a service that does not answer; W&B's own 90 s are a long time to warn
Scalars = Mapping[str, float | str]


def publish_report(report: Report, *, output_dir: Path, settings: LoggerConfig) -> bool:
    """`publish` one evaluation."""
    return publish(
        lambda: results_sections([Run(output_dir.name, report)]),
        output_dir=output_dir,
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
        found = _headline(summary)
        scalars |= {f"{summary.label}/{name}": value for name, value in found.items()}
    drafting = [
        (length, summary)
        for summary in report.summaries
        if summary.num_speculative_tokens > 0
        and (length := summary.acceptance.acceptance_length_micro.value) is not None
    ]
    if drafting:
        _, best = max(drafting, key=lambda pair: pair[0])
        scalars["best/condition"] = best.label
        scalars |= {f"best/{name}": value for name, value in _headline(best).items()}
    return scalars


def publish(
    make_sections: Callable[[], Sequence[Section]],
    *,
    output_dir: Path,
    settings: LoggerConfig,
    config: Mapping[str, object],
    scalars: Scalars,
) -> bool:
    """Send every table, chart and scalar, where W&B is asked for and this is the first rank.

    Args:
        make_sections: builds the sections of the report; called only if they are sent.
        output_dir: where W&B keeps its files.
        settings: mode, project, tags.
        config: resolved configuration; secrets are redacted here.
        scalars: of the run's summary.

    Returns:
        Whether all was sent.
    """
    if settings.wandb == "disabled" or os.environ.get("RANK", "0") != "0":
        return False
    try:
        sections = make_sections()
        _send(sections, output_dir=output_dir, settings=settings, config=config, scalars=scalars)
    # Whatever W&B and its transport raise, the report is worth more than its copy.
    except Exception as fault:
        logger.warning("W&B is off (%s); tables and charts are in %s only", fault, output_dir)
        return False
    return True


def _headline(summary: ConditionSummary) -> dict[str, float]:
    figures = {
        "acceptance_length": summary.acceptance.acceptance_length_micro.value,
        "acceptance_rate": summary.acceptance.acceptance_rate.value,
        "tokens_per_s": summary.speed.tokens_per_s_end_to_end,
        "ratio_to_baseline": summary.speed.ratio_end_to_end,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _send(
    sections: Sequence[Section],
    *,
    output_dir: Path,
    settings: LoggerConfig,
    config: Mapping[str, object],
    scalars: Scalars,
) -> None:
    import wandb

    if settings.wandb == "online" and not wandb.login(prompt=False):
        raise RuntimeError("no API key; run `wandb login` or set logger.wandb=offline")
    run = wandb.init(
        project=settings.project,
        dir=str(output_dir),
        mode=cast(Literal["offline", "online"], settings.wandb),  # checked
        tags=list(settings.tags),
        config=cast(dict[str, object], redact_tree(dict(config))),
        job_type="report",
        settings=wandb.Settings(init_timeout=INIT_TIMEOUT_S),
    )
    run.summary.update(dict(scalars))
    for section in sections:
        for number, grid in enumerate(section.grids, start=1):
            # A column needs a name of its own.
            table = wandb.Table(columns=[name or "figure" for name in grid.header])
            for row in grid.rows:
                table.add_data(*row)
            run.log({f"{section.name}/table-{number:02d}-{slug(grid.title)}": table})
        for number, figure in enumerate(section.charts, start=1):
            caption = f"{figure.title}. {figure.note} {section.caption}. {section.command}"
            chart = wandb.Html(standalone(figure.markup, description=caption), inject=False)
            run.log({f"{section.name}/figure-{number:02d}-{figure.stem}": chart})
    run.finish()
