"""Attention over context and draft rows equals one softmax over an explicit matrix of keys."""

import pytest
import torch
from torch import Tensor

from mtp_research.models.attention import context_rows
from mtp_research.models.attention.attention import document_ends, flat_ends
from mtp_research.models.attention.context_rows import attend_rows, fits_varlen
from tests.models import flash_kernels

# Documents of 5, 3 and padding; of 1, 2 and 6.
DOCUMENT_INDEX = torch.tensor([[0] * 5 + [1] * 3 + [-1], [2] + [3] * 2 + [4] * 6])
HEADS, KV_HEADS, SCALE = 4, 2, 0.3


def random_rows(num_drafts, *, dims, documents=DOCUMENT_INDEX, heads=(HEADS, KV_HEADS)):
    """Float64 query, key, value and keys and values of draft rows; a sink for each head."""
    generator = torch.Generator().manual_seed(0)
    batch, length = documents.shape
    widths = [dims[0], *dims * (1 + num_drafts)]
    counts = [heads[0], *[heads[1]] * (len(widths) - 1)]
    options = {"dtype": torch.float64, "generator": generator}
    rows = [
        torch.randn(batch, count, length, width, **options)
        for count, width in zip(counts, widths, strict=True)
    ]
    return rows, torch.randn(heads[0], **options)


def dense(rows, *, window, sinks, documents=DOCUMENT_INDEX) -> Tensor:
    """`[B, S, H, Dv]`: one softmax over S context rows, the draft rows and the sink."""
    query, key, value, *drafts = rows
    groups = query.shape[1] // key.shape[1]
    key, value, *drafts = (part.repeat_interleave(groups, dim=1) for part in (key, value, *drafts))
    length = query.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    allowed = (documents[:, :, None] == documents[:, None, :]) & (distance >= 0)
    if window is not None:
        allowed = allowed & (distance < window)
    scores = (query @ key.transpose(-1, -2) * SCALE).masked_fill(~allowed[:, None], -torch.inf)
    columns = [scores]
    columns += [((query * own).sum(-1) * SCALE)[..., None] for own in drafts[::2]]
    if sinks is not None:
        columns.append(sinks[None, :, None, None].expand(*query.shape[:3], 1))
    weights = torch.softmax(torch.cat(columns, dim=-1), dim=-1)
    output = weights[..., :length] @ value
    for step, own in enumerate(drafts[1::2]):
        output = output + weights[..., length + step, None] * own
    return output.transpose(1, 2)


def with_gradients(attend, rows, sinks, *, is_text) -> list[Tensor]:
    """Output and gradients of every input, padding left out."""
    inputs = [part.clone().requires_grad_(True) for part in (*rows, *sinks)]
    output = attend(inputs[: len(rows)], *inputs[len(rows) :])
    kept = torch.sin(output[is_text].double())
    probe = torch.linspace(-1, 1, kept.numel(), dtype=kept.dtype, device=kept.device)
    grads = torch.autograd.grad(kept.flatten() @ probe, inputs)
    return [output[is_text], *grads]


def compare(rows, sinks, *, window, has_sinks, documents=DOCUMENT_INDEX, tol=1e-11, place=None):
    """Ours, moved by `place`, against the explicit matrix in float64 on a CPU."""
    place = place or (lambda tensor: tensor)
    sinks = [sinks] if has_sinks else []
    placed = {"document_index": place(documents)}
    ends = torch.from_numpy(document_ends(documents.numpy()))
    placed["cu_seqlens"] = flat_ends(place(ends), length=documents.shape[1])
    got = with_gradients(
        lambda rows, sink=None: attend_rows(rows, scale=SCALE, window=window, sinks=sink, **placed),
        [place(part) for part in rows],
        [place(part) for part in sinks],
        is_text=placed["document_index"] >= 0,
    )
    expected = with_gradients(
        lambda rows, sink=None: dense(rows, window=window, sinks=sink, documents=documents),
        rows,
        sinks,
        is_text=documents >= 0,
    )
    names = ["output", "query", "key", "value", *["draft"] * (len(rows) - 3), "sinks"]
    for name, mine, wanted in zip(names, got, expected, strict=False):
        torch.testing.assert_close(
            mine.cpu().double(), wanted, rtol=tol, atol=tol, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("kernel", ["chunks", "one-chunk", "flash"])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("window", "num_drafts", "dims"),
    [
        pytest.param(None, 0, (8, 8), id="context"),
        pytest.param(None, 2, (8, 8), id="drafts"),
        pytest.param(3, 0, (8, 8), id="window"),
        pytest.param(1, 2, (8, 8), id="window-drafts"),
        pytest.param(0, 2, (8, 8), id="drafts-alone"),
        pytest.param(None, 1, (16, 8), id="narrow-values"),
    ],
)
def test_rows_and_gradients_equal_the_explicit_matrix(
    monkeypatch, kernel, has_sinks, window, num_drafts, dims
):
    if kernel == "flash":
        monkeypatch.setattr(context_rows, "fits_varlen", lambda *_: True)
        monkeypatch.setattr(context_rows, "flash_forward", flash_kernels.flash_forward)
        monkeypatch.setattr(context_rows, "flash_backward", flash_kernels.flash_backward)
    elif kernel == "chunks":
        two_rows = 2 * DOCUMENT_INDEX.numel() * HEADS * torch.float64.itemsize
        monkeypatch.setattr(context_rows, "_CHUNK_BYTES", two_rows)
    rows, sinks = random_rows(num_drafts, dims=dims)
    compare(rows, sinks, window=window, has_sinks=has_sinks)


