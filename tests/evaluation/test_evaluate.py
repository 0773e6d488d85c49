"""Whole evaluations on the shipped target: order of passes, and kill and resume."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.backends import own_backend
from mtp_research.evaluation.report.stored import recompute
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run import journal as journal_module
from mtp_research.evaluation.run.conditions import conditions_of
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.journal import (
    JOURNAL_FILE,
    Journal,
    check_resumable,
    open_journal,
)
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.stats.outcome import ConditionResult, PassRecord
from mtp_research.heads.draft_vocabulary import RANKING_FILE
from mtp_research.models.target import Target
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.app.test_run_lock import held_by_another

WORDS = [
    "model=lab_tiny",
    "model.dtype=float32",
    "model.device=cpu",
    "prompts.max_prompts=4",
    "sampling.max_new_tokens=8",
    "engine.max_num_requests=2",
    "engine.max_model_len=512",
    "spec.k=3",
]


class Killed(Exception):
    """Stands for a kill."""


def run(folder: Path, *words: str) -> list[ConditionResult]:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)
    return list(recompute(folder / "results.json").conditions)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[ConditionResult]:
    """An evaluation that nobody interrupts."""
    return run(tmp_path_factory.mktemp("whole"))


def totals(conditions: list[ConditionResult]) -> object:
    """Everything but times."""
    return [
        (
            condition.label,
            condition.lossless,
            condition.audit,
            [dataclasses.replace(r, ttft_s=0.0, decode_s=0.0) for r in condition.records],
        )
        for condition in conditions
    ]


def kill_after(monkeypatch: pytest.MonkeyPatch, label: str, num_writes: int) -> None:
    """Raise once the journal has been written that often for a condition."""
    monkeypatch.setattr(journal_module, "SYNC_EVERY_S", 0.0)
    add, left = Journal.add, [num_writes]

    def add_and_die(self: Journal, of: str, number: int, **fields: object) -> None:
        add(self, of, number, **fields)  # type: ignore[arg-type]
        left[0] -= of == label
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(Journal, "add", add_and_die)


def test_killed_and_resumed_run_has_the_totals_of_an_uninterrupted_one(
    tmp_path: Path, whole: list[ConditionResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, "eagle", 1)
        with pytest.raises(Killed):
            run(tmp_path)
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    finished = [json.loads(line) for line in lines[1:]]
    num_eagle = sum(len(f.get("records", ())) for f in finished if f["condition"] == "eagle")
    assert 0 < num_eagle < 4  # the kill came in the middle
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"condition":"eagle","pass":0,"rec')  # and cut a line off
    resumed = run(tmp_path)
    assert totals(resumed) == totals(whole)
    assert [c.first.is_resumed for c in resumed] == [False, True, False]
    assert [c.first.wall_s is None for c in resumed] == [False, True, False]
    assert not (tmp_path / JOURNAL_FILE).exists()


def test_folder_of_another_unfinished_evaluation_is_refused_with_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        kill_after(patch, "baseline", 1)
        with pytest.raises(Killed):
            run(tmp_path)
    other = compose_config(EvalConfig, [*WORDS, "spec.k=2", "seed=5"])
    with pytest.raises(ConfigError) as fault:
        check_resumable(tmp_path, other)
    assert "seed 0 -> 5; spec.num_speculative_tokens 3 -> 2;" in str(fault.value)

    def never(config: EvalConfig, output_dir: Path) -> None:
        raise AssertionError("must be refused before the run folder is written")

    before = sorted(path.name for path in tmp_path.iterdir())
    assert run_entry(EvalConfig, never, argv=[*WORDS, "seed=5", f"output_dir={tmp_path}"]) == 2
    assert "set output_dir=FOLDER" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == set(before) - {".lock"}


def test_ranking_that_drafts_are_cut_from_belongs_to_a_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = tmp_path / "head"
    shutil.copytree(REPOSITORY_ROOT / "assets" / "lab_tiny" / "heads" / "chain_n1", head)
    monkeypatch.setattr(evaluate_module, "target_hashes", lambda target: {})
    device = torch.device("cpu")
    target = cast(Target, SimpleNamespace(dtype=torch.float32, device=device, path=""))

    def inputs(*words: str) -> dict[str, object]:
        config = compose_config(EvalConfig, [*WORDS, f"spec.head={head}", *words])
        encoded = EncodedPrompts((), (), ())
        return evaluate_module._inputs(conditions_of(config), encoded, target)

    reduced = "spec.draft_vocabulary_size=256"
    before, whole = inputs(reduced), inputs()
    config = compose_config(EvalConfig, [*WORDS, f"spec.head={head}", reduced])
    kept = open_journal(tmp_path / "run", config, inputs=before)
    kept.end_pass("training", 0, PassRecord(wall_s=None))
    kept.close()
    ranking = json.loads((head / RANKING_FILE).read_text())
    ranking["token_ids"][:2] = ranking["token_ids"][1::-1]
    (head / RANKING_FILE).write_text(json.dumps(ranking))
    with pytest.raises(ConfigError, match=r"other inputs: token_rankings .*'head': .* -> .*'head'"):
        open_journal(tmp_path / "run", config, inputs=inputs(reduced))
    assert inputs() == whole  # a whole vocabulary is cut from nothing


def test_rounds_of_a_policy_that_was_edited_are_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_module, "target_hashes", lambda target: {})
    device = torch.device("cpu")
    target = cast(Target, SimpleNamespace(dtype=torch.float32, device=device, path=""))
    config = compose_config(EvalConfig, [*WORDS, "spec.policy=[training]"])

    def inputs() -> dict[str, object]:
        return evaluate_module._inputs(conditions_of(config), EncodedPrompts((), (), ()), target)

    kept = open_journal(tmp_path / "run", config, inputs=inputs())
    kept.end_pass("training", 0, PassRecord(wall_s=None))
    kept.close()
    edited = dataclasses.replace(POLICIES["training"], rows="fresh", clean=False, seen_in="me")
    monkeypatch.setitem(POLICIES, "training", edited)
    with pytest.raises(ConfigError, match=r"other inputs: policies .*rows=anchored .*rows=fresh "):
        open_journal(tmp_path / "run", config, inputs=inputs())
    said = dataclasses.replace(edited, rows="anchored", clean=True)  # the procedure is the old one
    monkeypatch.setitem(POLICIES, "training", said)
    open_journal(tmp_path / "run", config, inputs=inputs()).close()


def test_pass_from_before_full_batches_were_timed_is_still_read(tmp_path: Path) -> None:
    config = compose_config(EvalConfig, WORDS)
    journal = open_journal(tmp_path, config, inputs={})
    timed = PassRecord(wall_s=4.0, decode_wall_s=2.0, num_decode_tokens=9)
    journal.end_pass("eagle", 0, timed)
    journal.end_pass("eagle", 1, dataclasses.replace(timed, full_wall_s=1.0, num_full_tokens=5))
    journal.close()
    path = tmp_path / JOURNAL_FILE
    header, older, newer = path.read_text().splitlines()
    older = older.replace('"full_wall_s":null,"num_full_tokens":null,', "")
    assert "full" not in older
    header = header.replace('{"schema":2', '{"schema":1')  # which knew no checksums
    lines = [re.sub(r',"crc32":"\w+"', "", line) for line in (header, older, newer)]
    path.write_text("\n".join([*lines, ""]))
    again = open_journal(tmp_path, config, inputs={})
    assert again.stored("eagle", 0).times == timed
    times = again.stored("eagle", 1).times
    assert times is not None
    assert (times.full_wall_s, times.num_full_tokens) == (1.0, 5)
    again.close()


def test_line_that_a_kill_cut_off_is_taken_out_of_the_file(tmp_path: Path) -> None:
    config = compose_config(EvalConfig, WORDS)
    journal = open_journal(tmp_path, config, inputs={})
    journal.end_pass("eagle", 0, PassRecord(wall_s=1.0))
    journal.close()
    with (tmp_path / JOURNAL_FILE).open("a") as file:
        file.write('{"condition":"eagle","pass":1,"out')
    again = open_journal(tmp_path, config, inputs={})
    assert again.stored("eagle", 0).times == PassRecord(wall_s=1.0)
    assert again.stored("eagle", 1).times is None
    again.end_pass("eagle", 1, PassRecord(wall_s=None))
    again.close()
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()
    assert [json.loads(line).get("pass") for line in lines] == [None, 0, 1]
    with pytest.raises(ConfigError, match="other inputs: prompts None -> b"):
        open_journal(tmp_path, config, inputs={"prompts": "b"})


def test_damaged_journal_line_is_named(tmp_path: Path) -> None:
    config = compose_config(EvalConfig, WORDS)
    (tmp_path / JOURNAL_FILE).write_text('{"schema":1}\n[]\nnothing\n')
    with pytest.raises(ConfigError, match="other keys"):
        check_resumable(tmp_path, config)
    (tmp_path / JOURNAL_FILE).write_text("[]\n[]\n")
    with pytest.raises(IntegrityError, match=r"line 1: not a JSON object"):
        check_resumable(tmp_path, config)


@pytest.mark.usefixtures("warm_ups")
def test_passes_run_in_abba_order_with_equal_texts(
    tmp_path: Path, whole: list[ConditionResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    end_pass = Journal.end_pass

    def note(self: Journal, label: str, number: int, times: object, **rest: int) -> None:
        order.append((label, number))
        end_pass(self, label, number, times, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "end_pass", note)
    monkeypatch.setattr(own_backend, "MAX_WARM_UPS", 3)
    found = run(tmp_path, "timing.passes=2", "spec.policy=eagle", "engine.prefix_caching=true")
    assert order == [("baseline", 0), ("eagle", 0), ("eagle", 1), ("baseline", 1)]
    assert [len(c.repeats) for c in found] == [1, 1]
    assert [c.repeats[0].num_texts_equal for c in found] == [4, 4]
    assert all(2 <= c.first.num_warm_ups <= 3 for c in found)
    # No pass finds anything of a warm-up in the prefix cache, nor does the audit count one.
    assert [c.first.rows_per_step for c in found] == [c.first.rows_per_step for c in whole[:2]]
    assert totals(found) == totals(whole[:2])


def test_parts_of_a_step_add_up_to_its_wall_time(whole: list[ConditionResult]) -> None:
    for condition in whole:
        parts = condition.parts
        assert parts is not None
        assert condition.first.decode_wall_s is not None
        seconds = parts.target_s + parts.verify_s + parts.draft_s + parts.host_s
        assert seconds == pytest.approx(condition.first.decode_wall_s, rel=1e-6)
        assert min(parts.target_s, parts.verify_s, parts.host_s) > 0
    baseline, eagle, _ = (condition.parts for condition in whole)
    assert baseline is not None
    assert eagle is not None
    assert baseline.draft_s < 0.05 * baseline.target_s  # K = 0 drafts nothing
    assert eagle.draft_s > 0.05 * eagle.target_s


def test_texts_that_change_between_passes_exit_3_after_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Journal.stored

    def forge(self: Journal, label: str, number: int) -> journal_module.StoredPass:
        """A journal whose second pass holds another text."""
        if number == 0 or label not in forged:  # asked before the first pass, too
            return stored(self, label, number)
        first = forged[label]
        other = dataclasses.replace(first[0], output_token_ids=(1, 2, 3))
        return journal_module.StoredPass((other, *first[1:]), None, PassRecord(wall_s=1.0))

    forged: dict[str, list] = {}
    add = Journal.add

    def keep(self: Journal, label: str, number: int, **fields: object) -> None:
        forged.setdefault(label, []).extend(fields["records"])  # type: ignore[arg-type]
        add(self, label, number, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(Journal, "stored", forge)
    monkeypatch.setattr(Journal, "add", keep)
    with pytest.raises(IntegrityError, match=r"got others for baseline \(1 texts\)"):
        run(tmp_path, "timing.passes=2", "spec.k=0")
    assert (tmp_path / "results.json").is_file()


def test_domains_choose_prompts_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    config = compose_config(
        EvalConfig, [*WORDS, "prompts.domains=[arith,code]", "spec.k=0", "prompts.max_prompts=4"]
    )
    result = evaluate(config, tmp_path)
    stored = recompute(tmp_path / "results.json")
    assert sorted(p.category for p in stored.prompts) == ["arith", "arith", "code", "code"]
    assert result["num_prompts"] == 4
    hashes = cast(dict[str, str], stored.run["target"])  # two targets of one path differ in them
    assert sorted(hashes) == ["config_sha256", "tokenizer_sha256", "weights_sha256"]
    config = compose_config(EvalConfig, [*WORDS, "prompts.domains=[arithm]"])
    with pytest.raises(ConfigError, match=r"prompts\.domains must be among arith, code, "):
        evaluate(config, tmp_path)


def test_head_whose_training_goes_on_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "run" / "head"
    shutil.copytree(REPOSITORY_ROOT / "assets" / "lab_tiny" / "heads" / "ttt_n1", head)
    words = [*WORDS, "prompts.max_prompts=1", f"spec.head={head}", "spec.policy=[eagle]"]
    config = compose_config(EvalConfig, words)
    said = "warning: head was still being trained when it was read"
    with held_by_another(head.parent):
        evaluate(config, tmp_path / "early")
    assert said in capsys.readouterr().out
    early = recompute(tmp_path / "early" / "results.json")
    assert early.run["heads_in_training"] == ["head"]
    evaluate(config, tmp_path / "late")
    assert said not in capsys.readouterr().out
    assert "heads_in_training" not in recompute(tmp_path / "late" / "results.json").run
