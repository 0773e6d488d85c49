"""The two commands as a user meets them: exit codes, one-line errors, run folders, instant help."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_research.cli import run_entry
from mtp_research.config import EvalConfig, TrainConfig
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


def test_cfg_job_prints_the_resolved_configuration_as_json(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(config: EvalConfig, output_dir: Path) -> None:
        pytest.fail(f"--cfg must not run {config.model.name} in {output_dir}")

    assert run_entry(EvalConfig, never, argv=["--cfg", "job", "spec.k=7"]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["num_speculative_tokens"] == 7


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
    def never(config: EvalConfig, output_dir: Path) -> None:
        pytest.fail("the work must not start")

    argv = [*EVAL_WORDS, f"{key}={tmp_path / 'absent'}", f"output_dir={tmp_path / 'run'}"]
    assert run_entry(EvalConfig, never, argv=argv) == 2
    assert f"error: {key} must be an existing path" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_output_dir_that_is_a_file_exits_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    def never(config: EvalConfig, output_dir: Path) -> None:
        pytest.fail("the work must not start")

    argv = [*EVAL_WORDS, f"output_dir={tmp_path / 'file'}"]
    assert run_entry(EvalConfig, never, argv=argv) == 4
    assert "output_dir must be a writable folder" in capsys.readouterr().err


def test_run_folder_holds_config_record_and_diff_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "swordfish-9876")
    monkeypatch.setattr(sys, "argv", ["train.py", "x.api_key=abc123", "logger.tags=swordfish-9876"])
    argv = ["logger.tags=[swordfish-9876]", "trainer.max_steps=7", f"output_dir={tmp_path}"]
    assert run_entry(TrainConfig, lambda config, output_dir: None, argv=argv) == 0

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


def test_secret_in_an_error_is_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")

    def fail(config: EvalConfig, output_dir: Path) -> None:
        raise errors.EnvironmentFault("no hub for hunter2-hunter2 at https://me:pw@host/x")

    assert run_entry(EvalConfig, fail, argv=[*EVAL_WORDS, f"output_dir={tmp_path}"]) == 4
    assert capsys.readouterr().err == "error: no hub for [redacted] at https://[redacted]@host/x\n"


@pytest.mark.parametrize(
    "text", ["sampling.top_k=20 sampling.max_new_tokens=8", "spec.num_speculative_tokens=3", "key"]
)
def test_redact_leaves_ordinary_text(text: str) -> None:
    assert provenance.redact(text) == text


def test_relative_path_counts_from_the_working_directory_then_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert provenance.resolve_path("conf/train.yaml") == str(ROOT / "conf" / "train.yaml")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("")
    assert provenance.resolve_path("conf/train.yaml") == "conf/train.yaml"
    assert provenance.resolve_path("org/model") == "org/model"
