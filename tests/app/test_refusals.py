"""What is refused before it harms: paths, names, folders of others; how it is said."""

import dataclasses
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_research import __main__ as entries
from mtp_research.app import doctor, export_command, plan_command
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig, ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig
from mtp_research.evaluation.run import evaluate
from mtp_research.policy import simulate
from mtp_research.pretrain import pretrain
from mtp_research.runtime.errors import ConfigError
from mtp_research.runtime.files import run_lock
from mtp_research.runtime.provenance import write_run_folder
from mtp_research.studies import draw_report, fault_price, policy_matrix, regenerate, tables
from mtp_research.training import loop, setup

NULL_HEAD = ["spec.head=null", "prompts.max_prompts=1"]
Command = Callable[[list[str]], object]
OptionFault = Callable[[Command, str], str]


def never(config: object, output_dir: Path) -> None:
    pytest.fail(f"the work must not start in {output_dir}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spec.head", "y" * 5000),
        ("spec.head", "[a,y/" + "y" * 256 + "]"),
        ("model.path", "y/" * 2000),
        ("prompts.path", "y" * 256),
        ("output_dir", "y" * 256),
        ("output_dir", "a\0b"),
        ("output_dir", "a\ud800b"),
    ],
)
def test_path_that_no_system_call_takes_exits_2(
    key: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_entry(EvalConfig, never, argv=[f"{key}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "must be text without NUL, at most 255 bytes a name and 3840 in all, got" in line
    assert len(line) < 300
    assert list(tmp_path.iterdir()) == []


def test_path_of_a_resumed_training_is_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("trainer.resume", "data.path", "head.path"):
        assert run_entry(TrainConfig, never, argv=[f"{word}={'r' * 300}"]) == 2
        assert f"error: {word} must be text without NUL" in capsys.readouterr().err


@pytest.mark.parametrize("many", [[], ["-m"]], ids=["one", "many"])
@pytest.mark.parametrize("name", ["../../../escaped", "/escaped", "a/b", "..", "", "x" * 101])
def test_model_name_leads_out_of_no_folder(
    name: str,
    many: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert run_entry(EvalConfig, never, argv=[*many, *NULL_HEAD, f"model.name={name}"]) == 2
    assert "model.name must be at most 100 letters" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "c"]


@pytest.mark.parametrize("subdir", ["../${hydra.job.num}", "/tmp", "${model.name}"])
def test_job_of_a_sweep_leads_out_of_no_folder(
    subdir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["-m", *NULL_HEAD, "model.name=../../a,../../b", f"output_dir={tmp_path / 'c' / 'd'}"]
    assert run_entry(EvalConfig, never, argv=[*argv, f"hydra.sweep.subdir={subdir}"]) == 2
    assert "hydra.sweep.subdir must stay below output_dir" in capsys.readouterr().err


def test_folder_in_use_names_who_holds_it(tmp_path: Path) -> None:
    with (
        run_lock(tmp_path),
        pytest.raises(ConfigError, match=rf"run \(process {os.getpid()} on {os.uname().nodename}"),
        run_lock(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] in ([".lock"], [])


def test_control_characters_of_a_file_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"category": "\x1b[31mRED\u202e\x9b", "turns": ["a"]}))
    argv = ["prompts.domains=[zzz]", f"prompts.path={path}", f"output_dir={tmp_path / 'run'}"]

    def warn(config: EvalConfig, output_dir: Path) -> None:
        from mtp_research.evaluation.run.prompts import load_prompts

        record = logging.LogRecord("x", logging.WARNING, "", 0, "bad \x1b[2J\nline", None, None)
        assert logging.lastResort is not None
        logging.lastResort.handle(record)
        load_prompts(config.prompts.path, domains=config.prompts.domains)

    assert run_entry(EvalConfig, warn, argv=argv) == 2
    assert capsys.readouterr().err == (
        "bad \\x1b[2J\nline\n"
        "error: prompts.domains must be among \\x1b[31mRED\\u202e\\x9b, got zzz; "
        "leave it out for all of them.\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--spec.kk=3"], "spec.kk is not a key of eval.py; nearest: spec.k"),
        (["--shell_completion"], "--shell_completion is not a flag; nearest: --shell-completion"),
        (["-spec.k", "3"], "-spec.k is not a flag; drop the dashes: spec.k=VALUE."),
        (
            ["-m", "sampling={temperature: 1, top_k: 2},{temperature: 0}"],
            "set its keys one by one: sampling.temperature=1.",
        ),
        (["timing={}"], "timing is a section, got {}; set its keys one by one: timing.NAME=VALUE."),
    ],
)
def test_message_says_what_to_type(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_entry(EvalConfig, never, argv=words) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "module", "name"),
    [
        ("heads", loop, "train_heads"),
        ("target", pretrain, "pretrain_target"),
        ("matrix", policy_matrix, "run_policy_matrix"),
        ("cache", setup, "cache_hidden"),
    ],
)
def test_training_is_described_when_its_folder_is_known_to_take_it(
    task: str, module: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig("answers.jsonl")
    config = TrainConfig(model=ModelConfig("tiny", "qwen3", "target"), data=data)
    write_run_folder(tmp_path, dataclasses.replace(config, task="before"))
    config.task = task
    is_held = task != "cache"  # which leaves nothing that another run could hurt

    def work(*_: object, on_start: Callable[[], object] | None = None, **__: object) -> dict:
        assert stored() == ("before" if is_held else task)
        if on_start is not None:
            on_start()
        return {}

    def stored() -> str:
        return json.loads((tmp_path / "config.json").read_text())["task"]

    monkeypatch.setattr(module, name, work)
    entries.run_training(config, tmp_path)
    assert stored() == task


@pytest.mark.parametrize(
    ("task", "module", "name"),
    [("evaluate", evaluate, "evaluate"), ("fault_price", fault_price, "price_faults")],
)
def test_evaluation_is_described_when_its_folder_is_known_to_take_it(
    task: str, module: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EvalConfig(model=ModelConfig("tiny", "qwen3", "target"), task=task)

    def work(*_: object, on_start: Callable[[], object]) -> dict:
        assert list(tmp_path.iterdir()) == []
        on_start()
        return {}

    monkeypatch.setattr(module, name, work)
    entries.run_evaluation(config, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["task"] == task


@pytest.fixture
def option_fault(capsys: pytest.CaptureFixture[str]) -> OptionFault:
    """The one line that a command refuses words with."""

    def refused(command: Command, words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            command(words.split())
        assert ended.value.code == 2
        line = capsys.readouterr().err
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        return line

    return refused


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (regenerate.main, "--target=t --output=o --temprature=0", "--temperature"),
        (export_command.main, "--model=m --head=h --out=o --fro vllm", "--for"),
        (export_command.main, "--model m --heads h --out o", "--head"),  # not as one that lacks
        (export_command.main, "--modle=m --head=h --out=o --for vlm", "--model"),
        (draw_report.main, "folder --ouu page", "--out"),
        (draw_report.main, "folder --ou page", "--out"),  # no short form of it
        (simulate.trace_main, "--polcy eagle", "--policy"),
        (simulate.main, "--round 3", "--rounds"),
        (doctor.main, "--hlep", "--help"),
        (plan_command.main, "model=lab_tiny --js", "--json"),
        (tables.main, "--hepl policy folder", "--help"),
        (tables.main, "policy folder --hepl", "--help"),
    ],
)
def test_an_option_that_is_not_there_is_told_with_those_near(
    option_fault: OptionFault, command: Command, words: str, expected: str
) -> None:
    line = option_fault(command, words)
    assert line.startswith("error: unrecognized arguments: --")
    assert f"; nearest: {expected}" in line


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        (export_command.main, "--model=m --head=h --out=o --for vlm", "vllm"),
        (tables.main, "compar one other", "compare"),
        (simulate.trace_main, "--policy egle", "eagle"),
        (simulate.main, "--schedule cycl", "cycle"),
    ],
)
def test_a_choice_that_is_not_there_is_told_with_those_near(
    option_fault: OptionFault, command: Command, words: str, expected: str
) -> None:
    line = option_fault(command, words)
    assert "invalid choice: " in line
    assert f"; nearest: {expected}" in line


@pytest.mark.parametrize(
    ("command", "words", "page"),
    [
        (tables.main, "policy folder --k 3", "mtp tables policy"),
        (tables.main, "policy", "mtp tables policy"),
        (tables.main, "--k 3 policy folder", "mtp tables"),
        (simulate.trace_main, "--script 9>Z", "mtp trace"),
        (simulate.main, "--k 0", "mtp audit"),
        (doctor.main, "more", "mtp doctor"),
        (plan_command.main, "--k 3", "mtp plan"),
    ],
)
def test_a_fault_of_options_names_the_page_that_lists_them(
    option_fault: OptionFault, command: Command, words: str, page: str
) -> None:
    line = option_fault(command, words)
    assert line.endswith(f"; {page} --help lists the options.\n")
