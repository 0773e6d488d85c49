"""The tables and charts of a report on Weights & Biases.

One `wandb.Table` a table and one `wandb.Html` a chart: `wandb.Image` takes pixels only, and an SVG
inside `Html` stays sharp at every size. W&B never ends a run: without key or network there is one
warning, and the report on disk is whole.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from mtp_research.config import LoggerConfig
from mtp_research.evaluation.figures import slug
from mtp_research.evaluation.report import Report
from mtp_research.evaluation.runs import Run
from mtp_research.evaluation.sections import Section, results_sections
from mtp_research.evaluation.svg_parts import standalone
from mtp_research.provenance import redact_tree

logger = logging.getLogger(__name__)


def publish_report(report: Report, *, output_dir: Path, settings: LoggerConfig) -> bool:
    """`publish` the sections of one evaluation; they are built only where W&B is asked for."""
    if settings.wandb == "disabled":
        return False
    sections = results_sections([Run(output_dir.name, report)])
    return publish(sections, output_dir=output_dir, settings=settings, config=report.config)


def publish(
    sections: Sequence[Section],
    *,
    output_dir: Path,
    settings: LoggerConfig,
    config: Mapping[str, object],
) -> bool:
    """Send every table and chart.

    Args:
        sections: of the report.
        output_dir: where W&B keeps its files.
        settings: mode (not `disabled`), project, tags.
        config: resolved configuration; secrets are redacted here.

    Returns:
        Whether all was sent.
    """
    try:
        _send(sections, output_dir=output_dir, settings=settings, config=config)
    # Whatever W&B and its transport raise, the report is worth more than its copy.
    except Exception as fault:
        logger.warning("W&B is off (%s); tables and charts are in %s only", fault, output_dir)
        return False
    return True


def _send(
    sections: Sequence[Section],
    *,
    output_dir: Path,
    settings: LoggerConfig,
    config: Mapping[str, object],
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
    )
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
