"""Rounds inside and outside of thinking, and the texts beside the results."""

import dataclasses
import json
import random
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EvalConfig
from mtp_research.evaluation.report.comparable import entries
from mtp_research.evaluation.report.frame import frame_of
from mtp_research.evaluation.report.stored import Run, build_report, read_checked, write_results
from mtp_research.evaluation.report.terminal import render_text
from mtp_research.evaluation.report.wandb_log import MAX_GENERATIONS, generation_rows
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.text_figures import (
    Thinking,
    rounds_in_thinking,
    thinking_split,
)
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import generation, some_prompts, three_conditions

BEGIN, END = 900, 901
MARKS = Thinking(BEGIN, END, frozenset())


def with_marks(accepted: list[int], **marks: int):
    """A record whose output token at these places begins or ends thinking."""
    record = generation("q0", accepted)
    token_ids = list(record.output_token_ids)
    for name, place in marks.items():
        token_ids[place] = {"begin": BEGIN, "end": END}[name.rstrip("2")]
    return dataclasses.replace(record, output_token_ids=tuple(token_ids))


@pytest.mark.parametrize(
    ("marks", "is_open", "expected"),
    [
        # accepted [2, 0, 1]: rounds give output tokens 1..3, 4, 5..6; token 0 is the prefill's
        ({}, False, [False, False, False]),
        ({}, True, [True, True, True]),  # never ended
        ({"begin": 0}, False, [True, True, True]),
        ({"begin": 0, "end": 2}, False, [True, False, False]),  # straddles: where it starts
        ({"begin": 0, "end": 4}, False, [True, True, False]),
        ({"begin": 0, "end": 3}, False, [True, False, False]),
        ({"begin": 1, "end": 5}, False, [False, True, True]),  # the mark itself comes outside
        ({"begin": 4, "end": 6}, False, [False, False, True]),
        ({"end": 0}, True, [False, False, False]),
        ({"end": 3}, True, [True, False, False]),
        ({"end": 3}, False, [False, False, False]),  # ends what never began
        ({"begin": 0, "end": 1, "begin2": 3}, False, [True, True, True]),
        ({"end": 1, "begin2": 4}, True, [True, False, True]),
    ],
)
def test_round_belongs_to_the_part_in_which_it_starts(marks, is_open: bool, expected: list[bool]):
    record = with_marks([2, 0, 1], **marks)
    assert list(rounds_in_thinking(record, MARKS, is_open=is_open)) == expected


def test_rounds_beyond_a_cut_text_are_in_its_last_part():
    record = dataclasses.replace(with_marks([2, 0, 1], begin=0), output_token_ids=(BEGIN, 1, 2))
    assert rounds_in_thinking(record, MARKS, is_open=False) == (True, True, True)


def thoughtful(num_prompts: int) -> list[ConditionResult]:
    """Conditions whose prompts of even number think up to a place of their own."""
    generator, conditions = random.Random(0), []
    for condition in three_conditions(num_prompts):
        records = []
        for index, record in enumerate(condition.records):
            token_ids = [one + 1000 for one in record.output_token_ids]
            if index % 2 == 0:
                token_ids[0], token_ids[generator.randrange(3, 19)] = BEGIN, END
            records.append(dataclasses.replace(record, output_token_ids=tuple(token_ids)))
        conditions.append(dataclasses.replace(condition, records=tuple(records)))
    return conditions


def test_parts_add_up_and_reach_tables_csv_and_results(tmp_path: Path):
    conditions, run = thoughtful(30), {"thinking_token_ids": (BEGIN, END)}
    report = build_report(conditions, prompts=some_prompts(30), dtype="f", config={}, run=run)
    baseline, *drafting = report.summaries
    assert baseline.thinking is None  # it has no rounds
    for summary in drafting:
        split, all_rounds = summary.thinking, summary.acceptance
        assert split is not None
        parts = (split.num_rounds_thinking, split.num_rounds_answer)
        assert min(parts) > 0
        assert sum(parts) == all_rounds.num_rounds
        lengths = (split.acceptance_length_thinking.value, split.acceptance_length_answer.value)
        accepted = [n * ((length or 0) - 1) for n, length in zip(parts, lengths, strict=True)]
        assert sum(accepted) == pytest.approx(all_rounds.num_accepted)
        assert lengths[0] != lengths[1]
    shown = render_text(report)
    assert "Acceptance length (micro) by part of the text" in shown
    frame = frame_of(entries([Run("r", report)]))
    rows = frame[frame["figure"].str.endswith(("_thinking", "length_micro_answer"))]
    assert sorted(rows["condition"]) == ["eagle", "eagle", "training", "training"]
    again = read_checked(write_results(tmp_path, report))
    assert again.summaries[1].thinking == drafting[0].thinking
    stored = json.loads((tmp_path / "results.json").read_text())
    del stored["run"]["thinking_token_ids"]  # as older files
    for one in stored["summary"]["conditions"]:
        del one["thinking"]
        del one["score"]
    for one in stored["conditions"]:
        for name in ("prompt_of", "cut_prompts", "scores"):
            del one[name]
    for one in stored["prompts"]:
        del one["num_turns"]
        del one["opens_thinking"]
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert [one.thinking for one in read_checked(tmp_path / "results.json").summaries] == [None] * 3


