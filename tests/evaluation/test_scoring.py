"""Right answers: numbers in texts, programs from answers, limits of what runs, and points."""

import dataclasses
import itertools
import time
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.rules import validate
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report.comparable import entries
from mtp_research.evaluation.report.frame import frame_of
from mtp_research.evaluation.report.stored import Run, build_report, read_checked, write_results
from mtp_research.evaluation.report.terminal import render_text
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run import scoring
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.run.scoring import (
    Limits,
    Scorer,
    final_number,
    kind_of,
    passes_tests,
    program,
)
from mtp_research.evaluation.stats.text_figures import task_score
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import generation, some_prompts, three_conditions

TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")
QUICK = Limits(wall_s=6.0, cpu_s=1, memory_bytes=1 << 29, file_bytes=1 << 16)
BEGUN = '''from typing import List


def helper(x):
    return x + 1


def add(a: int, b: int) -> int:
    """Add."""
'''
CODE = {
    "prompt": BEGUN,
    "entry_point": "add",
    "test": "def check(add):\n    assert add(2, 3) == 5\n    assert add(0, 1) == 1",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She pays 3 * 4 = 12.\n#### 12", "12"),
        ("#### 1,234", "1234"),
        ("#### $-5", "-5"),
        ("#### -$5", "-5"),
        ("The answer is 42.", "42"),
        ("The answer is 42.0.", "42"),
        ("It costs $1,234.50 in all", "1234.5"),
        ("5-3", "3"),
        ("(5)-3", "3"),
        ("minus: -3", "-3"),
        ("\u22127", "-7"),
        ("**7**", "7"),
        ("\\boxed{8}", "8"),
        ("1, 2, 3", "3"),
        ("12,34", "34"),
        ("1,2345", "2345"),
        ("about .5", "0.5"),
        ("so...9", "9"),
        ("\u7b54\u6848\u662f42", "42"),
        ("version v2 gives 10", "10"),
        ("4 apples and v2", "4"),
        ("10% of it", "10"),
        ("first #### 3 apples, then 4 more", "3"),
        ("#### none, 5 before\n####", "5"),
        ("1000000.25 and 1,000,000.25", "1000000.25"),
        ("no number at all", None),
        ("", None),
    ],
)
def test_final_number_is_what_a_reader_takes_for_the_answer(text: str, expected: str | None):
    found = final_number(text)
    assert (found is None) == (expected is None)
    assert expected is None or found == scoring.Decimal(expected)


def chat(**reference: object) -> Prompt:
    return Prompt("a", "x", ("question",), "chat", reference=reference)


def test_kind_is_that_of_the_reference():
    assert kind_of(chat(answer="so 2 + 2\n#### 4")) == "exact"
    assert kind_of(chat(reference=["so 2 + 2\n#### 4"])) == "exact"
    assert kind_of(chat(reference=["an essay", "#### 4"])) is None
    assert kind_of(chat(answer="4")) is None  # not marked: any text may end in a number
    assert kind_of(chat(**CODE)) == "tests"
    assert kind_of(chat(test="x")) is None
    assert kind_of(chat()) is None
    both_turns = dataclasses.replace(chat(answer="#### 4"), turns=("1", "2"))
    assert kind_of(both_turns) is None


def completion() -> Prompt:
    return Prompt("a", "x", (BEGUN,), "completion", reference=CODE)


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b\n",
        "    return a + b\n\n\ndef main():\n    broken(",  # cut off in the middle of the next
        "    return a + b\nprint(add(1, 2)\n# and more",
        "    return sum(\n        [a, b]\n)\n",
        "    return helper(a) + b - 1",
    ],
)
def test_completion_goes_on_with_the_function_and_ends_with_it(answer: str):
    assert passes_tests(program(completion(), answer), QUICK)


@pytest.mark.parametrize(
    "answer", ["    return a - b\n", "    return a +", "return a + b", "", "    pass\n"]
)
def test_wrong_and_broken_completions_fail(answer: str):
    assert not passes_tests(program(completion(), answer), QUICK)


@pytest.mark.parametrize(
    "answer",
    [
        "Here it is:\n```python\ndef add(a: int, b: int) -> int:\n    x: List = [a, b]\n"
        "    return sum(x)\n```\nand wrong:\n```python\ndef add(a, b):\n    return 0\n```",
        "```\ndef add(a, b):\n    return helper(a) + b - 1\n```",
        "```python\n    return a + b\n```",  # the body alone
        "def add(a, b):\n    return a + b",  # no fence at all
        "```python\ndef add(a, b):\n    return a + b\n",  # the end is missing
    ],
)
def test_first_fenced_block_of_a_chat_answer_counts(answer: str):
    assert passes_tests(program(chat(**CODE), answer), QUICK)


def test_chat_answer_without_the_function_fails():
    for answer in ("I cannot help.", "```python\ndef plus(a, b):\n    return a + b\n```"):
        assert not passes_tests(program(chat(**CODE), answer), QUICK)


