"""The target's own answers as training text: form, resume, refusals; on the shipped target."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.target import load_target, load_tokenizer
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from mtp_research.studies import answer_tasks
from mtp_research.studies.answer_tasks import Evaluated, Task, user_turn
from mtp_research.studies.regenerate import (
    _engine,
    _parser,
    captured_engine,
    main,
    write_answers,
)
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


def test_regenerate_counts_cut_answers_and_rows_that_ask_nothing(tmp_path, source, capsys, caplog):
    with Path(source).open("a") as file:
        file.write('{"question": ""}\n{"foo": 1}\n')
    assert run(tmp_path / "out.jsonl", source, "--temperature", "0") == 0
    found = [
        r["token_ids"][r["num_prompt_tokens"] :] for r in lines(tmp_path / "out.jsonl").values()
    ]
    num_cut = sum(len(answer) == 12 for answer in found)
    assert num_cut
    assert f"{num_cut} of 4 answers reach --max-new-tokens=12" in capsys.readouterr().out
    assert "2 of 6 rows ask nothing and are left out, the first at" in caplog.text
    assert "set.jsonl:5" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got an empty file"),
        ('{"question": ""}\n', "must have text of a user in question, got none; fix the rows."),
    ],
)
def test_regenerate_source_without_a_question_says_what_it_has(
    tmp_path, source, capsys, text, message
):
    Path(source).write_text(text)
    assert run(tmp_path / "out.jsonl", source) == 2
    assert message in capsys.readouterr().err


def test_regenerate_into_a_folder_is_refused_before_loading(tmp_path, source, capsys):
    assert run(tmp_path, source) == 2
    assert f"--output must be a file, got the folder {tmp_path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ['{"id": "a", "question": "Why?"}\n', "[1]\n", '{"question": "Why?"}']
)
def test_regenerate_appends_to_answers_alone(tmp_path, source, capsys, text):
    own = tmp_path / "own.jsonl"
    own.write_text(text)
    assert run(own, source) == 2
    assert f"got a line without id and token_ids ({own}:1)" in capsys.readouterr().err
    assert own.read_text() == text
    assert not (tmp_path / "own.jsonl.settings.json").exists()
    assert run(source, source) == 2
    assert f"another file than --source, got {source} for both" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--max-prompts", "--max-new-tokens", "--batch", "--concurrency"]
)
def test_regenerate_numbers_below_one_are_refused(tmp_path, source, capsys, option):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "out.jsonl", source, f"{option}=-1")
    assert f"argument {option}: must be an integer >= 1, got '-1'" in capsys.readouterr().err


def test_regenerate_says_its_own_options(tmp_path, source, capsys):
    assert run(tmp_path / "out.jsonl", source, "--top-p", "2") == 2
    said = capsys.readouterr().err
    assert "--top-p" in said
    assert "sampling." not in said


def test_regenerate_nothing_left_to_ask_says_why(tmp_path, source, capsys):
    assert run(tmp_path / "out.jsonl", source, "--exclude", source) == 2
    said = capsys.readouterr().err
    assert f"got {len(QUESTIONS)} questions of --source, all of which --exclude holds" in said


def test_regenerate_with_other_settings_does_not_mix(tmp_path, source, capsys):
    assert run(tmp_path / "out.jsonl", source) == 0
    assert run(tmp_path / "out.jsonl", source, "--temperature", "0") == 2
    assert "temperature 0.6, now 0.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--temperature", "-1"), "--temperature must be a number"),
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


class _Card:
    """Stands for a target on a GPU, of a family that can be captured or not."""

    def __init__(
        self, device: str, *, has_recurrent_state: bool = False, num_parameters: int = 10**9
    ) -> None:
        self.device, self.has_recurrent_state = torch.device(device), has_recurrent_state
        self.family_name, self.dtype, self.exchange = "qwen3", torch.bfloat16, None
        self.model = torch.nn.Linear(num_parameters, 1, bias=False, device="meta")


@pytest.mark.parametrize(
    ("device", "words", "is_captured"),
    [
        ("cuda", [], True),
        ("cuda", ["--no-graphs"], False),
        ("cpu", [], False),
        ("cpu", ["--graphs"], True),  # which the decoder refuses by name
    ],
)
def test_steps_are_captured_on_a_gpu_unless_told_otherwise(device, words, is_captured):
    args = _parser().parse_args(["--target", "x", "--output", "y", "--batch", "256", *words])
    engine = _engine(args, _Card(device))
    if not is_captured:
        assert (engine.cuda_graphs, engine.compile, engine.max_num_batched_tokens) == (
            *(False, False),
            1024,
        )
        return
    preset = OmegaConf.load(REPOSITORY_ROOT / "conf" / "engine" / "h200.yaml")
    changed = {"max_num_requests": 256, "admit_together": 32}
    changed |= {"max_num_batched_tokens": 8192, "max_prefill_chunk": 2048}  # prompts come together
    assert engine == EngineConfig(**(OmegaConf.to_container(preset) | changed))


def test_steps_of_small_targets_are_no_larger_than_what_is_captured():
    sizes = {"batch": 32, "max_model_len": None}
    small, large = (
        captured_engine(_Card("cuda", num_parameters=count), **sizes).max_num_batched_tokens
        for count in (135_000_000, 1_700_000_000)
    )
    assert (small, large) == (4096, 8192)


def test_families_that_cannot_be_captured_are_decoded_without_graphs(capsys):
    args = _parser().parse_args(["--target", "x", "--output", "y"])
    assert not _engine(args, _Card("cuda", has_recurrent_state=True)).cuda_graphs
    assert "does not support recurrent layers" in capsys.readouterr().err


def test_requests_are_made_one_batch_ahead_and_every_answer_is_written(tmp_path):
    target = load_target(TARGET)
    engine = EngineConfig(max_num_requests=3, max_model_len=64, audit=False, admit_together=2)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    tasks = [Task(f"t:{n}", "t", (5 + n, 9), number=n) for n in range(11)]
    most, add = [], decoder.add_request

    def adding(*args, **kwargs):
        most.append(decoder.num_waiting)
        return add(*args, **kwargs)

    decoder.add_request = adding
    list(decoder.generate([[7, 8]], max_new_tokens=2))  # answers of another call are not written
    count = write_answers(
        decoder,
        tasks,
        output=tmp_path / "out.jsonl",
        params_of=lambda task: SamplingParams(max_new_tokens=2 + task.number),
    )
    found = lines(tmp_path / "out.jsonl")
    assert count == len(found) == 11
    assert {name: len(one["token_ids"]) for name, one in found.items()} == {
        f"t:{n}": 4 + n for n in range(11)
    }
    assert max(most) == 2


@pytest.mark.slow
def test_processes_of_a_launch_write_the_same_lines_as_one(tmp_path, source):
    words = ["--self-chat", "5", "--self-text", "4", "--temperature", "1"]
    assert run(tmp_path / "one.jsonl", source, *words) == 0
    output = tmp_path / "two.jsonl"
    killed = {"id": "of a killed launch", "token_ids": [1, 2], "num_prompt_tokens": 1}
    (tmp_path / "two.jsonl.rank1").write_text(f'{json.dumps(killed)}\n{{"id":"cut o')
    argv = ["--target", TARGET, "--output", str(output), "--source", source, "--device", "cpu"]
    printed = run_ranks(__name__, "run_rank", *argv, "--max-new-tokens", "12", *words)
    assert printed.count("documents written") == 1
    found = lines(output)
    assert len(found) == len(output.read_text().splitlines())  # no question was asked twice
    assert found.pop("of a killed launch") == killed
    assert found == lines(tmp_path / "one.jsonl")
    assert any(name.startswith("self-chat") for name in found)
    assert any(name.startswith("self-text") for name in found)
    assert not list(tmp_path.glob("*.rank*"))


def test_messages_that_do_not_end_are_counted(tmp_path, source, capsys, monkeypatch):
    words = ("--self-chat", "6", "--self-text", "2")
    monkeypatch.setattr(answer_tasks, "_MESSAGE_TOKENS", 2)  # so few that none can end
    assert run(tmp_path / "out.jsonl", source, *words) == 0
    assert not any(name.startswith("self-chat") for name in lines(tmp_path / "out.jsonl"))
    said = "6 of 8 messages and beginnings that the target invented were left out"
    assert said in capsys.readouterr().out


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
