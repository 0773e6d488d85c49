"""The target's own answers as training text: form, resume, refusals; on the shipped target."""

import json

import pytest
from omegaconf import OmegaConf

from mtp_research.config.schema import EngineConfig
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.studies.answer_tasks import Evaluated, user_turn
from mtp_research.studies.regenerate import _engine, _parser, main
from tests.ranks import run_ranks

TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")
QUESTIONS = [f"What is {left} + {left + 3}?" for left in range(4)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in QUESTIONS))
    return str(path)


def run(output, source, *words):
    argv = ["--target", TARGET, "--output", str(output), "--source", source, "--device", "cpu"]
    return main([*argv, "--max-new-tokens", "12", *words])


def run_rank(*argv):
    assert main(argv) == 0


def lines(output):
    return {record["id"]: record for record in map(json.loads, output.read_text().splitlines())}


@pytest.mark.parametrize("words", [("--temperature", "0"), ()], ids=["greedy", "sampled"])
def test_regenerate_killed_run_resumes_to_the_same_lines(tmp_path, source, capsys, words):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    assert run(whole, source, *words) == 0
    first, *_, last = whole.read_text().splitlines(keepends=True)
    cut.write_text(first + last[:20])  # a line and a part of one had been written
    (tmp_path / "cut.jsonl.settings.json").write_text(
        (tmp_path / "whole.jsonl.settings.json").read_text()
    )
    assert run(cut, source, *words) == 0
    assert "3 of 4 documents written" in capsys.readouterr().out
    assert lines(cut) == lines(whole)


def test_regenerate_asks_in_the_chat_template(tmp_path, source):
    assert run(tmp_path / "out.jsonl", source, "--max-prompts", "1", "--xz") == 0
    (record,) = lines(tmp_path / "out.jsonl").values()
    prompt = load_tokenizer(TARGET).apply_chat_template(
        [{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True, return_dict=False
    )
    assert record["token_ids"][: record["num_prompt_tokens"]] == prompt
    assert record["num_prompt_tokens"] == len(prompt)
    assert (record["id"], record["domain"]) == ("set.jsonl:1", "set")
    assert (tmp_path / "out.jsonl.xz").is_file()


def test_regenerate_with_other_settings_does_not_mix(tmp_path, source, capsys):
    assert run(tmp_path / "out.jsonl", source) == 0
    assert run(tmp_path / "out.jsonl", source, "--temperature", "0") == 2
    assert "temperature 0.6, now 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "-1"), "sampling.temperature"),
        (("--source", "nowhere.jsonl"), "must be an existing file"),
        (("--field", "body"), "set --field"),
    ],
    ids=["temperature", "no-file", "field"],
)
def test_regenerate_bad_argument_exits_with_2_and_one_line(
    tmp_path, source, capsys, words, message
):
    assert run(tmp_path / "out.jsonl", source, *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out.jsonl").exists()


def test_graphs_take_the_settings_of_engine_h200():
    words = ["--target", "x", "--output", "y", "--batch", "256"]
    plain, captured = (
        _engine(_parser().parse_args([*words, *more])) for more in ([], ["--graphs"])
    )
    assert (plain.cuda_graphs, plain.compile, plain.max_num_batched_tokens) == (False, False, 1024)
    preset = OmegaConf.load(REPOSITORY_ROOT / "conf" / "engine" / "h200.yaml")
    wanted = EngineConfig(**(OmegaConf.to_container(preset) | {"max_num_requests": 256}))
    assert captured == wanted


@pytest.mark.slow
def test_processes_of_a_launch_write_the_same_lines_as_one(tmp_path, source):
    words = ["--self-chat", "5", "--self-text", "4", "--temperature", "1"]
    assert run(tmp_path / "one.jsonl", source, *words) == 0
    output = tmp_path / "two.jsonl"
    (tmp_path / "two.jsonl.rank1").write_text('{"id":"of a killed launch"}\n{"id":"cut o')
    argv = ["--target", TARGET, "--output", str(output), "--source", source, "--device", "cpu"]
    printed = run_ranks(__name__, "run_rank", *argv, "--max-new-tokens", "12", *words)
    assert printed.count("documents written") == 1
    found = lines(output)
    assert found.pop("of a killed launch") == {"id": "of a killed launch"}
    assert found == lines(tmp_path / "one.jsonl")
    assert any(name.startswith("self-chat") for name in found)
    assert any(name.startswith("self-text") for name in found)
    assert not list(tmp_path.glob("*.rank*"))


def test_user_turn_is_what_the_template_writes_around_a_message():

    tokenizer = load_tokenizer(TARGET)
    turn = user_turn(tokenizer)
    message = tokenizer.encode("Hello", add_special_tokens=False)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_dict=False
    )
    assert [*turn.opening, *message, *turn.closing] == whole
    assert turn.end == turn.closing[0]


def test_user_turn_that_ends_with_plain_text_is_refused():

    tokenizer = load_tokenizer(TARGET)
    tokenizer.chat_template = "{% for m in messages %}Q: {{ m['content'] }}\n{% endfor %}A:"
    with pytest.raises(ConfigError, match="ends the user's turn with a special token"):
        user_turn(tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="--self-chat needs a chat template"):
        user_turn(tokenizer)


def test_questions_of_an_evaluation_are_left_out_and_counted(tmp_path, source, capsys):
    asked = tmp_path / "eval.jsonl"
    asked.write_text(json.dumps({"turns": ["something else", "what is 1 + 4"]}) + "\n")
    assert run(tmp_path / "out.jsonl", source, "--exclude", str(asked)) == 0
    assert sorted(lines(tmp_path / "out.jsonl")) == ["set.jsonl:1", "set.jsonl:3", "set.jsonl:4"]
    assert "1 left out as questions of --exclude" in capsys.readouterr().out


def test_thirteen_words_in_a_row_are_an_overlap_and_twelve_are_none(tmp_path):
    words = [f"w{n}" for n in range(30)]
    asked = tmp_path / "eval.jsonl"
    asked.write_text(json.dumps({"question": " ".join(words)}) + "\n")
    evaluated = Evaluated([str(asked)])
    assert evaluated.holds("Before: " + ", ".join(words[5:18]).upper())
    assert not evaluated.holds("before " + " ".join(words[5:17]) + " behind")
    assert evaluated.holds(" ".join(words) + "?")
    assert not Evaluated([]).holds("anything")
