"""The folder of an evaluation: finished results are kept, damaged journals are not believed."""

import json
import shutil
from pathlib import Path

import pytest

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.report.stored import recompute
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run import journal
from mtp_research.evaluation.run.journal import JOURNAL_FILE, Journal, open_journal
from mtp_research.evaluation.stats.outcome import PassRecord
from mtp_research.runtime.errors import IntegrityError

WORDS = [
    "model=lab_tiny",
    "model.dtype=float32",
    "model.device=cpu",
    "prompts.max_prompts=3",
    "sampling.max_new_tokens=4",
    "engine.max_num_requests=1",
    "engine.max_model_len=512",
    "spec.k=1",
    "spec.policy=training",
]


def run(folder: Path, *words: str) -> int:
    return run_entry(EvalConfig, run_evaluation, argv=[*WORDS, *words, f"output_dir={folder}"])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


class Decoded(Exception):
    """An evaluation decoded, or got as far as that."""


@pytest.fixture(scope="module")
def journal_lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What the journal of a whole evaluation holds before it is removed."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "SYNC_EVERY_S", 0.0)  # a line for each prompt
        patch.setattr(evaluate_module, "write_results", _raise)
        with pytest.raises(Decoded):
            run(folder)
    return (folder / JOURNAL_FILE).read_bytes().splitlines(keepends=True)


def _raise(*_: object, **__: object) -> None:
    raise Decoded


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert run(folder) == 0
    return folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of a finished evaluation."""
    return shutil.copytree(finished, tmp_path / "run")


def test_finished_evaluation_of_other_settings_is_refused_and_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(folder)
    assert run(folder, "spec.k=2", "seed=5") == 2
    line = capsys.readouterr().err
    assert f"error: output_dir {str(folder)!r} holds a finished evaluation with other keys" in line
    assert "seed 0 -> 5; spec.num_speculative_tokens 1 -> 2; " in line
    assert "; repeat its command, or " in line
    assert "set output_dir=FOLDER, or overwrite=true to replace it." in line
    assert files(folder) == before
    stored = json.loads((folder / "results.json").read_text())
    del stored["config"]["seed"]
    (folder / "results.json").write_text(json.dumps(stored))
    assert run(folder) == 2
    line = capsys.readouterr().err
    assert "repeat its command with the version that began it, which has not all of these" in line


def test_finished_evaluation_of_the_same_settings_is_shown_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate_module, "run_group", _raise)
    stored = json.loads((folder / "results.json").read_text())
    stored["config"]["prompts"]["name"] = "lab"  # of a version that had the key
    (folder / "results.json").write_text(json.dumps(stored))
    before = files(folder)
    assert run(folder, "logger.tags=[again]") == 0
    shown = capsys.readouterr()
    assert "already finished in this folder; overwrite=true runs it anew" in shown.err
    last = json.loads(shown.out.splitlines()[-1])
    assert last["conditions"]["training"]["num_speculative_tokens"] == 1
    assert files(folder) == before


def test_finished_evaluation_of_other_inputs_is_refused_and_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = json.loads((folder / "results.json").read_text())
    stored["run"]["heads"]["chain_n3"]["sha256"] = "of a head that was trained on"
    (folder / "results.json").write_text(json.dumps(stored))
    before = files(folder)
    assert run(folder) == 2
    assert "holds a finished evaluation with other inputs: heads " in capsys.readouterr().err
    assert files(folder) == before


def test_overwrite_replaces_a_finished_evaluation_and_a_kill_leaves_no_mixture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(folder)
    words = ("spec.k=2", "overwrite=true")
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "run_group", _raise)
        with pytest.raises(Decoded):  # killed on the way
            run(folder, *words)
    left = files(folder)
    assert sorted(left) == ["config.json", JOURNAL_FILE, "git.diff", "run.json"]
    assert left["config.json"] != before["config.json"]
    assert run(folder, *words) == 0
    assert recompute(folder / "results.json").conditions[1].num_speculative_tokens == 2


def test_overwrite_goes_on_with_its_own_unfinished_evaluation(
    tmp_path: Path, journal_lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(b"".join(journal_lines))
    monkeypatch.setattr(evaluate_module, "write_results", _raise)
    with pytest.raises(Decoded):
        run(tmp_path, "overwrite=true")
    assert (tmp_path / JOURNAL_FILE).read_bytes() == b"".join(journal_lines)


def test_folder_of_another_entry_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"trainer": {}}))
    before = files(folder)
    assert run(folder, "overwrite=true") == 2
    assert "holds a run of train.py, got eval.py task=evaluate" in capsys.readouterr().err
    assert files(folder) == before


def test_damaged_journal_lines_are_dropped_and_decoded_again(
    tmp_path: Path,
    finished: Path,
    journal_lines: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    number = next(n for n, line in enumerate(journal_lines) if b'"output_token_ids":[' in line)
    changed = journal_lines[number].replace(b'"output_token_ids":[', b'"output_token_ids":[7')
    damaged = [*journal_lines, journal_lines[-1]]
    damaged[number] = changed
    (tmp_path / JOURNAL_FILE).write_bytes(b"".join(damaged))
    assert run(tmp_path) == 0
    assert f"{JOURNAL_FILE}: 3 lines, changed or doubled, are dropped" in caplog.text
    ours, theirs = (recompute(one / "results.json").conditions for one in (tmp_path, finished))
    texts = [[(r.request_id, r.output_token_ids) for r in c.records] for c in ours]
    assert texts == [[(r.request_id, r.output_token_ids) for r in c.records] for c in theirs]
    assert [c.first.is_resumed for c in ours] == [True, False]


def test_doubled_records_are_read_once(tmp_path: Path, journal_lines: list[bytes]) -> None:
    config = compose_config(EvalConfig, WORDS)
    inputs = json.loads(journal_lines[0])["inputs"]
    (tmp_path / JOURNAL_FILE).write_bytes(b"".join([*journal_lines, journal_lines[1]]))
    for _ in range(2):
        kept = open_journal(tmp_path, config, inputs=inputs)
        records = kept.stored("baseline", 0).records
        assert len(records) == 3
        kept.add("baseline", 0, records=records[:1], audit={"WRONG": 1})  # whole, but not new
        kept.close()


def test_header_that_was_changed_and_unknown_prompts_are_refused(
    tmp_path: Path, journal_lines: list[bytes]
) -> None:
    config = compose_config(EvalConfig, WORDS)
    inputs = json.loads(journal_lines[0])["inputs"]
    path = tmp_path / JOURNAL_FILE
    path.write_bytes(b"".join(journal_lines))
    with pytest.raises(IntegrityError, match=r"holds prompt '.*', which is not asked here; set"):
        open_journal(tmp_path, config, inputs=inputs, prompt_ids=["other"])
    path.write_bytes(b"".join(journal_lines).replace(b'"seed":0', b'"seed":1', 1))
    with pytest.raises(IntegrityError, match="line 1: not as it was written"):
        open_journal(tmp_path, config, inputs=inputs)


def test_pass_without_prompts_of_its_own_keeps_its_end(tmp_path: Path) -> None:
    config = compose_config(EvalConfig, WORDS)
    kept: Journal = open_journal(tmp_path, config, inputs={})
    kept.end_pass("training", 0, PassRecord(wall_s=1.0))
    kept.end_pass("training", 0, PassRecord(wall_s=2.0))
    kept.close()
    again = open_journal(tmp_path, config, inputs={})
    assert again.stored("training", 0).times == PassRecord(wall_s=1.0)
    again.close()
