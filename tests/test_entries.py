"""The two commands as a user meets them: exit codes, one-line errors, run folders, instant help."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.hydra_config import HydraConfig

import mtp_research
from mtp_research.__main__ import COMMANDS, main, run_evaluation, run_training
from mtp_research.app.cli import compose_config, run_entry
from mtp_research.config.schema import EvalConfig, TrainConfig
from mtp_research.runtime import errors, provenance

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "transformers", "hydra", "omegaconf", "wandb", "numpy")
# Exits with the names of heavy modules that --help pulled in; silence is what is wanted.
HELP_PROBE = f"""
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert stop.code == 0, stop.code
sys.exit(" ".join(name for name in {HEAVY!r} if name in sys.modules))
"""
EVAL_WORDS = ["spec.head=null"]


def python(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=60, cwd=cwd, check=False
    )


@pytest.mark.parametrize("entry", ["train.py", "eval.py"])
def test_help_imports_nothing_heavy(entry: str) -> None:
    done = python("-c", HELP_PROBE, entry)
    assert done.stderr.strip() == ""
    assert "model=" in done.stdout
    assert f"python {entry}" in done.stdout


@pytest.mark.parametrize("value", ["-1", "three", "1000000"])
def test_eval_with_a_wrong_k_exits_2_with_one_line(value: str, tmp_path: Path) -> None:
    done = python(str(ROOT / "eval.py"), f"spec.k={value}", cwd=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(
        r"error: spec\.num_speculative_tokens must be .* 0\.\.64, .*\n", done.stderr
    )
    assert list(tmp_path.iterdir()) == []


def never(config: EvalConfig, output_dir: Path) -> None:
    pytest.fail(f"the work must not start with {config.model.name} in {output_dir}")


def test_cfg_job_prints_yaml_that_can_be_fed_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["spec.k=[5,7]", "sampling=warm", "spec.verify=auto"]
    assert run_entry(EvalConfig, never, argv=["--cfg", "job", *words]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["grid"]["num_speculative_tokens"] == [5, 7]
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "mine.yaml").write_text(printed)
    seen = []
    fed = ["--config-dir", str(tmp_path), "--config-name", "mine", "spec.head=null"]
    argv = [*fed, f"output_dir={tmp_path / 'run'}"]
    assert run_entry(EvalConfig, lambda config, _: seen.append(config), argv=argv) == 0
    expected = compose_config(EvalConfig, [*words, *argv[4:]])
    assert seen == [expected]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cfg", "hydra"], "run:"),
        (["--cfg", "all", "--resolve"], "spec:"),
        (["--cfg", "job", "--package", "spec"], "num_speculative_tokens: 3"),
        (["--hydra-help"], "Hydra"),
    ],
)
def test_hydra_prints_what_it_is_asked_for(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_entry(EvalConfig, never, argv=words) == 0
    assert expected in capsys.readouterr().out


def test_info_prints_what_hydra_composed() -> None:
    done = python("eval.py", "--info", "experiment=eval_oracle")  # a process: it sets up logging
    assert done.returncode == 0, done.stderr
    assert "Config search path" in done.stdout
    assert "experiment: eval_oracle" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--inof"], "--inof is not a flag; nearest: --info"),
        (["--cfg", "jobs"], "invalid choice: 'jobs'"),
        (["--cfg", "job", "-m"], "not allowed with"),
        (["--resolve"], "go with --cfg"),
        (["--config-dir", "absent"], "must be a folder, got absent"),
        (["--config-name", "absent"], "conf/ and overrides must compose, got"),
        (["--cfg", "job", "spec.k=99"], "must be an integer in 0..64, got 99"),
        (["seed=range(0,3)"], "conf/ and overrides must compose, got"),
        (["-m", "spec.k=1,three"], "must be an integer in 0..64"),
    ],
)
def test_wrong_flag_exits_2_with_one_line(
    words: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_entry(EvalConfig, never, argv=words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert expected in message
    assert message.count("\n") == 1


def test_config_dir_adds_groups(tmp_path: Path) -> None:
    (tmp_path / "sampling").mkdir()
    (tmp_path / "sampling" / "mine.yaml").write_text("max_new_tokens: 7\n")
    seen = []
    argv = [*EVAL_WORDS, "--config-dir", str(tmp_path), f"output_dir={tmp_path / 'run'}"]
    run = lambda config, _: seen.append(config.sampling.max_new_tokens)  # noqa: E731
    assert run_entry(EvalConfig, run, argv=[*argv, "sampling=mine"]) == 0
    assert seen == [7]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python eval.py sampling=", {"sampling=greedy", "sampling=warm"}),
        ("python eval.py spec.k=3 timing.", {"timing.passes="}),
    ],
)
def test_bash_completion_names_choices_and_keys(
    line: str,
    expected: set[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert run_entry(EvalConfig, never, argv=["-sc", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == expected


@pytest.mark.parametrize("entry", ["train.py", "eval.py"])
def test_bash_completion_finds_its_word_in_the_entry(entry: str) -> None:
    assert "@hydra.main" in (ROOT / entry).read_text()  # Hydra's bash function looks for it


def test_many_runs_have_a_folder_each_and_the_worst_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def run(config: EvalConfig, output_dir: Path) -> None:
        seen.append((config.spec.num_speculative_tokens, config.sampling.temperature, output_dir))
        if config.spec.num_speculative_tokens == 1:
            raise errors.IntegrityError("damaged")

    words = ["-m", "spec.k=1,99,3", "sampling.temperature=0,0.6"]
    assert run_entry(EvalConfig, run, argv=[*words, *EVAL_WORDS, f"output_dir={tmp_path}"]) == 3
    settings = [(1, 0.0), (1, 0.6), (3, 0.0), (3, 0.6)]
    folders = [tmp_path / name for name in "0145"]
    assert seen == [(*one, folder) for one, folder in zip(settings, folders, strict=True)]
    assert all(folder.is_dir() for folder in folders)

    captured = capsys.readouterr()
    faults = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert [line.split("(")[0] for line in faults] == [f"error: job {i} " for i in range(4)]
    assert "spec.num_speculative_tokens=99 sampling.temperature=0.6" in faults[3]
    assert "must be an integer in 0..64, got 99; set spec.k=64." in faults[3]
    jobs = json.loads(captured.out.splitlines()[-1])["jobs"]
    assert [job["exit_code"] for job in jobs] == [3, 3, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("fault", "exit_code"), [(errors.Interrupted("stopped"), 75), (KeyboardInterrupt(), 130)]
)
def test_many_runs_end_when_they_are_stopped(
    fault: BaseException, exit_code: int, tmp_path: Path
) -> None:
    seen = []

    def run(config: EvalConfig, output_dir: Path) -> None:
        seen.append(config.seed)
        raise fault

    words = ["-m", "seed=1,2", *EVAL_WORDS, f"output_dir={tmp_path}"]
    assert run_entry(EvalConfig, run, argv=words) == exit_code
    assert seen == [1]


def test_many_runs_of_swept_folders_use_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []
    words = ["-m", "output_dir=a,b", *EVAL_WORDS]
    assert run_entry(EvalConfig, lambda _, folder: seen.append(str(folder)), argv=words) == 0
    assert seen == ["a", "b"]


def test_hydra_writes_to_the_run_folder_only_and_keeps_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = []

    def run(config: EvalConfig, output_dir: Path) -> None:
        seen.append((Path.cwd(), HydraConfig.get().runtime.output_dir, sys.argv))
        (output_dir / "results.json").touch()

    argv = sys.argv
    assert run_entry(EvalConfig, run, argv=[*EVAL_WORDS, "output_dir=out"]) == 0
    assert seen == [(tmp_path, str(tmp_path / "out"), argv)]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_commands_of_the_package_exist(name: str) -> None:
    module, function, _ = COMMANDS[name]
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert f"def {function}(" in Path(str(spec.origin)).read_text()


def test_package_runs_a_command_and_refuses_another() -> None:
    shown = python("-m", "mtp_research", "eval", "--help")
    assert shown.returncode == 0
    assert "python eval.py" in shown.stdout
    refused = python("-m", "mtp_research", "evla")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: evla is not a command; nearest: eval; ")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), ([], 2)])
def test_package_lists_its_commands_with_what_they_do(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp", *words])
    assert main() == code
    shown = "".join(capsys.readouterr()).splitlines()
    listed = {line.split()[0]: line for line in shown if line.startswith("  ")}
    assert set(listed) == set(COMMANDS)
    assert all(COMMANDS[name].about in line for name, line in listed.items())
    assert max(map(len, shown)) <= 80


def test_package_says_its_version(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["mtp", "--version"])
    assert main() == 0
    assert capsys.readouterr().out == f"mtp-research {mtp_research.__version__}\n"


@pytest.mark.parametrize("name", ["report", "doctor"])
def test_help_needs_no_extra_and_does_no_work(name: str) -> None:
    hidden = ["matplotlib", "pandas"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden})); sys.argv = ['mtp', "
        f"{name!r}, '--help']; from mtp_research.__main__ import main; sys.exit(main())"
    )
    shown = python("-c", code)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: ")


@pytest.mark.parametrize("entry", ["eval.py", "train.py"])
def test_python_without_the_packages_is_named_in_one_line(entry: str) -> None:
    code = (
        "import runpy, sys; sys.modules['safetensors'] = None; "
        f"sys.argv = [{entry!r}, 'spec.k=3']; runpy.run_path({entry!r}, run_name='__main__')"
    )
    done = python("-c", code)
    assert done.returncode == 4
    assert done.stderr.startswith(
        f"error: safetensors must be installed for this, {sys.executable}"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "num_parameters", "is_said"),
    [
        ([], 135_000_000, True),
        ([], 3_900_000, False),
        (["trainer.max_steps=8500", "trainer.batch_size=32"], 135_000_000, False),
    ],
)
def test_training_says_that_a_schedule_of_lab_tiny_is_short(
    words: list[str], num_parameters: int, is_said: bool
) -> None:
    from mtp_research.training.setup import schedule_note

    config = compose_config(TrainConfig, words)
    note = schedule_note(config, num_parameters=num_parameters, num_processes=1)
    assert (note is not None) == is_said
    if note is not None:
        assert "reads 0.41 M tokens" in note
        assert "135 M parameters" in note


def test_training_on_a_terminal_ends_with_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from mtp_research.studies import matrix_cell
    from mtp_research.training import loop

    monkeypatch.setattr(matrix_cell, "decode_probe", lambda config: None)
    monkeypatch.setattr(loop, "train_heads", lambda *_, **__: {"head": "a b/head"})
    monkeypatch.setattr(sys, "argv", ["mtp train"])
    config = compose_config(TrainConfig, ["model.name=x"])
    run_training(config, tmp_path)
    assert json.loads(capsys.readouterr().out) == {"head": "a b/head"}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    run_training(config, tmp_path)
    words = f"model.path={config.model.path} 'spec.head=a b/head' spec.k=3"
    assert capsys.readouterr().out == f"heads: a b/head\nnext:  mtp eval {words}\n"


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        (errors.ConfigError("a"), 2),
        (errors.IntegrityError("a"), 3),
        (errors.EnvironmentFault("a"), 4),
        (errors.NumericFault("a"), 5),
        (errors.Interrupted("a"), 75),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failure_gives_its_exit_code_and_no_traceback(
    fault: BaseException, exit_code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EvalConfig, output_dir: Path) -> None:
        raise fault

    assert run_entry(EvalConfig, fail, argv=[*EVAL_WORDS, f"output_dir={tmp_path}"]) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def test_traceback_flag_shows_the_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: EvalConfig, output_dir: Path) -> None:
        raise errors.ConfigError("a")

    argv = ["--traceback", *EVAL_WORDS, f"output_dir={tmp_path}"]
    assert run_entry(EvalConfig, fail, argv=argv) == 2
    assert "Traceback" in capsys.readouterr().err


def test_fault_of_the_program_itself_is_not_hidden(tmp_path: Path) -> None:
    def fail(config: EvalConfig, output_dir: Path) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_entry(EvalConfig, fail, argv=[*EVAL_WORDS, f"output_dir={tmp_path}"])


@pytest.mark.parametrize("key", ["spec.head", "prompts.path"])
def test_missing_path_exits_2_before_the_work(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*EVAL_WORDS, f"{key}={tmp_path / 'absent'}", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(EvalConfig, never, argv=argv) == 2
    assert f"error: {key} must be an existing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_output_dir_that_is_a_file_exits_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    argv = [*EVAL_WORDS, f"output_dir={tmp_path / 'file'}"]
    assert run_entry(EvalConfig, never, argv=argv) == 4
    assert "output_dir must be a writable folder" in capsys.readouterr().err


def test_run_folder_holds_config_record_and_diff_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-9876")
    monkeypatch.setattr(sys, "argv", ["train.py", "x.api_key=abc123", "logger.tags=swordfish-9876"])
    argv = ["logger.tags=[swordfish-9876]", "trainer.max_steps=7", f"output_dir={tmp_path}"]

    def describe(config: TrainConfig, output_dir: Path) -> None:
        provenance.write_run_folder(output_dir, config)

    assert run_entry(TrainConfig, describe, argv=argv) == 0

    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock",
        "config.json",
        "run.json",
        "git.diff",
    }
    config = json.loads((tmp_path / "config.json").read_text())
    record = json.loads((tmp_path / "run.json").read_text())
    assert config["trainer"]["max_steps"] == 7
    assert config["logger"]["tags"] == [provenance.HIDDEN]
    assert record["argv"] == ["train.py", "x.api_key=[redacted]", "logger.tags=[redacted]"]
    assert record["versions"]["torch"].startswith("2.")
    assert record["hardware"]["num_cores"] >= 1
    assert set(record["git"]) == {"sha", "dirty", "diff_sha256"}


def test_code_of_a_process_is_what_it_was_at_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    first = provenance.run_record()
    monkeypatch.setattr(provenance, "_git", lambda *_: "of another commit")
    assert provenance.run_record()["git"] == first["git"]


def test_secret_in_an_error_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")

    def fail(config: EvalConfig, output_dir: Path) -> None:
        raise errors.EnvironmentFault("no hub for hunter2-hunter2 at https://me:pw@host/x")

    assert run_entry(EvalConfig, fail, argv=[*EVAL_WORDS, f"output_dir={tmp_path}"]) == 4
    assert capsys.readouterr().err == "error: no hub for [redacted] at https://[redacted]@host/x\n"


@pytest.mark.parametrize("name", ["api_key", "--password", "logger.hf_token"])
def test_word_behind_the_name_of_a_secret_is_never_shown(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["spec.k=3", name, "hunter2"]
    assert provenance.redact_words(words) == ["spec.k=3", name, "[redacted]"]
    assert provenance.redact_words(["top_k", "3"]) == ["top_k", "3"]
    if not name.startswith("-"):
        assert run_entry(EvalConfig, lambda config, folder: None, argv=words) == 2
        assert "hunter2" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["sampling.top_k=20 sampling.max_new_tokens=8", "spec.num_speculative_tokens=3", "key"]
)
def test_redact_leaves_ordinary_text(text: str) -> None:
    assert provenance.redact(text) == text


def test_working_folder_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/me/heads")  # as every shell exports it
    monkeypatch.setenv("DB_PWD", "hunter2-hunter2")
    found = provenance.redact("/home/me/heads/runs hunter2-hunter2")
    assert found == f"/home/me/heads/runs {provenance.HIDDEN}"


def test_relative_path_counts_from_the_working_directory_then_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert provenance.resolve_path("conf/train.yaml") == str(ROOT / "conf" / "train.yaml")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("")
    assert provenance.resolve_path("conf/train.yaml") == "conf/train.yaml"
    assert provenance.resolve_path("org/model") == "org/model"


@pytest.mark.parametrize(
    ("is_terminal", "words", "has_line"),
    [(False, [], True), (True, [], False), (True, ["verbose=true"], True)],
    ids=["piped", "terminal", "asked"],
)
def test_json_line_is_left_out_on_a_terminal_unless_asked_for(
    is_terminal: bool,
    words: list[str],
    has_line: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "mtp_research.evaluation.run.evaluate.evaluate", lambda *_, **__: {"num_prompts": 3}
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    argv = [*EVAL_WORDS, *words, f"output_dir={tmp_path}"]
    assert run_entry(EvalConfig, run_evaluation, argv=argv) == 0
    assert capsys.readouterr().out == '{"num_prompts": 3}\n' * has_line
