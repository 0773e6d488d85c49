"""What the GPU tools decide by themselves: prompts, verdicts, and the surroundings of a world."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mtp_research.models.target import Target
from tests.test_lab_tiny import ASSETS
from tools import gpu_deterministic, gpu_tensor_parallel

NAMES = ["K=0", "K=3 eagle"]


def row(match_rate: float = 1.0, seconds: float = 2.0) -> dict[str, object]:
    return {"match_rate": match_rate, "seconds": seconds}


@pytest.mark.parametrize(
    ("fixed", "is_equal"),
    [
        ([row(), row()], True),
        ([row(), row(0.99)], False),
        ([row()], False),  # no time for the second one
    ],
)
def test_texts_are_equal_only_if_every_deterministic_loop_ran(fixed: list, is_equal: bool) -> None:
    usual = {"K=0": row(0.5, 1.6)}
    found = {True: dict(zip(NAMES, fixed, strict=False)), False: usual}
    result = gpu_deterministic.summarise(found, NAMES)
    assert result["all_equal"] == is_equal
    assert result["cost_percent"] == {"K=0": pytest.approx(25)}
    assert "usual K=3 eagle" in cast(list, result["missing"])
    assert ("deterministic K=3 eagle" in cast(list, result["missing"])) == (len(fixed) < 2)


def test_trained_target_decodes_two_hundred_different_shipped_prompts() -> None:
    options = argparse.Namespace(target=str(ASSETS / "target"), prompts=200, prompt_tokens=192)
    unused = cast(Target, SimpleNamespace())
    prompts = gpu_deterministic.make_prompts(unused, options)
    assert len({tuple(prompt) for prompt in prompts}) == 200
    assert max(map(len, prompts)) == 192
    assert min(map(len, prompts)) >= 1


def test_worlds_run_without_multicast_and_weights_stay_out_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--shape", "tiny"]
    monkeypatch.setattr(sys, "argv", ["tool", *words, "--device", "cpu"])
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    started: list[dict[str, str]] = []

    def run(words: list[str], *, check: bool, env: dict[str, str]) -> SimpleNamespace:
        started.append(env)
        world = words[-1]
        if world == "1":
            rows = [{"k": 0, "batch": 1, "tokens_per_s": 1.0, "texts": {"0": [1]}}]
            (tmp_path / "out" / "world_1.json").write_text(json.dumps(rows))
        return SimpleNamespace(returncode=int(world != "1"))

    monkeypatch.setattr(subprocess, "run", run)
    assert gpu_tensor_parallel.main() == 1
    assert "FAILED with 2 processes" in capsys.readouterr().out
    assert [env["NCCL_NVLS_ENABLE"] for env in started] == ["0", "0"]
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["tensor_parallel.json", "world_1.json"]
