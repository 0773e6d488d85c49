"""metrics.jsonl, and W&B that never ends a run."""

import json
import sys
import types

import pytest

from mtp_research.config.schema import LoggerConfig
from mtp_research.runtime.provenance import HIDDEN
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


def test_tracker_finds_nothing_wrong_with_a_whole_file(tmp_path, caplog):
    for step in (0, 1):
        with tracker(tmp_path, first_step=step) as log:
            log.log("train", step=step + 1, values={})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert not caplog.records


def test_tracker_of_a_run_without_a_checkpoint_starts_anew(tmp_path):
    for loss in (1.0, 2.0):
        with tracker(tmp_path, first_step=0) as log:
            log.log("eval", step=0, values={"loss": loss})
    assert [line["loss"] for line in lines(tmp_path)] == [2.0]


def test_tracker_of_a_finished_run_writes_its_result_once(tmp_path):
    for first_step in (0, 3):
        with tracker(tmp_path, first_step=first_step) as log:
            if not first_step:
                log.log("train", step=3, values={})
            log.result(step=3, values={"best_step": 2}, head=tmp_path)
    assert [line["kind"] for line in lines(tmp_path)] == ["train", "result"]


def test_tracker_drops_bytes_that_are_no_line_and_names_them(tmp_path, caplog):
    with tracker(tmp_path) as log:
        for step in (1, 2):
            log.log("train", step=step, values={})
    path = tmp_path / "metrics.jsonl"
    odd = [b"\xff\xfe", b"[]", b'{"kind": "train", "step": "1"}', b"[" * 5000]
    path.write_bytes(b"\n".join([*odd, path.read_bytes(), b'{"kind": "tr']))
    with tracker(tmp_path, first_step=2):
        pass
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    (record,) = caplog.records
    assert (
        "metrics.jsonl: dropped what is no line of metrics, at line [1, 2, 3, 4" in record.message
    )


