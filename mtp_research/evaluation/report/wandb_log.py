"""The figures, charts and scalars of an evaluation or study on Weights & Biases.

The run is opened before anything is decoded, so that W&B's own curves of the machine cover the
work. It gets one numeric table `figures`, the long frame; curves over K and over the draft
position; one `wandb.Html` a chart; all under keys that are the same for every run, so that runs lie
over each other. The main figures are the run's summary, by which a sweep ranks, and the results
file is an artifact. W&B never ends a run: when it fails there is one warning, and the report on
disk is whole. The libraries of a report are imported only when something is sent.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from mtp_research.config.schema import LoggerConfig
from mtp_research.evaluation.report.stored import (
    GENERATIONS_FILE,
    RESULTS_FILE,
    Report,
    Run,
    longest,
)
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.runtime.provenance import is_first_rank
from mtp_research.runtime.wandb_run import OFF, run_mode, start_run

if TYPE_CHECKING:
    import wandb

    from mtp_research.evaluation.report.page import Section

logger = logging.getLogger(__name__)

FIGURES_KEY = "figures"
GENERATIONS_KEY = "generations"
MAX_GENERATIONS = 200  # rows of that table
_GENERATION_COLUMNS = ("id", "turn", "condition", "prompt", "text", "accepted", "finish", "score")
Scalars = Mapping[str, float | str]


class ReportRun:
    """The run of one evaluation or study: off until `open`, and where nobody asks for W&B.

    A context manager: what ends the work ends the run, as a failed one where it was an exception.
    Only the first rank has a run.
    """

    def __init__(self, settings: LoggerConfig) -> None:
        self._settings = settings
        self._run: wandb.Run | None = None

    def open(self, folder: Path, *, config: Mapping[str, object], job_type: str = "eval") -> None:
        """Begin the run of an output folder; secrets of `config` are redacted."""
        if run_mode(self._settings.wandb) == OFF or not is_first_rank():
            return
        try:
            self._run = start_run(folder, settings=self._settings, config=config, job_type=job_type)
        # Whatever W&B and its transport raise, the work is worth more than its copy.
        except Exception as fault:
            logger.warning("W&B is off (%s); figures and charts are in %s only", fault, folder)

    def send(self, call: "Callable[[wandb.Run], None]") -> bool:
        """Let `call` log to the run; returns whether there is one and it took everything."""
        if self._run is None:
            return False
        try:
            call(self._run)
        except Exception as fault:  # as in `open`
            logger.warning("W&B is off (%s); figures and charts are on disk only", fault)
            return False
        return True

    def __enter__(self) -> "ReportRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.send(lambda run: run.finish(exit_code=0 if kind is None else 1))


def publish_report(report: Report, *, output_dir: Path, run: ReportRun) -> bool:
    """`publish` one evaluation."""

    def sections() -> "list[Section]":
        from mtp_research.evaluation.report.page import results_sections

        return results_sections([Run(output_dir.name, report)])

    return publish(
        sections,
        results=output_dir / RESULTS_FILE,
        run=run,
        scalars=report_scalars(report),
        curves=report_curves(report),
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


def report_curves(report: Report) -> list[dict[str, float]]:
    """Points of W&B's own line charts, each a step: `K` or `position`, and values there.

    `over_k/acceptance_length/training` is that figure of the policy `training` over K: a run of one
    K is a point, and a sweep over K is a line across its runs. `over_position/acceptance_rate/...`
    is the rate of draft 1 .. K, of the largest K. Other settings that differ within a run, such as
    heads or batch size, follow the policy's name, as they do in a label.
    """
    over_k: dict[int, dict[str, float]] = {}
    rates: dict[str, tuple[int, list[float | None]]] = {}
    for summary in report.summaries:
        num_drafts = summary.result.num_speculative_tokens
        words = summary.result.label.split(" ")
        series = " ".join(word for word in words if word != f"K={num_drafts}")
        point = over_k.setdefault(num_drafts, {"K": num_drafts})
        for name, value in _main_figures(summary).items():
            point[f"over_k/{name}/{series}"] = value
        found = [rate.value for rate in summary.acceptance.acceptance_rate_per_position]
        rates[series] = max(rates.get(series, (0, [])), (num_drafts, found), key=lambda one: one[0])
    curves = [over_k[num_drafts] for num_drafts in sorted(over_k)]
    for index in range(max(over_k, default=0)):
        values = {
            f"over_position/acceptance_rate/{series}": found[index]
            for series, (_, found) in rates.items()
            if index < len(found)
        }
        known = {name: value for name, value in values.items() if value is not None}
        curves.append({"position": index + 1, **known})
    return curves


def publish(
    make_sections: "Callable[[], Sequence[Section]]",
    *,
    results: Path,
    run: ReportRun,
    scalars: Scalars,
    curves: Sequence[Mapping[str, float]] = (),
) -> bool:
    """Send figures, curves, charts, scalars and the results file; returns whether all was sent.

    The sections are made only where there is a run. `scalars` are the run's summary, `curves` its
    steps, see `report_curves`.
    """

    def send(wandb_run: "wandb.Run") -> None:
        _send(wandb_run, make_sections(), results, scalars=scalars, curves=curves)

    return run.send(send)


def _main_figures(summary: ConditionSummary) -> dict[str, float]:
    figures = {
        "acceptance_length": summary.acceptance.acceptance_length_micro.value,
        "acceptance_rate": summary.acceptance.acceptance_rate.value,
        "tokens_per_s": summary.speed.end_to_end.value,
        "ratio_to_baseline": summary.speed.ratio_end_to_end,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _send(
    run: "wandb.Run",
    sections: "Sequence[Section]",
    results: Path,
    *,
    scalars: Scalars,
    curves: Sequence[Mapping[str, float]],
) -> None:
    import pandas as pd
    import wandb

    from mtp_research.evaluation.report.charts import chart_files

    for axis, names in (("K", "over_k/*"), ("position", "over_position/*")):
        run.define_metric(axis, hidden=True)
        run.define_metric(names, step_metric=axis)
    for point in curves:
        run.log(dict(point))
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
