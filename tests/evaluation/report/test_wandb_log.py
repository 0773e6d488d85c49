"""Tables and charts of a report on a made-up W&B, and a W&B that fails; `test_wandb_offline` has
the real client."""

import dataclasses
import importlib
import logging
import sys
import types
from pathlib import Path

import pytest

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig, LoggerConfig
from mtp_research.evaluation.report.charts import Missing, curves
from mtp_research.evaluation.report.frame import COLUMNS, make_frame, row_of
from mtp_research.evaluation.report.page import Section
from mtp_research.evaluation.report.stored import build_report
from mtp_research.evaluation.report.wandb_log import (
    ReportRun,
    publish,
    publish_report,
    report_curves,
    report_scalars,
)
from mtp_research.evaluation.stats.bootstrap import Estimate
from tests.evaluation.generations import some_prompts, three_conditions

ROWS = [
    row_of({"run": "r", "condition": "eagle", "K": 3}, "p_1", Estimate(0.5, 0.4, 0.6), n=2),
    row_of({"run": "r", "condition": "training", "K": 3}, "p_1", Estimate(None), n=2),
]
SECTION = Section(
    name="run",
    title="run",
    charts=[curves("Time", {"a": ([1, 2], [3.0, 4.0])}, x="step", y="s"), Missing("Sweep", "one")],
    grids=[],
    frame=make_frame(ROWS),
    caption="n = 2",
    command="python eval.py",
)


class FakeTable:
    def __init__(self, *, columns: list[str], data: list[list[object]]) -> None:
        self.columns, self.rows = columns, data


class FakeArtifact:
    def __init__(self, name: str, *, type: str) -> None:
        self.name, self.type, self.files = name, type, []

    def add_file(self, path: str) -> None:
        self.files.append(path)


