"""Speed and memory of a run, with a clock and an allocator that say what the test wants."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtp_research.training import loop, step_costs
from mtp_research.training.step_costs import StepCosts, flops_per_token
from tests.training.tiny import save_lab, trainable_heads

GIB = 1 << 30


class Machine:
    """A GPU by its allocator, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held, self.peak, self.now = 5 * GIB, 0, 100.0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak)
        monkeypatch.setattr(step_costs.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(step_costs, "product_tflops", lambda device: 800.0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with monkeypatch.context() as patch:
        yield Machine(patch)


def test_figures_are_of_the_steps_since_the_start_and_memory_is_by_part(machine: Machine) -> None:
    costs = StepCosts(torch.device("cuda"), num_ranks=2)
    for part, size in (("target", 50), ("modules", 20)):
        machine.held += size * GIB
        costs.mark(part)
    costs.know(4e9)
    costs.count(10_000)
    machine.held, machine.now = 91 * GIB, 107.0
    costs.end_warm_up()
    assert costs.figures() == {}, "the first step warms up"
    costs.count(300_000)
    costs.count(100_000)
    machine.now, machine.peak = 109.0, 100 * GIB
    tflops = 4e9 * 200_000 / 2 / 1e12
    memory = {"target": 50, "modules": 20, "optimizer": 16, "transient": 9}
    speed = {"tokens_per_s": 200_000, "tflops_per_s": tflops, "mfu": tflops / 800}
    assert costs.figures() == speed | {"memory_gib": memory}
    costs.start()
    assert costs.figures() == {}


def test_run_logs_its_speed_without_evaluations_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only steps, evaluations and checkpoints move: 1 s, 100 s and 1,000 s."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(step_costs, "time", clock)

    def timed(do: Callable, seconds: int) -> Callable:
        def run(*values: object, **named: object) -> object:
            clock.now += seconds
            return do(*values, **named)

        return run

    work = {"accumulate_gradients": 1, "measure_held_out": 100, "save_checkpoint": 1000}
    for name, seconds in work.items():
        monkeypatch.setattr(loop, name, timed(getattr(loop, name), seconds))
    config = save_lab(tmp_path, num_documents=24)
    config.trainer = dataclasses.replace(config.trainer, max_steps=6, eval_every=2, save_every=3)
    result = loop.train_heads(config, tmp_path / "run")
    lines = [*map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    tokens = {line["step"]: line["num_tokens"] for line in lines if line["kind"] == "train"}
    speeds = {line["step"]: line["tokens_per_s"] for line in lines if line["kind"] == "speed"}
    assert speeds == {
        **{2: tokens[2], 3: tokens[3], 4: tokens[4]},
        6: (tokens[5] + tokens[6]) / 2,
    }, "the first step warms up"
    heads = trainable_heads(dtype=torch.float32, num_mtp_modules=3)
    parts = flops_per_token(heads, seq_len=64, num_depths=3, has_teacher=False)
    rate = speeds[6] * (parts["modules"] + parts["lm_head"]) / 1e12  # states are kept
    assert result["speed"] == {"tokens_per_s": speeds[6], "tflops_per_s": pytest.approx(rate)}
