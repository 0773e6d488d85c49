"""Attention of draft rows against a softmax over an explicit key list; compiled passes."""

import pytest
import torch
from torch import nn

from mtp_research.models.attention.attention import AttentionCall
from mtp_research.training.unroll import ModuleRows, RowInputs, unroll
from tests.training.tiny import make_batch, trainable_heads

HEADS, KV_HEADS, LENGTH, DIM = 4, 2, 9, 8
DOCUMENT_INDEX = torch.tensor([[0] * 5 + [1] * 3 + [-1]])


def random_rows(generator: torch.Generator) -> dict:
    shapes = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    return {
        name: torch.randn(1, heads, LENGTH, DIM, dtype=torch.float64, generator=generator)
        for name, heads in shapes.items()
    }


def explicit(passes: list[dict], *, anchor: int, window: int | None, scale: float) -> torch.Tensor:
    """`[H, D]` of the last pass at one anchor; context row s is at s, draft row j at t + j."""
    first = int((DOCUMENT_INDEX[0] == DOCUMENT_INDEX[0, anchor]).nonzero()[0])
    rows = [(s, passes[0], s) for s in range(first, anchor + 1)]
    rows += [(anchor + j, passes[j], anchor) for j in range(1, len(passes))]
    position = anchor + len(passes) - 1
    if window is not None:
        rows = [row for row in rows if position - row[0] < window]
    repeat = HEADS // KV_HEADS
    keys = torch.stack([p["key"][0, :, c].repeat_interleave(repeat, 0) for _, p, c in rows])
    values = torch.stack([p["value"][0, :, c].repeat_interleave(repeat, 0) for _, p, c in rows])
    scores = (keys * passes[-1]["query"][0, :, anchor]).sum(-1) * scale
    return (torch.softmax(scores, dim=0)[..., None] * values).sum(0)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6], ids=lambda window: f"window-{window}")
def test_module_rows_three_passes_equal_explicit_keys(window):
    generator = torch.Generator().manual_seed(0)
    rows, passes = ModuleRows(DOCUMENT_INDEX), []
    for draft_step in range(3):
        if draft_step > 0:
            rows.begin_draft_row()
        passes.append(random_rows(generator))
        call = AttentionCall(**passes[-1], scale=0.3, sliding_window=window)
        output = rows.attend(nn.Identity(), call)
        for anchor in range(8):
            expected = explicit(passes, anchor=anchor, window=window, scale=0.3)
            torch.testing.assert_close(output[0, anchor], expected, rtol=0, atol=1e-12)


def test_compiled_module_runs_each_pass_as_one_graph():
    """Windows and sinks included; nothing of the attention is traced, and no pass breaks."""
    torch._dynamo.reset()
    heads = trainable_heads("mimo_v2")
    inputs = RowInputs(**make_batch(heads))
    graphs = []

    def backend(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    def loss_and_gradients():
        outputs = unroll(heads, inputs, num_depths=3, kind="ttt")
        loss = sum(torch.sin(output.post_norm[output.valid]).sum() for output in outputs)
        return loss, *torch.autograd.grad(loss, list(heads.parameters()), allow_unused=True)

    expected = loss_and_gradients()
    heads.mtp_modules[0].compile(backend=backend, dynamic=False, fullgraph=True)
    for got, wanted in zip(loss_and_gradients(), expected, strict=True):
        if wanted is not None:
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)
    assert len(graphs) == 3
    assert all(sum("attend_rows" in name for name in graph) == 1 for graph in graphs)
