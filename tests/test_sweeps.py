"""Each W&B sweep, expanded as its agent expands it, gives commands that compose. Nothing is run."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mtp_research.app.cli import compose_config
from mtp_research.app.overrides import CONF_DIR, ENTRIES, group_choices
from mtp_research.config.ranges import ALIASES, schema_keys
from mtp_research.evaluation.report.stored import build_report
from mtp_research.evaluation.report.wandb_log import report_scalars
from mtp_research.training.walk.replay import WalkReport
from tests.evaluation.generations import some_prompts, three_conditions

SWEEPS = sorted((CONF_DIR / "sweep").glob("*.yaml"))
SCHEMAS = {f"{entry}.py": schema for schema, entry in ENTRIES.items()}


def commands(sweep: dict) -> Iterator[list[str]]:
    """Words of every run of a grid, macros replaced as the agent replaces them."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    grid = {
        name: choice.get("values", [choice.get("value")])
        for name, choice in sweep["parameters"].items()
    }
    for values in itertools.product(*grid.values()):
        args = {name: {"value": value} for name, value in zip(grid, values, strict=True)}
        macros = utils.create_sweep_command_args({"args": args})
        words: list[str] = []
        for word in sweep["command"]:
            if word == "${args_no_hyphens}":
                words += macros["args_no_hyphens"]
            elif word == "${program}":
                words.append(sweep["program"])
            elif word != "${env}":
                words.append(word)
        yield words


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweep_expands_to_commands_that_compose(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text(encoding="utf8"))
    seen = []
    for python, program, *words in commands(sweep):
        assert python == "python"
        assert not any("${" in word for word in words)
        config = compose_config(SCHEMAS[program], words)
        assert config.logger.wandb == "online"
        seen.append(repr(config))
    assert len(set(seen)) == len(seen) > 1, "every run of a sweep must differ"
    assert f"wandb sweep conf/sweep/{path.name}" in path.read_text(encoding="utf8")


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_sweep_names_keys_or_groups_and_logs(path: Path) -> None:
    sweep = yaml.safe_load(path.read_text(encoding="utf8"))
    known = {"program", "project", "method", "metric", "parameters", "command"}
    assert set(sweep) == known
    assert sweep["method"] == "grid"
    assert set(sweep["metric"]) == {"name", "goal"}
    assert sweep["metric"]["goal"] == "maximize"
    schema = SCHEMAS[sweep["program"]]
    names = {*schema_keys(schema), *ALIASES, *group_choices(schema)}
    assert set(sweep["parameters"]) <= names
    assert all(set(choice) in ({"value"}, {"values"}) for choice in sweep["parameters"].values())
    assert "logger=wandb" in sweep["command"], "a run that logs nothing cannot be ranked"


def test_evaluation_sweeps_maximise_what_a_run_reports() -> None:
    conditions, prompts = three_conditions(2), some_prompts(2)
    report = build_report(conditions, prompts=prompts, dtype="f", config={}, run={})
    sweeps = [yaml.safe_load(path.read_text(encoding="utf8")) for path in SWEEPS]
    names = {sweep["metric"]["name"] for sweep in sweeps if sweep["program"] == "eval.py"}
    assert names <= set(report_scalars(report))


def test_training_sweep_maximises_what_a_run_reports() -> None:
    sweep = yaml.safe_load((CONF_DIR / "sweep" / "train_lr_unroll.yaml").read_text())
    names = {field.name for field in dataclasses.fields(WalkReport)}
    assert sweep["metric"]["name"] in names  # the result, and so the summary, spreads the report
    assert sweep["metric"]["goal"] == "maximize"
