"""metrics.jsonl, and W&B that never ends a run."""

import json
import sys
import types

import pytest

from mtp_research.config import LoggerConfig
from mtp_research.training.tracking import Tracker, jsonable


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def tracker(folder, *, wandb: str = "disabled", **arguments) -> Tracker:
    return Tracker(folder, settings=LoggerConfig(wandb=wandb), config={"seed": 0}, **arguments)


def test_tracker_writes_strict_json_lines(tmp_path):
    with tracker(tmp_path) as log:
        log.log("train", step=1, values={"loss": float("nan"), "accuracy": [0.5, 0.25]})
    assert lines(tmp_path) == [{"kind": "train", "step": 1, "loss": None, "accuracy": [0.5, 0.25]}]


def test_tracker_resumed_run_drops_later_and_torn_lines(tmp_path):
    with tracker(tmp_path) as log:
        for step in (1, 2, 3):
            log.log("train", step=step, values={"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with tracker(tmp_path, first_step=2) as log:
        log.log("train", step=3, values={"loss": 2.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
    ]


def test_tracker_other_ranks_write_nothing(tmp_path):
    with tracker(tmp_path, is_writer=False) as log:
        log.log("train", step=1, values={"loss": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


class FakeRun:
    """A W&B run whose connection breaks after `num_calls` calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls, self.logged, self.is_finished = num_calls, [], False

    def log(self, values, *, step):
        if len(self.logged) == self.num_calls:
            raise ConnectionError("gone")
        self.logged.append((step, values))

    def finish(self):
        self.is_finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.started = {}
    module.run = FakeRun(num_calls=2)
    module.login = lambda *, prompt: False

    def init(**arguments):
        module.started = arguments
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_tracker_wandb_gets_flat_values(tmp_path, fake_wandb):
    with tracker(tmp_path, wandb="offline") as log:
        log.log("eval", step=4, values={"rate": [0.5, 0.25], "by": {"code": 1.5}, "bad": None})
    expected = {"eval/rate/1": 0.5, "eval/rate/2": 0.25, "eval/by/code": 1.5}
    assert fake_wandb.run.logged == [(4, expected)]
    assert fake_wandb.run.is_finished
    assert fake_wandb.started["mode"] == "offline"
    assert fake_wandb.started["config"] == {"seed": 0}


def test_tracker_broken_wandb_costs_one_warning(tmp_path, fake_wandb, caplog):
    with tracker(tmp_path, wandb="offline") as log:
        for step in range(5):
            log.log("train", step=step, values={"loss": 1.0})
    assert len(lines(tmp_path)) == 5
    assert caplog.text.count("W&B stopped") == 1


def test_tracker_online_without_key_goes_on_without(tmp_path, fake_wandb, caplog):
    with tracker(tmp_path, wandb="online") as log:
        log.log("train", step=1, values={"loss": 1.0})
    assert len(lines(tmp_path)) == 1
    assert "no API key" in caplog.text
    assert fake_wandb.started == {}


def test_jsonable_replaces_only_non_finite_numbers():
    value = {"a": [1, float("inf")], 2: (0.5, "x")}
    assert jsonable(value) == {"a": [1, None], "2": [0.5, "x"]}