def test_endless_loop_is_killed_by_the_processor_clock_and_a_sleeper_by_the_wall_clock():
    began = time.monotonic()
    assert not passes_tests("while True:\n    pass", QUICK._replace(wall_s=60.0))
    assert time.monotonic() - began < 30.0
    began = time.monotonic()
    assert not passes_tests("import time\ntime.sleep(60)", QUICK._replace(wall_s=1.0))
    assert time.monotonic() - began < 30.0


def test_memory_hog_is_stopped_and_less_is_not():
    hog = "kept = bytearray({})\nfor i in range(0, len(kept), 4096):\n    kept[i] = 1"
    assert not passes_tests(hog.format(1 << 29), QUICK)
    assert passes_tests(hog.format(1 << 26), QUICK)
    caught = f"try:\n    {hog.format(1 << 29).splitlines()[0]}\n    fits = True\n"
    caught += "except MemoryError:\n    fits = False\nassert not fits"
    assert passes_tests(caught, QUICK)  # the limit is the process's own, not the machine's


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "raise SystemExit",
        "import os\nos.write(1, b'passed')\nos._exit(0)",
        "assert False",
        "open('big', 'w').write('x' * (1 << 20))",
        "input()",
    ],
)
def test_only_a_source_that_comes_to_its_end_has_passed(source: str):
    assert not passes_tests(source, QUICK)


def test_source_sees_an_empty_folder_and_none_of_our_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GITHUB_PAT", "swordfish")
    sees = "import os\nassert not os.listdir()\nassert 'GITHUB_PAT' not in os.environ"
    assert passes_tests(sees, QUICK)
    assert not passes_tests(sees.replace("not in", "in"), QUICK)


def test_what_a_source_starts_ends_with_it(tmp_path: Path):
    mark = tmp_path / "alive"
    source = (
        "import os, time\nif not os.fork():\n    os.close(3)\n    time.sleep(4)\n"
        f"    open({str(mark)!r}, 'w').write('x')\n    os._exit(0)\n"
    )
    passes_tests(source, QUICK._replace(wall_s=1.0))
    time.sleep(4.5)
    assert not mark.exists()


class Words:
    """A tokenizer whose token n is the n-th of its texts."""

    bos_token_id, chat_template, all_special_ids = None, None, ()

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, token_ids, **_: object) -> str:
        return "".join(self.texts[one] for one in token_ids)


def said(name: str, *token_ids: int, finish_reason: str = "stop") -> RequestRecord:
    record = generation(name, [], finish_reason=finish_reason)
    return dataclasses.replace(record, output_token_ids=token_ids)


def asked(*prompts: Prompt, texts: tuple[str, ...]) -> Conversations:
    encoded = EncodedPrompts(prompts, ((7,),) * len(prompts), (), (0, 1))
    return Conversations(encoded, Words("<think>", "</think>", *texts))  # type: ignore[arg-type]


def test_answers_are_held_against_their_own_reference_behind_the_thinking():
    right, other = (dataclasses.replace(chat(answer=f"#### {n}"), question_id=q) for q, n in
                    (("a", 4), ("b", 5)))  # fmt: skip
    talks = asked(right, other, chat_without(), texts=("4", " then 9", "5"))
    scorer = Scorer(talks, score="exact")
    assert scorer.scores([said("a", 2), said("b", 2), said("c", 2)]) == {"a": 1, "b": 0}
    assert scorer.scores([said("a", 0, 3, 1, 2), said("b", 0, 4)]) == {"a": 1, "b": 0}
    assert scorer.scores([said("a", 2, 3), said("b", 4, finish_reason="error")]) == {"a": 0}
    assert not scorer.runs_code
    assert Scorer(talks, score=None).scores([said("a", 2)]) is None


def chat_without() -> Prompt:
    return dataclasses.replace(chat(), question_id="c")


def test_code_runs_only_where_it_was_allowed_and_equal_answers_run_once(
    monkeypatch: pytest.MonkeyPatch,
):
    ran: list[str] = []
    monkeypatch.setattr(scoring, "passes_tests", lambda source: not ran.append(source))
    code = dataclasses.replace(completion(), question_id="code")
    number = dataclasses.replace(chat(answer="#### 4"), question_id="n")
    talks = asked(code, number, texts=("    return a + b\n", "4", "    return 0\n"))
    records = [said("code", 2), said("n", 3)]
    assert Scorer(talks, score="auto").scores(records) == {"n": 1}
    assert Scorer(talks, score="exact").scores(records) == {"n": 1}
    assert ran == []
    scorer = Scorer(talks, score="auto", run_code=True)
    assert scorer.runs_code
    assert scorer.scores(records) == scorer.scores(records) == {"code": 1, "n": 1}
    assert len(ran) == 1
    scorer.scores([said("code", 4)])
    assert len(ran) == 2
    assert Scorer(talks, score="tests", run_code=True).scores(records) == {"code": 1}


