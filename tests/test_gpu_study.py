"""The time boxes of tools/gpu_study.py: a stage that is late is stopped, a finished one kept.

And the parts of its batch sweep, each of which is a whole evaluation.
"""

import argparse
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from torch import nn

from mtp_research.cli import compose_config
from mtp_research.config import EvalConfig, TrainConfig
from mtp_research.evaluation.conditions import conditions_of
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from tools import gpu_batch_sweep as sweep
from tools import gpu_study as tool
from tools import untrained

ROOT = Path(__file__).parent.parent
SLEEPS = ["-c", "import time; time.sleep(60)"]


def study(folder: Path, *, limit_s: float) -> tool.Study:
    (folder / "out").mkdir(exist_ok=True)
    args = argparse.Namespace(
        work=folder,
        out=folder / "out",
        limit_s=limit_s,
        tiny=False,
        model="lab_tiny",
        stages=list(tool.BOXES),
    )
    return tool.Study(args)


def test_late_stage_is_stopped_and_runs_again(tmp_path: Path) -> None:
    late = study(tmp_path, limit_s=1)
    late.run("prices", SLEEPS)
    assert late.stages["prices"]["code"] == -15
    again = study(tmp_path, limit_s=60)
    again.run("prices", ["-c", "print('priced')"])
    assert again.stages["prices"]["code"] == 0
    assert "priced" in (tmp_path / "log.txt").read_text()
    third = study(tmp_path, limit_s=60)
    third.run("prices", SLEEPS)
    assert third.stages["prices"]["note"] == "done before"
    tool.collect(third)
    assert json.loads((tmp_path / "out" / "study.json").read_text())["stages"] == third.stages


def test_stage_that_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "GRACE_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code])
    assert tool.wait(process, seconds=1.0) == -9


def test_time_left_over_by_a_stage_goes_to_the_next(tmp_path: Path) -> None:
    kept = study(tmp_path, limit_s=sum(tool.BOXES.values()))
    kept.run("target", ["-c", ""])
    kept.run("answers", ["-c", ""])
    (left,) = re.findall(r"== answers, (\d+) s", (tmp_path / "log.txt").read_text())
    both = tool.BOXES["target"] + tool.BOXES["answers"]
    assert tool.BOXES["answers"] < int(left) <= both


def test_finished_parts_of_a_late_stage_are_collected(tmp_path: Path) -> None:
    for name, file in (("batch_64_k135", "results.json"), ("batch_1_k135", "finished.jsonl")):
        (tmp_path / "batch" / name).mkdir(parents=True)
        (tmp_path / "batch" / name / file).write_text("{}")
        (tmp_path / "batch" / name / "table.txt").touch()
    late = study(tmp_path, limit_s=1)
    late.run("batch", SLEEPS)
    with tarfile.open(tmp_path / "out" / "batch.tar") as archive:
        names = archive.getnames()
    assert names == ["batch/batch_64_k135/results.json", "batch/batch_64_k135/table.txt"]
    assert json.loads((tmp_path / "out" / "study.json").read_text())["stages"] == late.stages


def test_every_stage_is_asked_for_something_that_the_entries_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[str]] = {}
    monkeypatch.setattr(tool.Study, "run", lambda self, stage, words: asked.update({stage: words}))
    for path in ("target/config.json", "matrix/chain_n3_s0/head/head.json"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).touch()
    (tmp_path / "answers.jsonl").touch()
    words = ["--target", str(tmp_path / "target"), "--answers", str(tmp_path / "answers.jsonl")]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["tool", *folders, *words, "--model", "lab_base"])
    assert tool.main() == 0
    monkeypatch.setattr(sys, "argv", ["tool", *folders, "--model", "lab_base"])
    tool.main()  # makes target and answers
    assert list(asked) == ["matrix", "batch", "prices", "target"]
    matrix = compose_config(TrainConfig, asked["matrix"][1:])
    assert (matrix.model.dtype, matrix.matrix.dtype) == ("bfloat16", "float32")
    assert compose_config(TrainConfig, asked["target"][1:]).task == "target"
    assert compose_config(EvalConfig, asked["prices"][1:]).task == "fault_price"
    options = sweep.parse([*asked["batch"][1:], "--tiny"])
    part = compose_config(EvalConfig, [*sweep.words_of(sweep.PARTS[0], options), "engine=auto"])
    assert part.timing.turns == str(tmp_path / "turns")
    assert (part.prompts.max_prompts, part.sampling.max_new_tokens) == (4, 6)


