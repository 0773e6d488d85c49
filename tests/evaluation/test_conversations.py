"""Prompts of several turns: asked in order with own answers, resumed, cut and counted."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import EngineConfig, EvalConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report.stored import Report, read_checked
from mtp_research.evaluation.report.terminal import render_text
from mtp_research.evaluation.run import evaluate as evaluate_module
from mtp_research.evaluation.run import journal as journal_module
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.run.evaluate import evaluate
from mtp_research.evaluation.run.journal import JOURNAL_FILE, Journal, open_journal
from mtp_research.evaluation.run.prompt_files import Prompt
from mtp_research.evaluation.run.prompts import EncodedPrompts, encode_prompt, encode_prompts
from mtp_research.evaluation.stats.outcome import PassRecord, turns_by_prompt
from mtp_research.evaluation.stats.statistics import (
    acceptance_by_context,
    acceptance_statistics,
    paired_differences,
    statistics_per_domain,
)
from mtp_research.evaluation.stats.summary import num_equal_texts
from mtp_research.models.target import load_target, load_tokenizer
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.evaluation.generations import generation, random_generations
from tests.evaluation.test_prompts import SpyTokenizer

TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")
NUM_NEW = 8
WORDS = [
    *(
        "model=lab_tiny",
        "model.dtype=float32",
        "model.device=cpu",
        f"sampling.max_new_tokens={NUM_NEW}",
    ),
    *("engine.max_num_requests=2", "spec.k=3"),
]
PROMPTS = [
    Prompt("tea", "howto", ("How do I make tea?", "And coffee?", "Which is better?"), "chat"),
    Prompt("sum", "arith", ("What is 48 + 37?", "And 12 more?"), "chat"),
    Prompt("one", "arith", ("What is 2 + 2?",), "chat"),
    Prompt("code", "code", ("def add(a, b):\n", "\n\ndef sub(a, b):\n"), "completion"),
]
LATER = {"tea/2": "tea", "tea/3": "tea", "sum/2": "sum", "code/2": "code"}


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(autouse=True)
def some_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_module, "load_prompts", lambda *_, **__: list(PROMPTS))


def run(folder: Path, *words: str) -> Report:
    evaluate(compose_config(EvalConfig, [*WORDS, *words]), folder)
    return read_checked(folder / "results.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_module, "load_prompts", lambda *_, **__: list(PROMPTS))
        return run(tmp_path_factory.mktemp("whole"))


def by_hand() -> dict[str, tuple[int, ...]]:
    """Every turn alone, with K = 0, its prompt written out here."""
    target, tokenizer = load_target(TARGET, dtype="float32", device="cpu"), load_tokenizer(TARGET)
    decoder = SpecDecoder(
        target, spec=SpecSettings(num_speculative_tokens=0), engine=EngineConfig(max_model_len=512)
    )
    sampling = SamplingParams(max_new_tokens=NUM_NEW, stop_token_ids=target.stop_token_ids)
    found: dict[str, tuple[int, ...]] = {}
    for prompt in PROMPTS:
        said, text = [], "" if prompt.format == "completion" else "<|bos|>"
        for number, turn in enumerate(prompt.turns, start=1):
            if prompt.format == "completion":
                text += turn
                asked = [tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
            else:
                text += f"<|user|>{turn}<|end|><|assistant|>"
                asked = tokenizer.encode(text, add_special_tokens=False)
            (record,) = decoder.generate([asked], sampling=sampling)
            said = [one for one in record.output_token_ids if one > 5]  # no special token
            answer = tokenizer.decode(said, clean_up_tokenization_spaces=False)
            text += answer if prompt.format == "completion" else f"{answer}<|end|>"
            name = prompt.question_id if number == 1 else f"{prompt.question_id}/{number}"
            found[name] = record.output_token_ids
    return found


def texts(records: Sequence[RequestRecord]) -> dict[str, tuple[int, ...]]:
    return {record.request_id: record.output_token_ids for record in records}


def test_every_condition_asks_what_turn_by_turn_by_hand_asks(whole: Report) -> None:
    expected = by_hand()
    for condition in whole.conditions:
        assert texts(condition.records) == expected, condition.label
        assert condition.prompt_of == LATER
        assert condition.cut_prompts == ()
    assert [c.lossless for c in whole.conditions] == ["is the baseline", *["identical 4/4"] * 2]
    assert [s.num_prompts for s in whole.summaries] == [4, 4, 4]
    assert [prompt.num_turns for prompt in whole.prompts] == [3, 2, 1, 2]
    assert [prompt.sha256 for prompt in whole.prompts] == [prompt.sha256 for prompt in PROMPTS]
    assert "turns: 8 of 4 prompts" in render_text(whole)


def test_first_turns_alone_are_the_first_turns_of_all(tmp_path: Path, whole: Report) -> None:
    first = run(tmp_path, "prompts.turns=first", "spec.k=0")
    names = {prompt.question_id for prompt in PROMPTS}
    expected = texts(whole.conditions[0].records)
    assert texts(first.conditions[0].records) == {name: expected[name] for name in names}
    assert [prompt.num_turns for prompt in first.prompts] == [1, 1, 1, 1]
    assert first.prompts[0].sha256 != whole.prompts[0].sha256
    assert first.prompts[2].sha256 == whole.prompts[2].sha256
    assert "turns:" not in render_text(first)


@pytest.mark.parametrize("num_writes", [1, 4])
def test_conversation_killed_between_turns_goes_on_with_its_own_answers(
    tmp_path: Path, whole: Report, monkeypatch: pytest.MonkeyPatch, num_writes: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "SYNC_EVERY_S", 0.0)
        add, left = Journal.add, [num_writes]

        def add_and_die(self: Journal, of: str, number: int, **fields: object) -> None:
            add(self, of, number, **fields)  # type: ignore[arg-type]
            left[0] -= of == "eagle"
            if left[0] == 0:
                raise Killed

        patch.setattr(Journal, "add", add_and_die)
        with pytest.raises(Killed):
            run(tmp_path, "spec.policy=[eagle]")
    lines = (tmp_path / JOURNAL_FILE).read_text().splitlines()[1:]
    parts = [json.loads(line) for line in lines]
    done = {r["request_id"] for p in parts if p["condition"] == "eagle" for r in p["records"]}
    assert 0 < len(done) < 8
    assert any(name in done and later not in done for later, name in LATER.items())
    resumed = run(tmp_path, "spec.policy=[eagle]")
    for ours, theirs in zip(resumed.conditions, whole.conditions[:2], strict=True):
        plain = [
            [dataclasses.replace(r, ttft_s=0.0, decode_s=0.0) for r in one.records]
            for one in (ours, theirs)
        ]
        assert plain[0] == plain[1]
        assert ours.audit == theirs.audit
    assert resumed.conditions[1].first.is_resumed


def test_turn_that_does_not_fit_is_cut_and_counted(tmp_path: Path, whole: Report) -> None:
    lengths = {r.request_id: r.num_prompt_tokens for r in whole.conditions[0].records}
    limit = lengths["tea/3"]  # one token is missing
    assert limit > max(length for name, length in lengths.items() if name != "tea/3")
    report = run(tmp_path, f"engine.max_model_len={limit}", "spec.policy=[eagle]")
    for condition in report.conditions:
        assert condition.cut_prompts == ("tea",)
        assert {r.request_id for r in condition.records} == lengths.keys() - {"tea/3"}
    told = " ".join(render_text(report).split())
    assert "did not fit the context" in told
    assert "baseline 1, eagle 1" in told
    fits = run(tmp_path / "fits", f"engine.max_model_len={limit + 1}", "spec.k=0")
    assert fits.conditions[0].cut_prompts == ()


def test_turns_of_a_prompt_are_one_unit_of_all_figures() -> None:
    later = {f"q{i}/{turn}": f"q{i}" for i in range(20) for turn in (2, 3)}
    names = [f"q{i}" for i in range(20)] + list(later)
    records = [
        dataclasses.replace(record, request_id=name)
        for name, record in zip(names, random_generations(60, probability=0.6, seed=1), strict=True)
    ]
    pooled = acceptance_statistics(records, num_speculative_tokens=3, prompt_of=later)
    apart = acceptance_statistics(records, num_speculative_tokens=3)
    assert (pooled.num_prompts, apart.num_prompts) == (20, 60)
    assert pooled.num_rounds == apart.num_rounds
    assert pooled.acceptance_length_micro.value == apart.acceptance_length_micro.value
    assert pooled.acceptance_length_micro.low != apart.acceptance_length_micro.low
    groups = turns_by_prompt(records, later)
    own = [
        1 + sum(sum(r.num_accepted_per_round) for r in turns)
        / sum(len(r.num_accepted_per_round) for r in turns)
        for turns in groups.values()
    ]  # fmt: skip
    assert pooled.acceptance_length_macro.value == pytest.approx(sum(own) / 20)
    forwards = sum(r.num_target_forwards for r in records)
    tokens = sum(len(r.output_token_ids) - 1 for r in records)  # each turn has a prefill
    assert pooled.target_forwards_per_token.value == pytest.approx(forwards / tokens)
    domains = {f"q{i}": "ab"[i % 2] for i in range(20)}
    found = statistics_per_domain(records, domains, num_speculative_tokens=3, prompt_of=later)
    assert {name: one.num_prompts for name, one in found.items()} == {"a": 10, "b": 10}
    (bucket, *_) = acceptance_by_context(records, seed=0, prompt_of=later)
    assert bucket.num_prompts == 20


def test_prompt_with_a_failed_turn_counts_in_no_figure() -> None:
    later = {"a/2": "a"}
    records = [generation("a", [3, 3]), generation("b", [0])]
    failed = [*records, generation("a/2", [0], finish_reason="error")]
    figures = acceptance_statistics(failed, num_speculative_tokens=3, prompt_of=later)
    assert (figures.num_prompts, figures.num_unfinished, figures.num_accepted) == (1, 1, 0)
    pairs = paired_differences(records, failed, num_speculative_tokens=3, prompt_of=later)
    assert pairs["acceptance_length_micro"].value == 0.0  # of b alone


def test_prompt_is_equal_if_all_its_turns_are() -> None:
    later = {"a/2": "a"}
    ours = [generation("a", [1]), generation("a/2", [1]), generation("b", [2])]
    assert num_equal_texts(ours, ours, prompt_of=later) == 2
    other = [ours[0], generation("a/2", [0]), ours[2]]
    assert num_equal_texts(ours, other, prompt_of=later) == 1
    assert num_equal_texts(ours[::2], ours, prompt_of=later) == 1  # cut on one side


def test_turns_are_in_the_order_in_which_they_were_asked() -> None:
    later = {f"a/{turn}": "a" for turn in range(2, 13)}
    records = sorted((generation(name, [1]) for name in ("a", *later)), key=lambda r: r.request_id)
    assert [r.request_id for r in turns_by_prompt(records, later)["a"]] == ["a", *later]


def test_pass_with_a_damaged_later_turn_has_not_ended(tmp_path: Path) -> None:
    config = compose_config(EvalConfig, WORDS)
    ids = ["a", "a/2", "a/3"]  # the third does not fit
    journal = open_journal(tmp_path, config, inputs={}, prompt_ids=ids)
    for name in ids[:2]:
        journal.add("eagle", 0, records=[generation(name, [1])], audit=None)
    journal.end_pass("eagle", 0, PassRecord(wall_s=1.0), num_records=2)
    journal.close()
    again = open_journal(tmp_path, config, inputs={}, prompt_ids=ids)
    assert again.stored("eagle", 0).times == PassRecord(wall_s=1.0)
    again.close()
    path = tmp_path / JOURNAL_FILE
    path.write_text(path.read_text().replace('"request_id":"a/2"', '"request_id":"a/3"'))
    damaged = open_journal(tmp_path, config, inputs={}, prompt_ids=ids).stored("eagle", 0)
    assert [record.request_id for record in damaged.records] == ["a"]
    assert damaged.times is None


def test_answer_has_no_special_and_no_stop_token_but_the_marks_of_thinking() -> None:
    tokenizer = load_tokenizer(TARGET)
    hello, end = tokenizer.encode("hello", add_special_tokens=False), 5
    record = dataclasses.replace(
        generation("a", []), output_token_ids=(4, *hello, 3000, *hello, end), finish_reason="stop"
    )
    encoded = EncodedPrompts((), (), ())
    mark = tokenizer.decode([3000])
    plain = Conversations(encoded, tokenizer, stop_token_ids=(end,))
    assert plain.text(record) == f"hello{mark}hello"
    assert Conversations(encoded, tokenizer, stop_token_ids=(3000,)).text(record) == "hellohello"
    marked = dataclasses.replace(encoded, thinking_token_ids=(4, 3000))
    thinking = Conversations(marked, tokenizer, stop_token_ids=(end,))
    assert thinking.text(record) == f"<|assistant|>hello{mark}hello"
    assert thinking.answer(record, is_open=False) == "hello"
    unended = dataclasses.replace(record, output_token_ids=(4, *hello))
    assert thinking.answer(unended, is_open=False) == ""
    unmarked = dataclasses.replace(record, output_token_ids=tuple(hello))
    assert thinking.answer(unmarked, is_open=False) == "hello"
    assert thinking.answer(unmarked, is_open=True) == ""  # the template began it
    assert thinking.answer(record, is_open=True) == "hello"


def test_id_of_a_later_turn_that_is_another_prompt_is_refused() -> None:
    prompts = (Prompt("a", "x", ("1", "2"), "chat"), Prompt("a/2", "x", ("3",), "chat"))
    with pytest.raises(IntegrityError, match=r"'a/2' is the name of a later turn"):
        Conversations(EncodedPrompts(prompts, ((7,), (7,)), ()), load_tokenizer(TARGET))


class Template(SpyTokenizer):
    """Writes a conversation as `role:content` and notes the variables of the template."""

    chat_template: str | None = "{% if enable_thinking %}"

    def apply_chat_template(self, conversation, **options):
        self.variables = set(options) - {"add_generation_prompt", "tokenize", "return_dict"}
        text = "".join(f"{one['role'][0]}:{one['content']};" for one in conversation)
        if options.get("enable_thinking"):
            text += "<"
        return [ord(character) for character in text]


class Letters(Template):
    """Decodes code points, too."""

    all_special_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], **_: object) -> str:
        return "".join(map(chr, token_ids))


def test_conversation_that_is_resumed_knows_all_its_answers_as_they_were() -> None:
    prompt = Prompt("a", "x", ("1", "2", "3"), "chat")
    encoded = encode_prompts([prompt], Letters(), max_model_len=99)
    talks = Conversations(encoded, Letters())
    done = [
        dataclasses.replace(generation(name, []), output_token_ids=tuple(map(ord, text)))
        for name, text in (("a", " x\n"), ("a/2", "y "))
    ]
    for num_done, expected in enumerate(("u:1;", "u:1;a: x\n;u:2;", "u:1;a: x\n;u:2;a:y ;u:3;")):
        left = talks.begin(done[:num_done], max_model_len=99).left
        assert [one.question_id for one in left.prompts] == [("a", "a/2", "a/3")[num_done]]
        assert ["".join(map(chr, ids)) for ids in left.token_ids] == [expected]
    last = dataclasses.replace(done[0], request_id="a/3")
    assert talks.begin([*done, last], max_model_len=99).left.prompts == ()
    failed = dataclasses.replace(done[1], finish_reason="error")
    assert talks.begin([done[0], failed], max_model_len=99).left.prompts == ()


def test_conversation_holds_system_turns_and_answers_in_order() -> None:
    prompt = Prompt("a", "x", ("1", "2", "3"), "chat", system="S")
    spoken = "".join(map(chr, encode_prompt(prompt, Template(), answers=["x", "y"])))
    assert spoken == "s:S;u:1;a:x;u:2;a:y;u:3;"
    completion = Prompt("a", "x", ("1", "2", "3"), "completion")
    assert encode_prompt(completion, Template(), answers=["x"]) == tuple(map(ord, "1x2"))


def test_thinking_reaches_the_template_only_where_it_is_asked_for() -> None:
    prompts = [Prompt("a", "x", ("1",), "chat")]
    tokenizer = Template()
    for thinking in (None, True, False):
        found = encode_prompts(prompts, tokenizer, max_model_len=99, thinking=thinking)
        assert tokenizer.variables == (set() if thinking is None else {"enable_thinking"})
        assert (found.token_ids[0][-1] == ord("<")) == (thinking is True)


def test_thinking_that_no_template_sees_is_refused() -> None:
    chat, completion = (Prompt("a", "x", ("1",), form) for form in ("chat", "completion"))
    silent = Template()
    silent.chat_template = "{{ messages }}"
    with pytest.raises(ConfigError, match=r"prompts\.thinking must be null, .* enable_thinking"):
        encode_prompts([chat], silent, max_model_len=99, thinking=False)
    with pytest.raises(ConfigError, match=r"every prompt has format completion, .* got true"):
        encode_prompts([completion], Template(), max_model_len=99, thinking=True)


def test_template_that_opens_thinking_is_noted_by_prompt() -> None:
    prompts = [Prompt("a", "x", ("1",), "chat"), Prompt("b", "x", ("<1>",), "completion")]
    markers = ["<", ">"]
    for thinking, expected in ((True, [True, False]), (False, [False, False])):
        found = encode_prompts(
            prompts, Template(), max_model_len=99, thinking=thinking, thinking_markers=markers
        )
        assert found.thinking_token_ids == (ord("<"), ord(">"))
        assert [entry.opens_thinking for entry in found.entries] == expected


def test_markers_that_are_no_token_are_refused_only_if_asked_for() -> None:
    prompts = [Prompt("a", "x", ("1",), "chat")]
    assert encode_prompts(prompts, Template(), max_model_len=99).thinking_token_ids is None
    with pytest.raises(ConfigError, match=r"prompts\.thinking_markers must be two different tok"):
        encode_prompts(prompts, Template(), max_model_len=99, thinking_markers=["<a>", "</a>"])