class FakeRun:
    def __init__(self) -> None:
        self.logged, self.summary, self.is_finished = {}, {}, False
        self.id, self.artifacts, self.steps, self.axes = "id1", [], [], {}

    def define_metric(self, name: str, *, step_metric: str = "", hidden: bool = False) -> None:
        self.axes[name] = step_metric

    def log_code(self, root: str, *, name: str) -> None:
        self.code = root

    def log_artifact(self, artifact: FakeArtifact) -> None:
        self.artifacts.append(artifact)

    def log(self, values: dict[str, object]) -> None:
        if {"K", "position"} & set(values):
            self.steps.append(values)
        else:
            self.logged |= values

    def finish(self, *, exit_code: int) -> None:
        self.is_finished, self.exit_code = True, exit_code


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    importlib.import_module("mtp_research.models.target")  # accelerate looks for the real one
    module = types.ModuleType("wandb")
    fields = {
        "run": FakeRun(),
        "Table": FakeTable,
        "Artifact": FakeArtifact,
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
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    return module


def sent(folder: Path, mode: str) -> bool:
    config = {"logger": {"api_key": "secret-value-123"}}
    scalars = {"best/acceptance_length": 2.0}
    with ReportRun(LoggerConfig(wandb=mode, tags=["t"])) as run:
        run.open(folder, config=config)
        return publish(lambda: [SECTION], results=folder / "results.json", run=run, scalars=scalars)


def test_figures_charts_and_results_are_sent_once(
    tmp_path: Path, fake_wandb: types.ModuleType
) -> None:
    (tmp_path / "results.json").write_text("{}")
    assert sent(tmp_path, "offline")
    run = fake_wandb.run
    table, chart = run.logged["figures"], run.logged["charts/time"]
    assert tuple(table.columns) == COLUMNS
    values = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [one["value"] for one in values] == [0.5, None]
    assert (values[0]["low"], values[0]["high"], values[0]["n"], values[0]["K"]) == (0.4, 0.6, 2, 3)
    assert chart[0] == "html"
    assert "<svg xmlns" in chart[1]
    assert "n = 2. python eval.py" in chart[1]
    assert len(run.logged) == 2  # a figure that was left out is not sent
    assert run.is_finished
    assert run.arguments["mode"] == "offline"
    assert "secret-value-123" not in str(run.arguments)
    assert run.summary == {"best/acceptance_length": 2.0}
    (artifact,) = run.artifacts
    assert artifact.files == [str(tmp_path / "results.json")]
    assert run.arguments["name"] == tmp_path.name
    assert Path(run.code, "evaluation", "report", "wandb_log.py").is_file()


def test_run_is_open_while_the_work_is_done_and_fails_with_it(
    tmp_path: Path, fake_wandb: types.ModuleType
) -> None:
    def work() -> None:
        with ReportRun(LoggerConfig(wandb="offline")) as run:
            run.open(tmp_path, config={})
            assert fake_wandb.run.arguments["dir"] == str(tmp_path)
            assert not fake_wandb.run.is_finished
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert fake_wandb.run.exit_code == 1


@pytest.mark.parametrize(("asked", "mode", "wanted"), [
    ("online", "offline", "offline"), ("offline", "disabled", None), ("disabled", "online", None),
])  # fmt: skip
def test_wandb_mode_of_the_environment_is_obeyed(
    tmp_path: Path,
    fake_wandb: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    mode: str,
    wanted: str | None,
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert sent(tmp_path, asked) == (wanted is not None)
    if wanted is not None:
        assert fake_wandb.run.arguments["mode"] == wanted


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


def test_curves_have_a_point_a_k_and_the_same_keys_for_every_run() -> None:
    baseline, eagle, training = three_conditions(2)
    longer = dataclasses.replace(eagle, label="eagle K=5", num_speculative_tokens=5)
    eagle = dataclasses.replace(eagle, label="eagle K=3")
    made = build_report(
        [baseline, eagle, longer, training], prompts=some_prompts(2), dtype="f", config={}, run={}
    )
    lengths = [one.acceptance.acceptance_length_micro.value for one in made.summaries]
    points = [one for one in report_curves(made) if "K" in one]
    assert [one["K"] for one in points] == [0, 3, 5]
    assert points[1]["over_k/acceptance_length/eagle"] == lengths[1]
    assert points[2]["over_k/acceptance_length/eagle"] == lengths[2]
    assert points[1]["over_k/acceptance_length/training"] == lengths[3]
    assert "over_k/acceptance_length/training" not in points[2]
    rates = [one for one in report_curves(made) if "position" in one]
    assert [one["position"] for one in rates] == [1, 2, 3, 4, 5]
    found = made.summaries[3].acceptance.acceptance_rate_per_position
    key = "over_position/acceptance_rate/training"
    assert [one.get(key) for one in rates] == [*(rate.value for rate in found), None, None]


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
    with ReportRun(LoggerConfig(wandb=mode)) as run:
        run.open(tmp_path, config={})
        was_sent = publish_report(made, output_dir=tmp_path, run=run)
    assert was_sent == (mode == "offline")
    names = list(fake_wandb.run.logged)
    assert names.count("figures") == was_sent
    assert sum(name.startswith("charts/") for name in names) == (4 if was_sent else 0)
    constant = set("".join(names)) <= set("abcdefghijklmnopqrstuvwxyz-/")
    assert fake_wandb.run.axes.get("over_k/*") == ("K" if was_sent else None)
    assert constant, f"no folder, count or dtype may be in a key: {names}"


@pytest.mark.parametrize("fault", ["nothing", "no key"])
def test_eval_py_publishes_and_exits_0(
    tmp_path: Path,
    fake_wandb: types.ModuleType,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    mode = "online" if fault == "no key" else "offline"
    words = [
        "experiment=eval_smoke",
        "model=lab_tiny",
        "engine=cpu",
        "spec.policy=training",
        "spec.k=1",
    ]
    words += ["logger=wandb", f"logger.wandb={mode}", f"output_dir={tmp_path}"]
    with caplog.at_level(logging.WARNING, logger="mtp_research.runtime.wandb_run"):
        assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    assert (tmp_path / "results.json").is_file()
    assert caplog.text.count("no API key") == (fault == "no key")
    assert fake_wandb.run.arguments["mode"] == "offline"
    assert "best/acceptance_length" in fake_wandb.run.summary


def test_price_study_is_published(tmp_path: Path, fake_wandb: types.ModuleType) -> None:
    words = ["experiment=fault_price", "spec.head=assets/lab_tiny/heads/chain_n1", "spec.k=2"]
    words += ["spec.policy=window", "prompts.max_prompts=1", "sampling.max_new_tokens=4"]
    words += ["engine=cpu", "logger=wandb", "logger.wandb=offline", f"output_dir={tmp_path / 'f'}"]
    assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    run = fake_wandb.run
    assert set(run.logged) == {"figures", "charts/acceptance-length-lost-to-faulty-slots"}
    assert run.artifacts[0].files == [str(tmp_path / "f" / "fault_price.json")]
    assert "chain_n1 K=2 window/acceptance_length" in run.summary


@pytest.mark.parametrize("fault", ["refused", "no network", "not installed"])
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
    if fault == "refused":

        def refused(**_: object) -> FakeRun:
            raise PermissionError("no such project")

        monkeypatch.setattr(fake_wandb, "init", refused)
    if fault == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    with caplog.at_level(logging.WARNING):
        assert not sent(tmp_path, "offline")
    assert len(caplog.records) == 1
    assert "W&B is off" in caplog.text
