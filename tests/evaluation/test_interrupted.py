"""A stop while an evaluation or a price study decodes: exit 75, and the same command goes on."""

import json
import os
import signal
from pathlib import Path

import pytest

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.evaluation.run import journal
from mtp_research.runtime import progress

WORDS = [
    "experiment=eval_smoke",
    "model=lab_tiny",
    "engine=cpu",
    "spec.policy=training",
    "spec.k=1",
]
WORDS += ["sampling.max_new_tokens=6", "engine.max_num_requests=1"]
STUDY = ["experiment=fault_price", "spec.head=assets/lab_tiny/heads/chain_n1", "spec.k=2"]
STUDY += ["spec.policy=window", "prompts.max_prompts=1", "sampling.max_new_tokens=4", "engine=cpu"]


def stop_at(monkeypatch: pytest.MonkeyPatch, *, num_records: int, number: int) -> None:
    """Send a signal when so many generations have finished in a decoder."""
    step = SpecDecoder.step

    def stopping(decoder: SpecDecoder, *arguments: object) -> object:
        if len(decoder.stats.records) >= num_records:
            os.kill(os.getpid(), number)
        return step(decoder, *arguments)

    monkeypatch.setattr(SpecDecoder, "step", stopping)


@pytest.fixture(autouse=True)
def interrupting():
    """Ctrl-C is an exception, also where a runner of tests has changed that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_evaluation_that_is_stopped_exits_75_and_goes_on(
    number: int,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    words = [*WORDS, f"output_dir={tmp_path}"]
    monkeypatch.setattr(journal, "SYNC_EVERY_S", 0.0)
    with monkeypatch.context() as patch:
        stop_at(patch, num_records=2, number=number)
        assert run_entry(EvalConfig, run_evaluation, argv=words) == 75
    said = capsys.readouterr().err
    assert f"stopped by {name}; the same command with output_dir={tmp_path} goes on" in said
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "no times" in said
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    shown = capsys.readouterr()
    counts = [line.split()[1] for line in shown.err.splitlines() if line.startswith("decoding:")]
    assert counts == ["3/8", "4/8", "5/8", "6/8", "7/8", "8/8"]
    (warning,) = [line for line in shown.out.splitlines() if "interrupted and resumed" in line]
    text = " ".join(shown.out[shown.out.index(warning) :].split())
    assert "resumed: baseline; the passes that were interrupted have no times" in text
    assert "without those of plain decoding there is no ratio to it" in text
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [len(one["records"]) for one in stored["conditions"]] == [4, 4]


def test_price_study_that_is_stopped_exits_75_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*STUDY, f"output_dir={tmp_path / 'f'}"]
    with monkeypatch.context() as patch:
        stop_at(patch, num_records=0, number=signal.SIGTERM)
        assert run_entry(EvalConfig, run_evaluation, argv=words) == 75
    assert "goes on with the next condition" in capsys.readouterr().err
    assert run_entry(EvalConfig, run_evaluation, argv=words) == 0
    assert len(json.loads((tmp_path / "f" / "fault_price.json").read_text())["conditions"]) == 2
