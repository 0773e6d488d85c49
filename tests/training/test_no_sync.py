"""A training step never asks the device for a value: the host runs ahead of it."""

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mtp_research.training.loop import accumulate_gradients
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.setup import build_run, make_accelerator
from mtp_research.training.tracking import FigureQueue, StopRequest
from tests.decode.test_no_sync import NoSync
from tests.training.tiny import save_lab


def runner(config):
    """A function of the step's number that runs it as the loop does; step 0 has been run.

    That one makes the optimizer's state.
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
def test_step_waits_for_nothing(tmp_path, monkeypatch, loss, unroll):
    config = save_lab(tmp_path, recipe="qwen3")  # dense: on a CPU the library's experts do look
    config.objective.loss, config.objective.unroll = loss, unroll
    step, plain = runner(config), TrainingRows.batch

    def batch(self, indices):
        with _disable_current_modes():  # which rows: on a GPU from pinned memory
            return plain(self, indices)

    monkeypatch.setattr(TrainingRows, "batch", batch)
    with NoSync():
        step(1)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["qwen3", "glm4_moe"])
@pytest.mark.parametrize("weights", ["decay", "expected_length", "dpace"])
@pytest.mark.parametrize(
    ("unroll", "loss"), [("mixed", "ce"), ("shared_context", "kl+0.1*hidden"), ("ttt", "lk+e2e_tv")]
)
def test_step_on_a_gpu_waits_for_nothing(tmp_path, unroll, loss, weights, recipe):
    """With what runs on a GPU alone: its kernels, flash attention, experts."""
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
