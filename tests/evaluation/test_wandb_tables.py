"""Tables and charts of a report on a made-up W&B, and a W&B that fails."""

import logging
import sys
import types
from pathlib import Path

import pytest

from mtp_research.app.cli import run_entry
from mtp_research.app.commands import run_evaluation
from mtp_research.config.schema import EvalConfig, LoggerConfig
from mtp_research.evaluation.figures import Figure, Missing
from mtp_research.evaluation.report import build_report
from mtp_research.evaluation.sections import Section
from mtp_research.evaluation.svg import stacked_bars
from mtp_research.evaluation.tables import Grid
from mtp_research.evaluation.wandb_tables import publish, publish_report, report_scalars
from tests.evaluation.generations import some_prompts, three_conditions

SECTION = Section(
    name="run",
    title="run",
    figures=[
        Figure("Time", stacked_bars([[1.0]], rows=["a"], parts=["p"], unit="s")),
        Missing("Sweep", "one batch size"),
    ],
    grids=[Grid("Audit", ("", "slots"), (("eagle", "5"), ("training", "-")))],
    caption="n = 2",
    command="python eval.py",
)


class FakeTable:
    def __init__(self, *, columns: list[str]) -> None:
        self.columns, self.rows = columns, []

    def add_data(self, *row: str) -> None:
        self.rows.append(row)


class FakeRun:
    def __init__(self) -> None:
        self.logged, self.summary, self.is_finished = {}, {}, False

    def log(self, values: dict[str, object]) -> None:
        self.logged |= values

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("wandb")
    fields = {
        "run": FakeRun(),
        "Table": FakeTable,
        "Html": lambda data, *, inject: ("html", data),
        "login": lambda *, prompt: False,
        "Settings": dict,
    }
    for name, value in fields.items():
        monkeypatch.setattr(module, name, value, raising=False)

    def init(**arguments: object) -> FakeRun:
        fields["run"].arguments = arguments
        return fields["run"]

    monkeypatch.setattr(module, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def sent(folder: Path, mode: str) -> bool:
    settings = LoggerConfig(wandb=mode, tags=["t"])
    config = {"logger": {"api_key": "secret-value-123"}}
    scalars = {"best/acceptance_length": 2.0}
    return publish(
        lambda: [SECTION], output_dir=folder, settings=settings, config=config, scalars=scalars
    )


def test_every_table_and_chart_is_sent_once(tmp_path: Path, fake_wandb: types.ModuleType) -> None:
    assert sent(tmp_path, "offline")
    run = fake_wandb.run
    table, chart = run.logged["run/table-01-audit"], run.logged["run/figure-01-time"]
    assert table.columns == ["figure", "slots"]
    assert table.rows == [("eagle", "5"), ("training", "-")]
    assert chart[0] == "html"
    assert chart[1].startswith("<svg xmlns=")
    assert "<desc>Time.  n = 2. python eval.py</desc>" in chart[1]
    assert len(run.logged) == 2  # a figure that was left out is not sent
    assert run.is_finished
    assert run.arguments["mode"] == "offline"
    assert "secret-value-123" not in str(run.arguments)
    assert run.summary == {"best/acceptance_length": 2.0}


def test_summary_holds_every_condition_and_the_best_one_that_drafts() -> None:
    prompts, conditions = some_prompts(2), three_conditions(2)
    made = build_report(conditions, prompts=prompts, dtype="f", config={}, run={})
    scalars = report_scalars(made)
    _, eagle, training = made.summaries
    assert scalars["best/condition"] == "training"
    names = ("acceptance_length", "acceptance_rate", "tokens_per_s", "ratio_to_baseline")
    for name in names:
        assert scalars[f"best/{name}"] == scalars[f"training/{name}"]
    length = eagle.acceptance.acceptance_length_micro.value
    assert scalars["eagle/acceptance_length"] == length
    assert scalars["training/ratio_to_baseline"] == training.speed.ratio_end_to_end
    assert "baseline/acceptance_rate" not in scalars  # it drafts nothing
    baseline = build_report(conditions[:1], prompts=prompts, dtype="f", config={}, run={})
    assert not any(name.startswith("best/") for name in report_scalars(baseline))


def test_only_the_first_rank_sends(
    tmp_path: Path, fake_wandb: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not sent(tmp_path, "offline")
    assert fake_wandb.run.logged == {}


@pytest.mark.parametrize("mode", ["disabled", "offline"])
def test_evaluation_sends_its_report_where_asked(
    tmp_path: Path, fake_wandb: types.ModuleType, mode: str
) -> None:
    conditions = three_conditions(2)
    made = build_report(conditions, prompts=some_prompts(2), dtype="f", config={}, run={})
    was_sent = publish_report(made, output_dir=tmp_path, settings=LoggerConfig(wandb=mode))
    assert was_sent == (mode == "offline")
    names = [name.partition("/")[2][:5] for name in fake_wandb.run.logged]
    assert (names.count("table"), names.count("figur")) == ((6, 3) if was_sent else (0, 0))


@pytest.mark.parametrize("fault", ["nothing", "no key"])
def test_eval_py_publishes_and_exits_0(
    tmp_path: Path,
    fake_wandb: types.ModuleType,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    mode = "online" if fault == "no key" else "offline"
    words = ["experiment=eval_smoke", "engine=cpu", "spec.policy=training", "spec.k=1"]
    words += ["logger=wandb", f"logger.wandb={mode}", f"output_dir={tmp_path}"]
    with caplog.at_level(logging.WARNING, logger="mtp_research.evaluation.wandb_tables"):
        assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    assert (tmp_path / "results.json").is_file()
    names = [record.name for record in caplog.records]
    assert names.count("mtp_research.evaluation.wandb_tables") == (fault == "no key")
    assert ("best/acceptance_length" in fake_wandb.run.summary) == (fault == "nothing")


def test_price_study_is_published(tmp_path: Path, fake_wandb: types.ModuleType) -> None:
    words = ["experiment=fault_price", "spec.head=assets/lab_tiny/heads/chain_n1", "spec.k=2"]
    words += ["spec.policy=window", "prompts.max_prompts=1", "sampling.max_new_tokens=4"]
    words += ["engine=cpu", "logger=wandb", "logger.wandb=offline", f"output_dir={tmp_path / 'f'}"]
    assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    run = fake_wandb.run
    assert any(name.startswith("f/table-01") for name in run.logged)
    assert "chain_n1 K=2 window/acceptance_length" in run.summary


@pytest.mark.parametrize("fault", ["no key", "no network", "not installed"])
def test_failing_service_is_one_warning_and_no_more(
    tmp_path: Path,
    fake_wandb: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    if fault == "no network":

        def broken(values: dict[str, object]) -> None:
            raise ConnectionError("gone")

        monkeypatch.setattr(fake_wandb.run, "log", broken)
    if fault == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        assert not sent(tmp_path, "online" if fault == "no key" else "offline")
    assert len(caplog.records) == 1
    assert "W&B is off" in caplog.text