def test_sweep_covers_every_k_at_every_size_with_a_baseline() -> None:
    found = set()
    for part in sweep.PARTS:
        words = ["experiment=batch_sweep", "engine=h200", "model.device=cpu", *part.words]
        config = compose_config(EvalConfig, words)
        conditions = conditions_of(config)
        assert config.engine.compile
        assert [c.num_speculative_tokens for c in conditions].count(0) == 1
        found |= {
            (c.group.max_num_requests, c.num_speculative_tokens, c.policy) for c in conditions
        }
    policies = ("eagle", "training")
    drafting = {(r, k, p) for r in (1, 8, 32, 64) for k in range(1, 6) for p in policies}
    assert found == drafting | {(r, 0, None) for r in (1, 8, 32, 64)}
    assert len({part.name for part in sweep.PARTS}) == len(sweep.PARTS)


def test_filling_the_cache_compiles_the_steps_of_the_sweep_once(tmp_path: Path) -> None:
    steps: dict[bool, list[tuple[object, ...]]] = {}
    for fills in (True, False):
        flag = ["--compile-only"] if fills else []
        words = ["--out", str(tmp_path), *flag, "engine=h200", "model.device=cpu"]
        options = sweep.parse(words)
        configs = [compose_config(EvalConfig, sweep.words_of(p, options)) for p in sweep.PARTS]
        steps[fills] = [
            (c.config.engine, c.policy, c.num_speculative_tokens)
            for config in configs
            for c in conditions_of(config)
        ]
        assert {config.timing.turns is None for config in configs} == {fills}
    assert len(steps[True]) == len(set(map(repr, steps[True]))) == 44
    assert set(map(repr, steps[True])) == set(map(repr, steps[False]))


def test_untrained_models_have_the_sizes_of_trained_ones(tmp_path: Path) -> None:
    assert untrained.main(["--model", "lab_tiny", "--out", str(tmp_path)]) == 0
    trained = load_target(ROOT / "assets/lab_tiny/target", device="cpu")
    made = load_target(tmp_path / "target", device="cpu")
    heads = [load_heads(ROOT / "assets/lab_tiny/heads/chain_n3", trained)]
    heads.append(load_heads(tmp_path / "head", made))
    for one, other in ((trained.model, made.model), heads):
        assert shapes_of(one) == shapes_of(other)


def shapes_of(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}


def test_sweep_goes_on_after_a_part_that_failed_and_skips_finished_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, *others = sweep.PARTS[:4]
    (tmp_path / done.name).mkdir()
    (tmp_path / done.name / "results.json").touch()
    (tmp_path / done.name / "exit_code").write_text("0\n")
    ran: list[str] = []

    def start(words: list[str], log: Path, *, num_workers: int) -> object:
        (tmp_path / log.stem).mkdir(exist_ok=True)
        ran.append(log.stem)
        ends = {others[0].name: "sys.exit(3)", others[1].name: "os.kill(os.getpid(), 9)"}
        if log.stem != others[1].name:  # killed before its results were there
            (tmp_path / log.stem / "results.json").touch()
        code = f"import os, sys; {ends.get(log.stem, 'sys.exit(0)')}"
        return subprocess.Popen([sys.executable, "-S", "-c", code])

    monkeypatch.setattr(sweep, "start", start)
    for _ in range(2):  # the second time all parts are done, and their codes are known
        codes = sweep.run_parts({part: [] for part in (done, *others)}, tmp_path, num_workers=2)
        assert sorted(codes) == [0, 0, 3, 137]
    assert sorted(ran) == sorted(part.name for part in (*others, others[1]))


def test_parts_of_a_sweep_that_is_stopped_are_stopped_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*_: object, num_workers: int) -> subprocess.Popen[bytes]:
        if len(processes) == 2:
            raise SystemExit(143)  # as the handler of SIGTERM does
        processes.append(subprocess.Popen([sys.executable, *SLEEPS]))
        return processes[-1]

    monkeypatch.setattr(sweep, "start", start)
    with pytest.raises(SystemExit):
        sweep.run_parts({part: [] for part in sweep.PARTS}, tmp_path, num_workers=3)
    assert [process.wait(timeout=20) for process in processes] == [-15, -15]
