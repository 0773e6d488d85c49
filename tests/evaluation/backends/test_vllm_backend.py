"""Whole evaluations with a played vLLM: its arguments, its steps, its counters and its refusals."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends import vllm_backend
from mtp_research.evaluation.backends.protocol import Pass
from mtp_research.evaluation.backends.vllm_backend import SWITCHES, load_vllm
from mtp_research.evaluation.report.comparable import drafting, entries
from mtp_research.evaluation.report.page import results_sections
from mtp_research.evaluation.report.stored import Report, Run, read_checked
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run import settings_check
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.settings_check import check_settings
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from tests.evaluation.backends.played_vllm import PlayedVllm
from tests.evaluation.generations import asked_file

WORDS = [
    *(
        "backend=[own,vllm]",
        "model=lab_tiny",
        "model.dtype=float32",
        "model.device=cpu",
        "spec.k=3",
    ),
    *("spec.head=assets/lab_tiny/heads/chain_n3", "spec.policy=training", "engine.audit=false"),
    *("sampling.max_new_tokens=12", "engine.max_num_requests=2", "prompts.max_prompts=null"),
]
# On two of them each convention of vLLM shows in the rounds.
QUESTIONS = ("What is 48 + 37?", "What is 12 * 12?", "What is 3 + 4?")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:  # so that they are taken back
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    return asked_file(tmp_path_factory.mktemp("asked") / "prompts.jsonl", QUESTIONS)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedVllm:
    module = PlayedVllm()
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_backend, "warm_up", lambda *_: None)
    return module


Found = dict[str, ConditionResult]


def run(folder: Path, *words: str) -> tuple[Report, Found]:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)
    report = read_checked(folder / "results.json")
    return report, {one.label: one for one in report.conditions}


class Whole(NamedTuple):
    """An evaluation, the module that it met, its folder and the switches that this one found."""

    report: Report
    found: Found
    played: PlayedVllm
    folder: Path
    switches: list[str]


@pytest.fixture(scope="module")
def whole(asked: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, module = tmp_path_factory.mktemp("whole"), PlayedVllm()
    with pytest.MonkeyPatch.context() as patch:
        for name in SWITCHES:
            patch.setenv(name, "1")
        patch.setitem(sys.modules, "vllm", module)
        report, found = run(folder, asked)
        return Whole(report, found, module, folder, [os.environ[name] for name in SWITCHES])


def test_engine_stands_beside_our_loop_and_agrees_round_by_round(whole: Whole) -> None:
    report, found = whole.report, whole.found
    names = ["baseline", "training", "own as vllm", "vllm baseline", "vllm"]
    assert list(found) == names
    assert [found[name].first.backend for name in names[3:]] == ["vllm 0.24.0"] * 2
    assert {found[name].engine_name for name in names[:3]} == {"own"}
    assert all(one.lossless == "identical 3/3" for one in list(found.values())[1:])
    plain, drafted = report.agreements
    assert (plain.condition, plain.num_equal_texts) == ("vllm baseline", 3)
    assert (drafted.condition, drafted.reference) == ("vllm", "own as vllm")
    assert drafted.num_equal_rounds == drafted.num_rounds > 5
    assert drafted.num_whole_texts == 3
    pairs = {(pair.condition, pair.reference): pair.differences for pair in report.paired}
    assert pairs["vllm", "own as vllm"]["acceptance_length_micro"] == (0, 0, 0)
    assert ("vllm", "training") in pairs
    rounds = [[r.num_accepted_per_round for r in found[name].records] for name in names[1:3]]
    assert rounds[0] != rounds[1]  # or no convention would differ
    assert found["own as vllm"].policy == "eagle"
    assert whole.played.num_open == 0
    assert len(str(report.run["inputs"]["prompt_token_ids"])) == 64  # type: ignore[index]


def test_table_names_engine_and_version_of_every_row(whole: Whole) -> None:
    lines = (whole.folder / "table.txt").read_text().splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("Acceptance and speed")]
    rows = lines[first + 4 : first + 4 + len(whole.found)]
    for row, (label, one) in zip(rows, whole.found.items(), strict=True):
        assert row.startswith(f"{label}  ")
        assert f" {one.first.backend}  " in row
    assert any(line.startswith("Other engines, text by text") for line in lines)


def test_page_keeps_engines_apart(whole: Whole) -> None:
    run_ = Run("run", whole.report)
    found = {entry.key[1]: entry for entry in entries([run_])}
    baselines = {name: entry.baseline for name, entry in found.items()}
    labels = {name: one and one.summary.result.label for name, one in baselines.items()}
    assert labels["vllm"] == "vllm baseline"
    assert labels["training"] == labels["own as vllm"] == "baseline"
    names = [entry.series_name for entry in drafting(list(found.values()))]
    assert len(set(names)) == len(names) == 3
    (section,) = results_sections([run_])
    assert section.facts["engines"].endswith(", vllm 0.24.0")
    assert [grid.title for grid in section.grids].count(
        "Other engines, text by text and round by round"
    ) == 1


def test_last_round_is_left_out_on_every_side(whole: Whole) -> None:
    for label in ("training", "own as vllm", "vllm"):
        for record in whole.found[label].records:
            assert len(record.num_accepted_per_round) == record.num_target_forwards - 1


def test_arguments_are_those_that_make_steps_readable(whole: Whole) -> None:
    plain, drafting = whole.played.words
    assert "speculative_config" not in plain
    assert drafting["speculative_config"] == {"method": "mtp", "num_speculative_tokens": 3}
    for words in (plain, drafting):
        assert words["async_scheduling"] is False
        assert (words["dtype"], words["max_num_seqs"]) == ("float32", 2)
        assert words["enforce_eager"] is True
        assert words["attention_config"] == {"backend": "TRITON_ATTN"}
        # lab_tiny ties lm_head, which vLLM's class leaves as it was allocated: K = 0 needs it too.
        assert Path(words["model"]) == whole.folder / "exported" / "vllm-0"
    config = json.loads((Path(drafting["model"]) / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    longest = max(one.num_prompt_tokens for one in whole.found["vllm"].records) + 12
    assert drafting["max_model_len"] >= longest + 3
    assert whole.switches == ["0", "0"]


def test_counters_stand_beside_the_steps(whole: Whole) -> None:
    counted, records = whole.found["vllm"].first.engine_counters, whole.found["vllm"].records
    assert counted is not None
    assert counted["num_drafts"] == sum(one.num_target_forwards for one in records)
    kept = sum(sum(one.num_accepted_per_round) for one in records)
    assert counted["num_accepted_tokens"] >= kept > 0
    told = f"vllm: the engine's own counters say {counted['num_drafts']} rounds"
    text = " ".join((whole.folder / "table.txt").read_text().split())
    assert told in text
    assert f"warning: {told}" not in text


def test_counters_that_say_something_else_are_a_warning(
    tmp_path: Path, played: PlayedVllm, asked: str
) -> None:
    played.lost_rounds = 1
    run(tmp_path, asked, "baseline=false")
    text = " ".join((tmp_path / "table.txt").read_text().split())
    assert "warning: vllm: the engine's own counters say" in text


def test_requests_of_a_batch_are_told_apart(
    tmp_path: Path, played: PlayedVllm, asked: str, whole: Whole
) -> None:
    _, alone = run(tmp_path, asked, "engine.max_num_requests=1", "baseline=false")
    rounds = [
        [record.num_accepted_per_round for record in found["vllm"].records]
        for found in (alone, whole.found)
    ]
    assert rounds[0] == rounds[1]
    steps = [found["vllm"].first.num_steps for found in (alone, whole.found)]
    assert steps[0] > steps[1] > 0  # type: ignore[operator]
    assert alone["vllm"].lossless == "identical 3/3"  # with our first answers: there is no K = 0


def test_engine_of_other_conventions_is_seen(
    tmp_path: Path, played: PlayedVllm, asked: str
) -> None:
    played.played_engine = "transformers"
    report, _ = run(tmp_path, asked, "baseline=false")
    (drafted,) = report.agreements
    assert drafted.num_equal_texts == 3
    assert drafted.num_equal_rounds < drafted.num_rounds


def test_steps_that_overlap_are_refused(tmp_path: Path, played: PlayedVllm, asked: str) -> None:
    played.merged_steps = True
    with pytest.raises(IntegrityError, match=r"vllm, request .* its rounds cannot be told"):
        run(tmp_path, asked, "spec.k=1")


def test_engines_are_alone_in_memory_and_a_journal_is_read(
    tmp_path: Path, played: PlayedVllm, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_engines: list[int] = []
    decode = vllm_backend.VllmBackend.decode

    def noting(self: vllm_backend.VllmBackend, number: int, done: Sequence[RequestRecord]) -> Pass:
        open_engines.append(played.num_open)
        return decode(self, number, done)

    monkeypatch.setattr(vllm_backend.VllmBackend, "decode", noting)
    words = [asked, "timing.passes=2", "sampling.max_new_tokens=4"]
    with monkeypatch.context() as patch:
        patch.setattr(evaluate_module, "build_report", lambda *_, **__: 1 / 0)  # a kill
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, *words)
    assert open_engines == [1] * 4  # two conditions, twice
    _, found = run(tmp_path, *words)
    assert len(open_engines) == 4
    assert len(found["vllm"].passes) == 2
    assert found["vllm"].first.backend == "vllm 0.24.0"
    assert found["vllm"].first.wall_s is not None


# Refusals.


def test_missing_engine_is_refused_before_anything_is_loaded() -> None:
    config = compose_config(EvalConfig, WORDS)
    with pytest.raises(EnvironmentFault, match=r"must find vLLM 0\.24\.0, got none; pip "):
        check_settings(config)
    with pytest.raises(EnvironmentFault, match="got none"):
        load_vllm()


@pytest.mark.parametrize("version", ["0.25.0", "0.9.2"])
def test_other_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", PlayedVllm(version))
    with pytest.raises(EnvironmentFault, match=rf"vLLM 0\.24\.0, .* got {version}"):
        load_vllm()


def test_build_that_does_not_load_says_why(
    played: PlayedVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> ModuleType:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(settings_check.importlib, "import_module", fails)
    with pytest.raises(EnvironmentFault, match=r"got ImportError: libcudart\.so\.13"):
        load_vllm()


def test_tied_target_without_an_export_is_refused(
    tmp_path: Path, played: PlayedVllm, asked: str
) -> None:
    with pytest.raises(ConfigError, match=r"spec\.k must be above 0 for backend=vllm"):
        run(tmp_path, asked, "spec.k=0")
    assert not list(tmp_path.iterdir())


def test_prompts_of_several_turns_are_refused(tmp_path: Path, played: PlayedVllm) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question_id": "a", "category": "x", "turns": ["Hi", "And?"]}))
    with pytest.raises(ConfigError, match=r"prompts\.turns must be first .*1 prompts have several"):
        run(tmp_path / "run", f"prompts.path={path}")


def test_model_of_the_hub_is_refused(tmp_path: Path, played: PlayedVllm) -> None:
    with pytest.raises(ConfigError, match=r"model\.path must be a folder .* got org/name"):
        run(tmp_path, "model.path=org/name")
