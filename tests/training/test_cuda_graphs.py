"""`trainer.cuda_graphs`: replayed graphs train the heads that launched kernels train.

On a CPU a stand-in plays torch's part with the same rules of memory: it reads and writes tensors of
its own, which the next call changes.
"""

import json
import math
import shutil

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from mtp_research.runtime import captures
from mtp_research.runtime.captures import Captured
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.training import packed_rows
from mtp_research.training.loop import train_heads
from mtp_research.training.packed_rows import BLOCK_ROWS
from mtp_research.training.parallel import parallel
from mtp_research.training.setup import graphs_note
from tests.training.test_rows import make_rows
from tests.training.tiny import save_lab


class Recalled:
    """A graph that calls again."""

    num_replays = 0

    def __init__(self, call):
        self._call = call
        self.result = call()

    def replay(self):
        Recalled.num_replays += 1
        old, new = (_pytree.tree_leaves(part) for part in (self.result, self._call()))
        for into, found in zip(old, new, strict=True):
            into.copy_(found)


def recalled(call, *, pool):
    """`captures.capture_call`."""
    assert pool is None
    graph = Recalled(call)
    return Captured(graph, graph.result)


def recalled_module(module, own, *, allow_unused_input):
    """`torch.cuda.make_graphed_callables`."""
    assert allow_unused_input
    trained = [one for one in module.parameters() if one.requires_grad]
    leaves, form = _pytree.tree_flatten(module(*own))
    outputs = [torch.full_like(leaf, 0) for leaf in leaves]
    grads = [torch.full_like(one, torch.nan) for one in trained]

    class Graphed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs: Tensor) -> tuple[Tensor, ...]:
            for mine, given in zip(own, inputs, strict=False):
                mine.copy_(given)
            with torch.enable_grad():
                ctx.leaves = _pytree.tree_leaves(module(*own))
            for into, found in zip(outputs, ctx.leaves, strict=True):
                into.copy_(found.detach())
            return tuple(output.detach() for output in outputs)

        @staticmethod
        def backward(ctx, *given: Tensor):
            pairs = [p for p in zip(ctx.leaves, given, strict=True) if p[0].requires_grad]
            found = torch.autograd.grad([a for a, _ in pairs], trained, [b for _, b in pairs])
            for into, grad in zip(grads, found, strict=True):
                into.copy_(grad)
            return (*[None] * len(own), *(grad.detach() for grad in grads))

    return lambda *inputs: _pytree.tree_unflatten(Graphed.apply(*inputs, *trained), form)


