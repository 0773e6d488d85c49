"""A training step never asks the device for a value: the host runs ahead of it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_research.training.loop import accumulate_gradients
from mtp_research.training.setup import build_run, make_accelerator
from mtp_research.training.tracking import FigureQueue, StopRequest
from tests.training.tiny import save_lab

# Each of them makes the host wait on a GPU: reading a scalar, or a shape that values decide.
WAITING = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "_unique2",
}


class WaitCounter(TorchDispatchMode):
    """Counts the operations that a GPU would make the host wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.num_ops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        self.num_ops += 1
        if name in WAITING:
            self.found[name] += 1
        return op(*args, **kwargs or {})


def runner(config):
    """`step(index)`, which runs an optimizer step as the loop does, after one of them.

    The optimizer's state is made in the first.
    """
    ranks = make_accelerator(config)
    parts, queue = build_run(config, accelerator=ranks), FigureQueue()

    def step(index):
        stop = StopRequest()
        stats = accumulate_gradients(parts, config=config, ranks=ranks, step=index, stop=stop)
        norm = parts.engine.step(learning_rate=1e-3)
        queue.push(stats, step=index, learning_rate=1e-3, grad_norm=norm)

    step(0)
    return step


@pytest.mark.parametrize("unroll", ["chain", "shared_context"])
@pytest.mark.parametrize("loss", ["ce", "kl+0.1*hidden"])
def test_step_reads_nothing_back_from_the_device(tmp_path, loss, unroll):
    config = save_lab(tmp_path, recipe="qwen3")  # dense: on a CPU the library's experts do look
    config.objective.loss, config.objective.unroll = loss, unroll
    step = runner(config)
    with WaitCounter() as counter:
        step(1)
    assert not counter.found
    assert counter.num_ops > 500
    with WaitCounter() as counter:
        assert float(torch.ones(2).sum()) == 2.0
    assert counter.found == {"_local_scalar_dense": 1}


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qwen3", "glm4_moe"])
@pytest.mark.parametrize("weights", ["decay", "expected_length", "dpace"])
@pytest.mark.parametrize(
    ("unroll", "loss"), [("mixed", "ce"), ("shared_context", "kl+0.1*hidden"), ("ttt", "lk+e2e_tv")]
)
def test_step_on_a_gpu_waits_for_nothing(tmp_path, unroll, loss, weights, recipe):
    """Copies of the host's memory are waited for as well, which no operator's name says."""
    config = save_lab(tmp_path, recipe=recipe)
    config.model.device, config.model.dtype = "cuda", "bfloat16"
    config.objective.loss, config.objective.unroll = loss, unroll
    config.objective.depth_weights = weights
    if unroll == "ttt":
        config.head.num_mtp_modules = 1
    step = runner(config)
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