def test_text_without_thinking_and_unknown_marks_have_no_parts():
    condition = three_conditions(4)[1]
    assert thinking_split(condition, thinking=None, seed=0) is None
    assert thinking_split(condition, thinking=MARKS, seed=0) is None
    opened = Thinking(BEGIN, END, frozenset({"q1"}))
    split = thinking_split(condition, thinking=opened, seed=0)
    assert split is not None
    assert split.num_rounds_thinking == 20  # all of q1
    assert split.num_rounds_answer == 60
    failed = [dataclasses.replace(r, finish_reason="error") if r.request_id == "q1" else r
              for r in condition.records]  # fmt: skip
    unfinished = dataclasses.replace(condition, records=tuple(failed))
    assert thinking_split(unfinished, thinking=opened, seed=0) is None


PROMPTS = [
    Prompt("tea", "howto", ("How do I make tea?", "And coffee?"), "chat"),
    Prompt("sum", "arith", ("What is 48 + 37?",), "chat", reference={"answer": "#### 85"}),
]
WORDS = ["model=lab_tiny", "model.dtype=float32", "model.device=cpu", "sampling.max_new_tokens=8",
         "spec.k=2", "spec.policy=[eagle]", "prompts.score=exact"]  # fmt: skip


def test_generations_hold_every_text_and_the_results_hold_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(evaluate_module, "load_prompts", lambda *_, **__: list(PROMPTS))
    evaluate(compose_config(EvalConfig, WORDS), tmp_path)
    report = read_checked(tmp_path / "results.json")
    lines = [json.loads(one) for one in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert [(one["condition"], one["id"]) for one in lines] == [
        ("baseline", "tea"),
        ("baseline", "sum"),
        ("eagle", "tea"),
        ("eagle", "sum"),
    ]
    tokenizer = load_tokenizer(str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target"))
    by_label = {one.label: {r.request_id: r for r in one.records} for one in report.conditions}
    for line in lines:
        names = ["tea", "tea/2"] if line["id"] == "tea" else ["sum"]
        assert [turn["asked"] for turn in line["turns"]] == list(
            PROMPTS[0 if line["id"] == "tea" else 1].turns
        )
        for name, turn in zip(names, line["turns"], strict=True):
            record = by_label[line["condition"]][name]
            text = tokenizer.decode(record.output_token_ids, skip_special_tokens=True)
            assert turn["text"] == text
            assert turn["text"] not in (tmp_path / "results.json").read_text()
            assert turn["accepted"] == list(record.num_accepted_per_round)
            assert turn["finish_reason"] == record.finish_reason
        assert line["score"] == (0 if line["id"] == "sum" else None)
        assert line["is_cut"] is False


def test_wandb_rows_are_turns_prompt_by_prompt_and_not_too_many(tmp_path: Path):
    turn = {"asked": "Q", "text": "A", "accepted": [2, 0], "drafted": [3, 3]}
    lines = [
        {"condition": label, "id": f"p{i}", "score": 1, "turns": [turn | {"finish_reason": "stop"}]}
        for label in ("baseline", "eagle")
        for i in range(MAX_GENERATIONS)
    ]
    lines[0]["turns"] *= 2
    path = tmp_path / "generations.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    rows = generation_rows(path)
    assert len(rows) == MAX_GENERATIONS
    assert [row[:3] for row in rows[:4]] == [
        ["p0", 1, "baseline"],
        ["p0", 2, "baseline"],
        ["p0", 1, "eagle"],
        ["p1", 1, "baseline"],
    ]
    assert rows[0][3:] == ["Q", "A", "2 0", "stop", 1]
    assert generation_rows(tmp_path / "none.jsonl") == []