def test_tracker_other_ranks_write_nothing(tmp_path):
    with tracker(tmp_path, is_writer=False) as log:
        log.log("train", step=1, values={"loss": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


class FakeRun:
    """A W&B run whose connection breaks after `num_calls` calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_calls, self.logged, self.is_finished = num_calls, [], False
        self.metrics, self.summary, self.artifacts, self.id = [], {}, [], "run-1"

    def define_metric(self, name, **arguments):
        self.metrics.append((name, arguments))

    def log(self, values):
        if len(self.logged) == self.num_calls:
            raise ConnectionError("gone")
        self.logged.append(values)

    def log_artifact(self, artifact):
        self.artifacts.append(artifact)

    def log_code(self, root, *, name):
        self.code = root

    def finish(self, *, exit_code):
        self.is_finished, self.exit_code = True, exit_code


class FakeTable:
    def __init__(self, *, columns):
        self.columns, self.rows = columns, []

    def add_data(self, *row):
        self.rows.append(row)


class FakeArtifact:
    def __init__(self, name, *, type):
        self.name, self.type, self.folders = name, type, []

    def add_dir(self, folder):
        self.folders.append(folder)


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.started = {}
    module.run = FakeRun(num_calls=3)
    module.login = lambda *, prompt: False
    module.Table, module.Artifact, module.Settings = FakeTable, FakeArtifact, dict

    def init(**arguments):
        module.started = arguments
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_SWEEP_ID", "WANDB_MODE", "WANDB_DISABLED", "WANDB_DISABLE_CODE"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_tracker_wandb_gets_flat_values_over_our_own_step(tmp_path, fake_wandb):
    with tracker(tmp_path, wandb="offline") as log:
        log.log("eval", step=4, values={"rate": [0.5, 0.25], "by": {"code": 1.5}, "bad": None})
        log.log("eval", step=2, values={"x": 1})  # after resuming from an older checkpoint
    expected = {"step": 4, "eval/rate/1": 0.5, "eval/rate/2": 0.25, "eval/by/code": 1.5}
    assert fake_wandb.run.logged == [expected, {"step": 2, "eval/x": 1}]
    assert ("*", {"step_metric": "step"}) in fake_wandb.run.metrics
    assert fake_wandb.run.is_finished
    assert fake_wandb.started["mode"] == "offline"
    assert fake_wandb.started["config"] == {"seed": 0}
    assert fake_wandb.started["id"] == fake_wandb.started["name"] == tmp_path.name
    assert fake_wandb.run.exit_code == 0


def test_tracker_wandb_run_of_one_job_of_many_is_named_after_all_of_them(tmp_path, fake_wandb):
    (tmp_path / "0").mkdir()
    with tracker(tmp_path / "0", wandb="offline"):
        pass
    assert fake_wandb.started["id"] == f"{tmp_path.name}-0"


def test_tracker_leaves_the_code_out_where_wandb_is_told_to(tmp_path, fake_wandb, monkeypatch):
    with tracker(tmp_path, wandb="offline"):
        assert fake_wandb.run.code.endswith("mtp_research")
    fake_wandb.run.code = None
    monkeypatch.setenv("WANDB_DISABLE_CODE", "true")
    with tracker(tmp_path, wandb="offline"):
        assert fake_wandb.run.code is None


def test_tracker_wandb_run_that_fails_is_ended_as_failed(tmp_path, fake_wandb):
    with pytest.raises(ZeroDivisionError), tracker(tmp_path, wandb="offline"):
        raise ZeroDivisionError
    assert fake_wandb.run.exit_code == 1


@pytest.mark.parametrize(
    ("asked", "mode", "wanted"),
    [("online", "offline", "offline"), ("offline", "dryrun", "offline"),
     ("offline", "disabled", None), ("disabled", "online", None)],
)  # fmt: skip
def test_tracker_obeys_wandb_mode(tmp_path, fake_wandb, monkeypatch, asked, mode, wanted):
    monkeypatch.setenv("WANDB_MODE", mode)
    with tracker(tmp_path, wandb=asked) as log:
        log.log("train", step=1, values={"loss": 1.0})
    assert fake_wandb.started.get("mode") == wanted
    assert len(fake_wandb.run.logged) == (wanted is not None)


def test_tracker_wandb_result_is_summary_table_and_artifact(tmp_path, fake_wandb):
    values = {"acceptance_length": 2.5, "length_by_domain": {"code": 3.0, "math": 2.0}}
    with tracker(tmp_path, wandb="offline") as log:
        log.result(step=9, values=values, head=tmp_path / "head")
    run = fake_wandb.run
    assert run.summary["acceptance_length"] == 2.5
    assert run.logged[-1]["acceptance_by_domain"].rows == [("code", 3.0), ("math", 2.0)]
    assert run.artifacts[0].folders == [str(tmp_path / "head")]
    assert run.artifacts[0].type == "model"


def test_tracker_wandb_in_a_sweep_leaves_the_run_s_name_to_the_agent(
    tmp_path, fake_wandb, monkeypatch
):
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    with tracker(tmp_path, wandb="offline"):
        pass
    assert fake_wandb.started["id"] is None


def test_tracker_wandb_config_is_redacted(tmp_path, fake_wandb):
    config = {"logger": {"api_key": "swordfish"}, "seed": 0}
    with Tracker(tmp_path, settings=LoggerConfig(wandb="offline"), config=config):
        pass
    assert fake_wandb.started["config"] == {"logger": {"api_key": HIDDEN}, "seed": 0}


def test_tracker_broken_wandb_costs_one_warning(tmp_path, fake_wandb, caplog):
    with tracker(tmp_path, wandb="offline") as log:
        for step in range(6):
            log.log("train", step=step, values={"loss": 1.0})
    assert len(lines(tmp_path)) == 6
    assert caplog.text.count("W&B stopped") == 1


def test_tracker_online_without_key_is_kept_offline_and_says_so_once(tmp_path, fake_wandb, caplog):
    with tracker(tmp_path, wandb="online") as log:
        log.log("train", step=1, values={"loss": 1.0})
        log.result(step=1, values={"loss": 1.0}, head=tmp_path)
    assert len(lines(tmp_path)) == 2
    assert fake_wandb.started["mode"] == "offline"
    (record,) = caplog.records
    assert "no API key" in record.message
    assert f"wandb sync {tmp_path}/wandb" in record.message


def test_jsonable_replaces_only_non_finite_numbers():
    value = {"a": [1, float("inf")], 2: (0.5, "x")}
    assert jsonable(value) == {"a": [1, None], "2": [0.5, "x"]}
