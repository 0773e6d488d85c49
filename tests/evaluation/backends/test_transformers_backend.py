"""transformers' own generation on the shipped target, in the table beside our loop."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.backends import transformers_backend
from mtp_research.evaluation.backends.protocol import StepLog
from mtp_research.evaluation.report.stored import Report, read_checked
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.stats.agreement import Agreement
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.runtime.errors import ConfigError, IntegrityError
from tests.evaluation.generations import asked_file

WORDS = [
    *(
        "backend=[own,transformers]",
        "model=lab_tiny",
        "model.dtype=float32",
        "model.device=cpu",
        "spec.k=3",
    ),
    *("spec.policy=eagle", "engine.audit=false", "engine.max_num_requests=1"),
    *("sampling.max_new_tokens=14", "prompts.max_prompts=null"),
]
QUESTIONS = ("What is 12 * 12?", "What is 3 + 4?")
VERSION = f"transformers {transformers.__version__}"


class Whole(NamedTuple):
    """An evaluation and its folder."""

    report: Report
    found: dict[str, ConditionResult]
    folder: Path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asked_file(tmp_path_factory.mktemp("asked") / "prompts.jsonl", QUESTIONS)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_backend, "warm_up", lambda *_: None)


def run(folder: Path, *words: str) -> Whole:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)
    report = read_checked(folder / "results.json")
    return Whole(report, {one.label: one for one in report.conditions}, folder)


@pytest.fixture(scope="module")
def whole(asked: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return run(tmp_path_factory.mktemp("whole"), asked)


def test_library_keeps_the_drafts_that_our_loop_keeps_by_its_conventions(whole: Whole) -> None:
    """The heads are chain_n3: three modules, `training`, of which eagle is another way to run."""
    plain, drafted = whole.report.agreements
    assert plain == Agreement("transformers baseline", "baseline", 2, 2, 2, 0, 0)
    assert drafted.num_equal_texts == drafted.num_whole_texts == 2
    assert drafted.num_equal_rounds == drafted.num_rounds > 8
    kept = [
        [record.num_accepted_per_round for record in whole.found[label].records]
        for label in ("transformers", "own as transformers", "eagle")
    ]
    assert kept[0] == kept[1] != kept[2]
    assert whole.found["own as transformers"].policy == "training"
    assert {0, 1} <= {count for record in kept[0] for count in record}


def test_experts_in_float64_run_too(asked: str, tmp_path: Path) -> None:
    words = ("model.dtype=float64", "sampling.max_new_tokens=4", "prompts.max_prompts=1")
    drafted = run(tmp_path, asked, *words).report.agreements[1]
    assert (drafted.num_equal_texts, drafted.num_equal_rounds) == (1, drafted.num_rounds)


def test_rows_name_the_library_and_have_its_times(whole: Whole) -> None:
    for label in ("transformers", "transformers baseline"):
        one = whole.found[label]
        assert one.first.backend == VERSION
        assert one.lossless == "identical 2/2"
        assert one.first.wall_s is not None
        # One text at a time: the first token of the last waits for all texts before it.
        first, last = one.records
        assert 0 < first.ttft_s + first.decode_s < last.ttft_s < one.first.wall_s
    text = (whole.folder / "table.txt").read_text()
    assert text.count(f" {VERSION} ") == 2


def test_text_that_ends_by_itself_ends_alike(whole: Whole, tmp_path: Path, asked: str) -> None:
    """An end token that the first text has in its middle."""
    text = whole.found["baseline"].records[0].output_token_ids
    source = Path("assets/lab_tiny/target").resolve()
    target = tmp_path / "target"
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    settings = json.loads((source / "generation_config.json").read_text())
    (target / "generation_config.json").unlink()
    (target / "generation_config.json").write_text(
        json.dumps(settings | {"eos_token_id": [text[6]]})
    )
    words = [asked, f"model.path={target}"]
    found = run(tmp_path / "short", *words).found
    reasons = {
        label: [record.finish_reason for record in one.records] for label, one in found.items()
    }
    assert "stop" in reasons["baseline"]
    assert all(reason == reasons["baseline"] for reason in reasons.values())
    assert all(one.lossless == "identical 2/2" for one in list(found.values())[1:])
    ignored = run(tmp_path / "ignored", *words, "sampling.ignore_eos=true", "spec.k=0").found
    assert {len(one.output_token_ids) for one in ignored["transformers baseline"].records} == {14}


def test_modules_that_came_with_the_target_need_no_export(
    whole: Whole, tmp_path: Path, asked: str
) -> None:
    release = whole.folder / "exported" / "transformers-0"
    words = [asked, f"model.path={release}", f"spec.head={release}", "baseline=false"]
    words.append("sampling.max_new_tokens=10")
    found = run(tmp_path, *words)
    assert not (tmp_path / "exported").exists()
    (drafted,) = found.report.agreements
    assert drafted.num_equal_rounds == drafted.num_rounds > 3


def test_number_of_drafts_is_the_number_of_modules(tmp_path: Path, asked: str) -> None:
    with pytest.raises(ConfigError, match=r"spec\.k must be 3 for backend=transformers, .* got 2"):
        run(tmp_path, asked, "spec.k=2")
    assert not list(tmp_path.iterdir())


def test_engine_that_got_another_prompt_is_refused(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = StepLog.begin
    monkeypatch.setattr(
        StepLog, "begin", lambda self, name, token_ids: begin(self, name, [*token_ids, 0])
    )
    with pytest.raises(IntegrityError, match=r"transformers, request q0: expected the prompt's"):
        run(tmp_path, asked, "spec.k=0")
