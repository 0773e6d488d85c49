"""bench_decode on the tiny shape without a GPU: its options reach the loop and the byte count."""

import json
from pathlib import Path

import pytest
import torch

from mtp_research.decode import decoder as decoder_file
from mtp_research.evaluation import bench_decode

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the commands on a CPU")


def rows(tmp_path: Path, *words: str) -> list[dict]:
    path = tmp_path / "rows.json"
    few = ["--shapes", "tiny", "--batch", "2", "--k", "2", "--steps", "5", "--context", "8"]
    assert bench_decode.main([*few, "--cpu", "--json", str(path), *words]) == 0
    return json.loads(path.read_text())["rows"]


def test_without_a_gpu_the_command_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_decode.main([]) == 4
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_draft_vocabulary_is_drafted_from_and_counted(tmp_path: Path) -> None:
    (whole,), (part,) = rows(tmp_path), rows(tmp_path, "--draft-vocab", "32")
    assert (whole["draft_vocab"], part["draft_vocab"]) == (None, 32)
    saved = whole["bytes"]["draft_weights"] - part["bytes"]["draft_weights"]
    assert saved == 2 * (256 - 32) * 64 * 4  # K passes over [V, D] or [V', D] in float32
    assert part["bytes"]["target_weights"] == whole["bytes"]["target_weights"]


def test_deterministic_rows_say_so_and_run_in_the_mode(tmp_path: Path, monkeypatch) -> None:
    seen = []
    build = decoder_file.build_products
    monkeypatch.setattr(
        decoder_file,
        "build_products",
        lambda *args, engine: seen.append(engine.deterministic) or build(*args, engine=engine),
    )
    (row,) = rows(tmp_path, "--deterministic")
    assert row["arithmetic"] == "invariant"
    assert seen == [True]
