"""Attention by document ends equals attention by mask; flash attention runs on a GPU only."""

import inspect

import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from mtp_research.models.attention import attention
from mtp_research.models.attention import attention as varlen
from mtp_research.models.attention.attention import (
    AttentionCall,
    DenseContext,
    document_ends,
    fits_varlen,
    flat_ends,
)

# Documents of 3, 2 and 3 tokens and padding; one document that fills its row; five short ones.
ROWS = np.array([[0, 0, 0, 1, 1, 2, 2, 2, -1], [3] * 9, [4, 5, 5, 6, 6, 7, 7, 7, 8]])


def by_document(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options):
    """What `varlen_attn` computes, one document after the other; takes the same arguments."""
    inspect.signature(varlen_attn).bind(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options
    )
    left, right = options["window_size"]
    assert (right, cu_seq_q.dtype, int(cu_seq_q[-1])) == (0, torch.int32, len(query))
    pieces = []
    for start, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        assert end - start <= max_q
        index = torch.arange(end - start)
        distance = index[:, None] - index[None, :]
        allowed = (distance >= 0) & ((left < 0) | (distance <= left))
        parts = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        if end > start:
            found = torch.nn.functional.scaled_dot_product_attention(
                *parts,
                attn_mask=allowed,
                scale=options["scale"],
                enable_gqa=options.get("enable_gqa", False),
            )
            pieces.append(found[0].transpose(0, 1))
    return torch.cat(pieces)


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


@pytest.mark.parametrize("sliding_window", [None, 2])
def test_attention_by_ends_equals_attention_by_mask(monkeypatch, sliding_window):
    tensors = random_tensors(8, dtype=torch.float64)
    expected, expected_grads = attend(tensors, with_ends=False, sliding_window=sliding_window)
    calls = []
    monkeypatch.setattr(
        varlen, "varlen_attn", lambda *a, **k: calls.append(1) or by_document(*a, **k)
    )
    monkeypatch.setattr(attention, "fits_varlen", lambda *_, **__: True)
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


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float32},
        {"value_dim": 16},
        {"head_dim": 12},
        {"sinks": True},
        {"documents": 9},
    ],
    ids=["fits", "float32", "value-dim", "head-dim-12", "sinks", "short-documents"],
)
def test_varlen_is_used_only_where_its_kernel_fits(change):
    with torch.device("meta"):
        head_dim, dtype = change.get("head_dim", 64), change.get("dtype", torch.bfloat16)
        query = torch.empty(2, 4, 256, head_dim, dtype=dtype)
        key = torch.empty(2, 2, 256, head_dim, dtype=dtype)
        value = torch.empty(2, 2, 256, change.get("value_dim", head_dim), dtype=dtype)
        cu_seqlens = torch.empty(change.get("documents", 6) + 1, dtype=torch.int32)
        sinks = torch.empty(4) if "sinks" in change else None
    query = OnCuda(query)
    call = AttentionCall(query, key, value, 0.125, sinks=sinks)
    assert fits_varlen(call, cu_seqlens=cu_seqlens) == (not change)


class OnCuda(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @staticmethod
    def __new__(cls, tensor):
        return tensor.as_subclass(cls)

    @property
    def is_cuda(self):
        return True


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 2])
def test_flash_attention_by_ends_equals_the_mask(monkeypatch, sliding_window):
    tensors = random_tensors(64, dtype=torch.bfloat16, device="cuda")
    monkeypatch.setattr(varlen, "_MIN_MEAN_TOKENS", 1)
    options = {"sliding_window": sliding_window, "device": "cuda"}
    expected, expected_grads = attend(tensors, with_ends=False, **options)
    got, grads = attend(tensors, with_ends=True, **options)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=0.05)


def test_compiled_attention_by_ends_is_one_graph_for_all_batches(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", lambda query, *_, **__: query + 1)
    monkeypatch.setattr(attention, "fits_varlen", lambda *_, **__: True)
    query, key, value = random_tensors(8, dtype=torch.float32)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False, fullgraph=True)
    def run(context):
        return context.attend(torch.nn.Identity(), AttentionCall(query, key, value, 0.3))

    documents = torch.from_numpy(ROWS)
    for rows in (ROWS, ROWS[::-1].copy()):
        ends = flat_ends(torch.from_numpy(document_ends(rows)), length=ROWS.shape[1])
        torch.testing.assert_close(run(DenseContext(documents, ends)), query.transpose(1, 2) + 1)
    assert len(graphs) == 1
