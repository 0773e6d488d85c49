"""The real W&B client, offline: runs are opened as users open them, and their files read back.

The words of the command line are those that `wandb agent` makes of `conf/sweep`.
"""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mtp_research.__main__ import run_evaluation, run_training
from mtp_research.app.cli import run_entry
from mtp_research.app.overrides import CONF_DIR
from tests.test_sweeps import SCHEMAS, commands

pytest.importorskip("wandb")
from wandb.proto.wandb_internal_pb2 import Record

_BLOCK, _HEADER = 32768, 7  # of the log that W&B keeps, LevelDB's form, behind seven bytes
_FULL, _FIRST, _LAST = 1, 2, 4
SWEEPS = sorted((CONF_DIR / "sweep").glob("*.yaml"))
SHORT = {
    "eval.py": [
        "model=lab_tiny",
        "engine=cpu",
        "prompts.max_prompts=1",
        "sampling.max_new_tokens=4",
    ],
    "train.py": [
        "model=lab_tiny",
        *("trainer.max_steps=1", "trainer.batch_size=1", "data.max_documents=40"),
        *("data.eval_documents=4", "model.device=cpu"),
    ],
}


def records(file: Path) -> Iterator[Record]:
    """What a run wrote, in order."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + _HEADER <= len(data):
        room = _BLOCK - place % _BLOCK
        if room < _HEADER:
            place += room
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part = data[place + _HEADER : place + _HEADER + size]
        parts = part if kind in (_FULL, _FIRST) else parts + part
        place += _HEADER + size
        if len(part) < size:  # is being written
            return
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(parts)
            yield record


def values_of(items: Iterable[Any]) -> dict[str, Any]:
    """Items of a record by key; the fields of a table or chart are `key.field`."""
    return {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in items}


def whole(file: Path) -> list[Record]:
    """All records: W&B's own process writes the last, `exit`, after the run has ended."""
    for _ in range(300):
        found = list(records(file))
        if found and any(one.HasField("exit") for one in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


class Stored:
    """One offline run of an output folder."""

    def __init__(self, folder: Path) -> None:
        (self.folder,) = folder.glob("wandb/offline-run-*")
        (file,) = self.folder.glob("*.wandb")
        self.records = whole(file)
        (self.run,) = (one.run for one in self.records if one.HasField("run"))
        self.history = [values_of(one.history.item) for one in self.records]
        self.summary: dict[str, object] = {}
        for one in self.records:
            self.summary |= values_of(one.summary.update)
        self.artifacts = {one.request.log_artifact.artifact.type for one in self.records}
        self.artifacts |= {one.artifact.type for one in self.records if one.HasField("artifact")}

    def table(self, key: str) -> list[dict[str, object]]:
        """Rows of a table by column."""
        (path,) = (one[f"{key}.path"] for one in self.history if f"{key}.path" in one)
        stored = json.loads((self.folder / "files" / path).read_text())
        return [dict(zip(stored["columns"], row, strict=True)) for row in stored["data"]]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "settings"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)


def launched(path: Path, folder: Path, *, dashes: str) -> str:
    """Run the first combination of a sweep, small; the entry."""
    sweep = yaml.safe_load(path.read_text(encoding="utf8"))
    python, program, *words = next(commands(sweep))
    assert python == "python"
    words = [word if word == "logger=wandb" else f"{dashes}{word}" for word in words]
    run = run_evaluation if program == "eval.py" else run_training
    more = [*SHORT[program], f"output_dir={folder}"]
    assert run_entry(SCHEMAS[program], run, argv=[*words, *more]) == 0
    return program


@pytest.mark.parametrize(
    "path",
    [path for path in SWEEPS if path.stem != "eval_policy_k"],  # which the next test runs
    ids=lambda path: path.stem,
)
def test_command_of_a_sweep_leaves_a_run_that_can_be_ranked(path: Path, tmp_path: Path) -> None:
    program = launched(path, tmp_path / "mine", dashes="")
    stored = Stored(tmp_path / "mine")
    assert stored.run.display_name == "mine"
    metric = yaml.safe_load(path.read_text(encoding="utf8"))["metric"]["name"]
    assert isinstance(stored.summary[metric], float)
    assert stored.artifacts >= {"code", "results" if program == "eval.py" else "model"}


def test_run_of_an_evaluation_has_numbers_curves_and_configuration(tmp_path: Path) -> None:
    launched(CONF_DIR / "sweep" / "eval_policy_k.yaml", tmp_path / "mine", dashes="--")
    stored = Stored(tmp_path / "mine")
    assert stored.run.display_name == "mine"
    assert stored.artifacts >= {"code", "results"}
    assert isinstance(stored.summary["best/ratio_to_baseline"], float)
    results = json.loads((tmp_path / "mine" / "results.json").read_text())
    rows = stored.table("figures")
    assert {type(row["value"]) for row in rows} <= {int, float, type(None)}
    lengths = {
        row["condition"]: row["value"] for row in rows if row["figure"] == "acceptance_length_micro"
    }
    (eagle,) = [one for one in results["summary"]["conditions"] if one["label"] == "eagle"]
    wanted = eagle["acceptance"]["acceptance_length_micro"]["value"]
    assert stored.summary["best/acceptance_length"] == pytest.approx(wanted)
    assert wanted in lengths.values(), lengths
    points = [one for one in stored.history if "K" in one]
    assert [one["K"] for one in points] == [0, 1]
    assert points[1]["over_k/acceptance_length/eagle"] == pytest.approx(wanted)
    axes = {one.metric.glob_name: one.metric.step_metric for one in stored.records}
    assert axes["over_k/*"] == "K"
    config = values_of(stored.run.config.update)
    assert config["spec"]["num_speculative_tokens"] == 1
    began = [index for index, one in enumerate(stored.records) if one.HasField("run")]
    assert began[0] < 5, "the run is opened first"
