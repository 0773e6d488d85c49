"""Attention by document ends equals attention by mask; flash attention runs on a GPU only."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mtp_research.models.attention import attention, context_rows
from mtp_research.models.attention.attention import (
    AttentionCall,
    DenseContext,
    document_ends,
    flat_ends,
)
from tests.models import flash_kernels

# Documents of 3, 2 and 3 tokens and padding; one document that fills its row; five short ones.
ROWS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, -1], [3] * 9, [4, 5, 5, 6, 6, 7, 7, 7, 8]])


def attend(tensors, *, with_ends, sliding_window, device="cpu"):
    """Output and gradients of `DenseContext`, padding left out."""
    cu_seqlens = None
    if with_ends:
        ends = torch.from_numpy(document_ends(ROWS)).to(device)
        cu_seqlens = flat_ends(ends, length=ROWS.shape[1])
    context = DenseContext(torch.from_numpy(ROWS).to(device), cu_seqlens)
    query, key, value = (tensor.clone().requires_grad_(True) for tensor in tensors)
    call = AttentionCall(query, key, value, 0.3, sliding_window)
    output = context.attend(torch.nn.Identity(), call)
    kept = output[torch.from_numpy(ROWS >= 0).to(device)]
    return kept, torch.autograd.grad(torch.sin(kept).sum(), (query, key, value))


def random_tensors(head_dim, *, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4, 9, head_dim), (3, 2, 9, head_dim), (3, 2, 9, head_dim)]
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes]


def play_flash_attention(monkeypatch) -> list[int]:
    """Let a CPU take the GPU's path; returns a list that gets a number a call."""
    calls = []

    def played(*inputs, **options):
        calls.append(1)
        return flash_kernels.flash_forward(*inputs, **options)

    for module in (attention, context_rows):
        monkeypatch.setattr(module, "fits_varlen", lambda *_: True)
    monkeypatch.setattr(context_rows, "flash_forward", played)
    monkeypatch.setattr(context_rows, "flash_backward", flash_kernels.flash_backward)
    return calls


@pytest.mark.parametrize("sliding_window", [None, 2])
def test_attention_by_ends_equals_attention_by_mask(monkeypatch, sliding_window):
    tensors = random_tensors(8, dtype=torch.float64)
    expected, expected_grads = attend(tensors, with_ends=False, sliding_window=sliding_window)
    calls = play_flash_attention(monkeypatch)
    got, grads = attend(tensors, with_ends=True, sliding_window=sliding_window)
    assert calls == [1]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-12)


def test_document_ends_count_padding_and_fill_up():
    assert document_ends(ROWS).tolist() == [
        [3, 5, 8, 9, 9],
        [9, 9, 9, 9, 9],
        [1, 3, 5, 8, 9],
    ]
    ends = torch.tensor([[2, 4], [4, 4]], dtype=torch.int32)
    assert flat_ends(ends, length=4).tolist() == [0, 2, 4, 8, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 2])
def test_flash_attention_by_ends_equals_the_mask(monkeypatch, sliding_window):
    tensors = random_tensors(64, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(context_rows, "_MIN_MEAN_TOKENS", 1)
    options = {"sliding_window": sliding_window, "device": "cuda"}
    expected, expected_grads = attend(tensors, with_ends=False, **options)
    got, grads = attend(tensors, with_ends=True, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0.05)


def test_compiled_attention_by_ends_is_one_graph_for_all_batches(monkeypatch):
    play_flash_attention(monkeypatch)
    query, key, value = random_tensors(8, dtype=torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False, fullgraph=True)
    def run(context):
        return context.attend(torch.nn.Identity(), AttentionCall(query, key, value, 0.3))

    for rows in (ROWS, ROWS[::-1].copy()):
        documents = torch.from_numpy(rows)
        ends = flat_ends(torch.from_numpy(document_ends(rows)), length=ROWS.shape[1])
        expected = DenseContext(documents).attend(
            torch.nn.Identity(), AttentionCall(query, key, value, 0.3)
        )
        torch.testing.assert_close(run(DenseContext(documents, ends)), expected)
    assert len(graphs) == 1


@pytest.mark.parametrize("sliding_window", [None, 2])
def test_compiled_layers_that_need_one_mask_are_one_graph(sliding_window):
    """A mask that the first kept for the second would make two of them."""
    tensors, count = random_tensors(8, dtype=torch.float32), CompileCounter()

    def layer(context, query, key, value):
        call = AttentionCall(query, key, value, 0.3, sliding_window)
        return context.attend(torch.nn.Identity(), call)

    context, kept = (DenseContext(torch.from_numpy(ROWS)) for _ in range(2))
    compiled = torch.compile(layer, backend=count, dynamic=False, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(context, *tensors), layer(kept, *tensors))
    assert count.frame_count == 1
