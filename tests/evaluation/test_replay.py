"""`eval.py` writes a profile, and `spec.verify=synthetic` replays it in the same loop."""

import json
import math
import statistics
from pathlib import Path

import pytest

from mtp_research.__main__ import run_evaluation
from mtp_research.app.cli import run_entry
from mtp_research.config.schema import EvalConfig
from mtp_research.runtime.files import sha256_of

WORDS = [
    "model=lab_tiny",
    "model.dtype=float32",
    "model.device=cpu",
    "prompts.max_prompts=12",
    "sampling.max_new_tokens=24",
    "engine.max_model_len=512",
    "engine.max_num_requests=12",
    "spec.k=3",
    "baseline=false",
]


def run(folder: Path, *words: str) -> int:
    return run_entry(EvalConfig, run_evaluation, argv=[*WORDS, *words, f"output_dir={folder}"])


def test_profile_of_a_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, again, profile = tmp_path / "first", tmp_path / "again", tmp_path / "kept.json"
    assert run(first) == 0
    profile.write_bytes((first / "speculation_profile.json").read_bytes())
    measured = {one["label"]: one for one in json.loads(profile.read_text())["conditions"]}
    assert list(measured) == ["eagle", "training"]
    assert len(str(measured["training"]["head_sha256"])) == 64
    replay = [
        "spec.verify=synthetic",
        "spec.policy=[training]",
        f"spec.synthetic_profile={profile}",
    ]
    assert run(again, *replay) == 2
    assert "set spec.synthetic_condition=LABEL" in capsys.readouterr().err
    replay.append("spec.synthetic_condition=training")
    assert run(again, *replay) == 0
    results = json.loads((again / "results.json").read_text())
    assert results["run"]["inputs"]["profiles"] == [sha256_of(profile)]
    (condition,) = results["conditions"]
    rounds = [a for record in condition["records"] for a in record["num_accepted_per_round"]]
    error = statistics.stdev(rounds) / math.sqrt(len(rounds))
    assert 1 + statistics.mean(rounds) == pytest.approx(
        measured["training"]["acceptance_length"], abs=3 * error
    )

    profile.write_text(profile.read_text().replace('"num_rounds":', '"num_rounds":1', 1))
    assert run(again, *replay) == 3
    told = capsys.readouterr().err.strip().splitlines()
    assert "the file was edited or damaged" in told[-1]
    assert run(again, *replay, "spec.k=4") != 0
