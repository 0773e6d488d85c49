"""Speed and memory of a run, with a clock and an allocator that say what the test wants."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mtp_research.training import step_costs
from mtp_research.training.loop import train_heads
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


def test_run_logs_its_speed_without_evaluations_and_checkpoints(tmp_path: Path) -> None:
    config = save_lab(tmp_path, num_documents=24)
    config.trainer.max_steps, config.trainer.eval_every = 4, 2
    result = train_heads(config, tmp_path / "run")
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    found = {line["step"]: line for line in lines if line["kind"] == "speed"}
    assert found.keys() == {2, 4}
    speed = found[4]
    assert result["speed"] == {"tokens_per_s": speed["tokens_per_s"]} | {
        "tflops_per_s": speed["tflops_per_s"]
    }, "a CPU has no allocator to ask, and no rate to compare with"
    assert speed["tokens_per_s"] > result["train_tokens_per_s"]
    heads = trainable_heads(dtype=torch.float32, num_mtp_modules=3)
    parts = flops_per_token(heads, seq_len=64, num_depths=3, has_teacher=False)
    flops = speed["tflops_per_s"] * 1e12 / speed["tokens_per_s"]
    assert flops == pytest.approx(parts["modules"] + parts["lm_head"]), "states are kept"