@pytest.fixture
def without_gpu(monkeypatch):
    """Lets `trainer.cuda_graphs` work on a CPU, whose target computes every batch."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", recalled_module)
    monkeypatch.setattr(captures, "capture_call", recalled)
    monkeypatch.setattr(parallel, "require_one_gpu", lambda ranks: None)
    monkeypatch.setattr(packed_rows, "CACHE_BYTES", 0)
    monkeypatch.setattr(Recalled, "num_replays", 0)


def losses_of(config, folder, *, cuda_graphs):
    """Losses of all steps, then the norms of their gradients."""
    config.trainer.cuda_graphs = cuda_graphs
    train_heads(config, folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    return [step[name] for name in ("loss", "grad_norm") for step in steps]


@pytest.mark.parametrize(
    ("recipe", "unroll", "loss", "num_modules", "num_micro"),
    [
        ("qwen3", "mixed", "ce", 1, 3),
        ("glm4_moe", "chain", "kl+0.1*hidden", 3, 1),
        ("qwen3", "shared_context", "ce", 2, 2),
    ],
)
def test_replayed_steps_learn_what_launched_ones_learn(
    tmp_path, without_gpu, recipe, unroll, loss, num_modules, num_micro
):
    config = save_lab(tmp_path, recipe=recipe)
    config.objective.unroll, config.objective.loss = unroll, loss
    config.head.num_mtp_modules, config.trainer.max_steps = num_modules, 4
    config.trainer.gradient_accumulation_steps, config.trainer.batch_size = num_micro, 2
    launched = losses_of(config, tmp_path / "launched", cuda_graphs=False)
    assert Recalled.num_replays == 0
    replayed = losses_of(config, tmp_path / "replayed", cuda_graphs=True)
    assert Recalled.num_replays == 4 * num_micro  # of the target's pass
    assert replayed == pytest.approx(launched, rel=1e-6)


@pytest.mark.parametrize("hidden_source", ["post_norm", "pre_norm"])
def test_states_that_are_kept_are_copies_of_what_a_graph_writes(
    without_gpu, monkeypatch, hidden_source
):
    monkeypatch.setattr(packed_rows, "CACHE_BYTES", 1 << 30)
    launched, replayed = (
        make_rows(keep_hidden=True, hidden_source=hidden_source, captures=captures)
        for captures in (False, True)
    )
    indices = range(len(launched))
    replayed.hidden(indices)
    for got, expected in zip(replayed.hidden(indices), launched.hidden(indices), strict=True):
        torch.testing.assert_close(got, expected)
    assert Recalled.num_replays == math.ceil(len(launched) / BLOCK_ROWS) > 1


def test_a_run_goes_on_with_graphs(tmp_path, without_gpu):
    config = save_lab(tmp_path)
    config.trainer.max_steps, config.trainer.save_every = 3, 1
    whole = losses_of(config, tmp_path / "whole", cuda_graphs=False)
    shutil.copytree(tmp_path / "whole", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "step_000003")
    assert losses_of(config, tmp_path / "two", cuda_graphs=True) == pytest.approx(whole, rel=1e-6)
    assert Recalled.num_replays == 1


def test_what_cannot_be_captured_is_said_in_a_line(tmp_path, without_gpu, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", refuse)
    config = save_lab(tmp_path)
    config.trainer.cuda_graphs = True
    with pytest.raises(EnvironmentFault) as fault:
        train_heads(config, tmp_path / "run")
    assert str(fault.value) == (
        "trainer.cuda_graphs=true: a part of this model cannot be captured (operation not "
        "permitted when stream is capturing); set trainer.cuda_graphs=false."
    )


@pytest.mark.parametrize(
    ("device", "num_processes", "changes", "is_said"),
    [
        ("cuda", 1, {}, True),
        ("cuda", 1, {"compile": True}, True),
        ("cuda", 1, {"compile": True, "cuda_graphs": True}, False),
        ("cuda", 1, {"max_steps": 999}, False),
        ("cuda", 1, {"activation_checkpointing": True}, False),
        ("cuda", 2, {}, False),
        ("cpu", 1, {}, False),
    ],
)
def test_long_runs_on_one_gpu_are_told_of_graphs(tmp_path, device, num_processes, changes, is_said):
    config = save_lab(tmp_path)
    for name, value in {"max_steps": 1000, **changes}.items():
        setattr(config.trainer, name, value)
    note = graphs_note(config, device=torch.device(device), num_processes=num_processes)
    assert (note is not None) == is_said
    assert not is_said or "trainer=one_gpu" in note


def test_a_machine_without_a_gpu_is_told(tmp_path):
    config = save_lab(tmp_path)
    config.trainer.cuda_graphs = True
    with pytest.raises(ConfigError, match="needs one process on a GPU, got 1 on cpu"):
        train_heads(config, tmp_path / "run")


@pytest.mark.gpu
@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("recipe", "unroll", "loss", "num_modules"),
    [
        ("qwen3", "mixed", "ce", 1),
        ("glm4_moe", "chain", "kl+0.1*hidden", 3),
        ("mimo_v2", "ttt", "ce", 1),
        ("deepseek_v3", "shared_context", "ce", 2),
    ],
)
def test_graphs_on_a_gpu_learn_what_launches_learn(
    tmp_path, monkeypatch, recipe, unroll, loss, num_modules, compiled, num_micro
):
    monkeypatch.setattr(packed_rows, "CACHE_BYTES", 0)
    config = save_lab(tmp_path, recipe=recipe)
    config.model.device, config.trainer.compile = "cuda", compiled
    config.objective.unroll, config.objective.loss = unroll, loss
    config.head.num_mtp_modules, config.trainer.max_steps = num_modules, 6
    config.trainer.gradient_accumulation_steps = num_micro
    launched = losses_of(config, tmp_path / "launched", cuda_graphs=False)
    replayed = losses_of(config, tmp_path / "replayed", cuda_graphs=True)
    assert replayed == pytest.approx(launched, rel=2e-3)