def test_score_without_a_prompt_that_has_one_is_refused():
    talks = asked(dataclasses.replace(completion(), question_id="code"), texts=())
    with pytest.raises(ConfigError, match=r"prompts\.score=exact needs .* got none among 1"):
        Scorer(talks, score="exact")
    with pytest.raises(ConfigError, match=r"prompts\.score=auto needs"):  # its code may not run
        Scorer(talks, score="auto")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["prompts.score=tests"], "prompts.run_code must be true for prompts.score=tests"),
        (["prompts.run_code=true"], "prompts.run_code must be false for prompts.score=null"),
        (["prompts.score=exact", "prompts.run_code=true"], "must be false for prompts.score=exact"),
        (["prompts.thinking_markers=[a]"], "prompts.thinking_markers must be a begin and an end"),
    ],
)
def test_keys_that_do_not_fit_are_refused(words: list[str], line: str):
    with pytest.raises(ConfigError, match=line):
        compose_config(EvalConfig, words)


def test_keys_that_fit_are_taken():
    config = compose_config(EvalConfig, ["prompts.score=auto", "prompts.run_code=true"])
    validate(config)


def test_points_and_what_is_lost_to_the_baseline_are_paired(tmp_path: Path):
    baseline, eagle, training = three_conditions(100)
    scored = [
        dataclasses.replace(baseline, scores={f"q{i}": int(i < 60) for i in range(100)}),
        dataclasses.replace(eagle, scores={f"q{i}": int(i < 60) for i in range(100)}),
        dataclasses.replace(training, scores={f"q{i}": int(i < 50) for i in range(100)}),
    ]
    points = [task_score(one, scored[0], seed=0) for one in scored]
    assert [p and (p.num_right, p.num_prompts, p.points.value) for p in points] == [
        (60, 100, 60.0),
        (60, 100, 60.0),
        (50, 100, 50.0),
    ]
    assert points[0] is not None
    assert points[0].points_to_baseline is None
    assert points[1] is not None
    assert points[1].points_to_baseline == (0.0, 0.0, 0.0)  # in pairs: exactly nothing
    assert points[2] is not None
    assert points[2].points_to_baseline is not None
    value, low, high = points[2].points_to_baseline
    assert value == -10.0
    assert -17.0 < low < -12.0 < -8.0 < high < -3.0  # 10 of 100 prompts, as one draws them
    own = points[2].points
    assert (own.high or 0) - (own.low or 0) > high - low  # pairing takes the prompts out
    report = build_report(scored, prompts=some_prompts(100), dtype="f", config={}, run={})
    shown = render_text(report)
    assert "50 of 100  50.0 [40.0, 60.0]  -10.0 [" in shown
    frame = frame_of(entries([Run("r", report)]))
    lost = frame[frame["figure"] == "score_points_difference"].set_index("condition")["value"]
    assert dict(lost) == {"eagle": 0.0, "training": -10.0}
    again = read_checked(write_results(tmp_path, report))
    assert [one.scores for one in again.conditions] == [one.scores for one in scored]
    assert "Right answers" not in render_text(
        build_report(three_conditions(4), prompts=some_prompts(4), dtype="f", config={}, run={})
    )


def test_evaluation_scores_every_condition_and_keeps_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = ["What is 48 + 37?", "What is 2 + 2?", "How do I make tea?"]
    prompts = [Prompt(f"p{i}", "x", (text,), "chat") for i, text in enumerate(texts)]
    words = ["model=lab_tiny", "model.dtype=float32", "model.device=cpu",
             "sampling.max_new_tokens=20", "spec.k=2",
             "spec.policy=[eagle]"]  # fmt: skip
    monkeypatch.setattr(evaluate_module, "load_prompts", lambda *_, **__: prompts)
    evaluate(compose_config(EvalConfig, words), tmp_path / "plain")
    plain = read_checked(tmp_path / "plain" / "results.json")
    tokenizer = load_tokenizer(TARGET)
    numbers = {
        r.request_id: final_number(tokenizer.decode(r.output_token_ids, skip_special_tokens=True))
        for r in plain.conditions[0].records
    }
    assert numbers["p0"] is not None
    references = [f"#### {numbers['p0']}", "#### 987654321", "no number"]
    prompts = [
        dataclasses.replace(prompt, reference={"answer": answer})
        for prompt, answer in zip(prompts, references, strict=True)
    ]
    monkeypatch.setattr(evaluate_module, "load_prompts", lambda *_, **__: prompts)
    evaluate(compose_config(EvalConfig, [*words, "prompts.score=exact"]), tmp_path / "scored")
    report = read_checked(tmp_path / "scored" / "results.json")
    assert [one.scores for one in report.conditions] == [{"p0": 1, "p1": 0}] * 2
    assert [one.score and one.score.points.value for one in report.summaries] == [50.0, 50.0]
    for folder, text in itertools.product(("plain", "scored"), [*texts, *references]):
        assert text not in (tmp_path / folder / "results.json").read_text()