def test_rows_without_documents_see_all_before_them():
    rows, _ = random_rows(1, dims=(8, 8))
    one_document = torch.zeros_like(DOCUMENT_INDEX)
    got = attend_rows(rows, scale=SCALE)
    expected = dense(rows, window=None, sinks=None, documents=one_document)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_a_row_that_sees_nothing_is_refused():
    rows, _ = random_rows(0, dims=(8, 8))
    with pytest.raises(AssertionError, match="some key"):
        attend_rows(rows, scale=SCALE, window=0)


def test_no_chunk_is_larger_than_its_bytes(monkeypatch):
    rows, _ = random_rows(1, dims=(8, 8))
    limit = 3 * DOCUMENT_INDEX.numel() * HEADS * torch.float64.itemsize
    monkeypatch.setattr(context_rows, "_CHUNK_BYTES", limit)
    seen = []
    scores_of = context_rows._chunk_scores

    def watched(*inputs):
        scores = scores_of(*inputs)
        seen.append(scores.nbytes)
        return scores

    monkeypatch.setattr(context_rows, "_chunk_scores", watched)
    query = rows[0].requires_grad_(True)
    attend_rows([query, *rows[1:]], scale=SCALE).sum().backward()
    assert len(seen) == 6  # 3 forward and 3 backward
    assert max(seen) == limit


@pytest.mark.parametrize("window", [None, 2, 0])
def test_operator_is_registered_as_torch_asks(window):
    rows, sinks = random_rows(1, dims=(16, 8))
    rows = [part.transpose(1, 2).requires_grad_(True) for part in rows]
    bound = -1 if window is None else window
    arguments = (rows, sinks.requires_grad_(True), DOCUMENT_INDEX, None, SCALE, bound)
    torch.library.opcheck(context_rows._attend_op, arguments)


def test_flash_operators_take_our_arguments():
    """Shapes by the installed torch itself, on tensors without memory."""
    with torch.device("meta"):
        query, key, value = (torch.empty(2, heads, 128, 64).bfloat16() for heads in (4, 2, 2))
        parts = context_rows._Parts(query, key, value[..., :32])
        ends = torch.empty(5, dtype=torch.int32)
    seen = context_rows._Seen(None, ends, SCALE, 7)
    output, lse = context_rows._flash_forward(parts, seen)
    assert (output.shape, lse.shape) == ((2, 128, 4, 32), (2, 4, 128))
    grads = context_rows._flash_backward(output, output, lse, parts, seen)
    assert [grad.shape for grad in grads] == [part.shape for part in parts]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": torch.float32},
        {"value_dim": 16},
        {"value_dim": 128},
        {"head_dim": 12, "value_dim": 12},
        {"documents": 9},
    ],
    ids=["fits", "float32", "narrow-values", "wide-values", "head-dim-12", "short-documents"],
)
def test_flash_attention_is_used_only_where_it_fits(change):
    with torch.device("meta"):
        head_dim, dtype = change.get("head_dim", 64), change.get("dtype", torch.bfloat16)
        query = torch.empty(2, 4, 256, head_dim, dtype=dtype)
        key = torch.empty(2, 2, 256, head_dim, dtype=dtype)
        value = torch.empty(2, 2, 256, change.get("value_dim", 64), dtype=dtype)
        cu_seqlens = torch.empty(change.get("documents", 6) + 1, dtype=torch.int32)
    fits = fits_varlen([OnCuda(query), key, value], cu_seqlens)
    assert fits == (change in ({}, {"value_dim": 16}))


class OnCuda(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    @staticmethod
    def __new__(cls, tensor):
        return tensor.as_subclass(cls)

    @property
    def is_cuda(self):
        return True


# bfloat16 keeps 8 bits; outputs are below 3 and gradients below 4 here.
@pytest.mark.gpu
@pytest.mark.parametrize("has_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)], ids=["d128", "mla"])
@pytest.mark.parametrize(("window", "num_drafts"), [(None, 0), (None, 2), (64, 0), (3, 2), (0, 2)])
def test_flash_rows_equal_float64_on_a_gpu(window, num_drafts, dims, has_sinks):
    lengths = [[90, 150, 71, -9], [320]]
    documents = torch.stack(
        [
            torch.cat([torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)])
            for row in lengths
        ]
    )
    rows, sinks = random_rows(num_drafts, dims=dims, documents=documents)
    rows = [(part / part.shape[-1] ** 0.25).bfloat16().double() for part in rows]
    rows[0] = (rows[0] * 2).bfloat16().double()

    def place(tensor):
        return tensor.cuda().bfloat16() if tensor.is_floating_point() else tensor.cuda()

    assert fits_varlen(
        [place(part) for part in rows], torch.empty(2 * len(lengths[0]) + 1, dtype=torch.int32)
    )
    compare(
        rows,
        sinks.bfloat16().double(),
        window=window,
        has_sinks=has_sinks,
        documents=documents,
        tol=0.03,
        place=place,
    )


@pytest.mark.gpu
def test_rows_of_32k_tokens_need_no_square_matrix():
    """32 / 8 heads of 128, two draft rows; one matrix of scores would be 137 GB in float32."""
    length, options = 32768, {"device": "cuda", "dtype": torch.bfloat16}
    shapes = [(1, heads, length, 128) for heads in (32, *[8] * 6)]
    rows = [torch.randn(shape, **options).requires_grad_(True) for shape in shapes]
    documents = torch.zeros(1, length, dtype=torch.int64, device="cuda")
    ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    output = attend_rows(rows, scale=128**-0.5, document_index=documents, cu_seqlens=ends)
    output.backward(torch.randn_like(output))
    assert all(torch.isfinite(row.grad).all() for row in rows)
    assert torch.cuda.max_memory_allocated() < 8e9
