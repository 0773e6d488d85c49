"""Checks of the one-visit cross-entropy and of the row gather, for every backend and device."""

import torch
from mtp_research.kernels.losses.cross_entropy import (
    CrossEntropyResult,
    cross_entropy,
    cross_entropy_rows,
    gather_rows,
)
from torch import Tensor
from torch.nn import functional

WEIGHT = 0.7
# Largest error of a gradient, relative to the largest one; products round to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}


def check_rows(
    *, vocab: int, dtype: torch.dtype, grad_dtype: torch.dtype, backend: str, device: str = "cpu"
) -> None:
    """Rows of logits against autograd in float64; one is not valid, one has its label on top."""
    generator = torch.Generator().manual_seed(vocab)
    drawn = 4 * torch.randn(5, vocab, generator=generator)
    labels = torch.randint(0, vocab, (5,), generator=generator)
    labels[0] = drawn[0].argmax()
    drawn[3, labels[3]] = drawn[3].max() - 1  # near the top, not a hit
    logits = drawn.to(dtype)
    exact = logits.double().requires_grad_()
    losses = functional.cross_entropy(exact, labels, reduction="none")
    (slope,) = torch.autograd.grad(WEIGHT * losses.sum(), exact)
    logits[2] = torch.nan
    valid = torch.tensor([True, True, False, True, True])
    hits = (exact.argmax(dim=-1) == labels) & valid
    assert hits[0]
    assert not hits[3]
    logits, labels, valid = (part.to(device) for part in (logits, labels, valid))
    nll = torch.full((5,), torch.nan, device=device)
    is_hit = ~hits.to(device)
    in_place = logits.view(grad_dtype)[:, :vocab]
    options = {"labels": labels, "valid": valid, "nll": nll, "is_hit": is_hit}
    cross_entropy_rows(logits, **options, grad=in_place, weight=WEIGHT, backend=backend)
    torch.testing.assert_close(
        nll.cpu().double(), torch.where(valid.cpu(), losses, 0), atol=2e-5, rtol=0
    )
    assert torch.equal(is_hit.cpu(), hits)
    slope[2] = 0
    error = (in_place.cpu().double() - slope).abs().max()
    assert error < TOLERANCES[grad_dtype] * slope.abs().max()


def check_product(
    result: CrossEntropyResult, *, rows: Tensor, lm_head: Tensor, labels: Tensor, valid: Tensor
) -> None:
    """`cross_entropy` with weight `WEIGHT` against autograd in float64."""
    exact = rows.double().cpu().requires_grad_()
    labels, valid = labels.cpu(), valid.cpu()
    logits = exact @ lm_head.double().cpu().T
    losses = torch.where(valid, functional.cross_entropy(logits, labels, reduction="none"), 0)
    (wanted,) = torch.autograd.grad(WEIGHT * losses.sum(), exact)
    torch.testing.assert_close(result.nll.cpu().double(), losses, atol=2e-2, rtol=0)
    assert torch.equal(result.is_hit.cpu(), (logits.argmax(-1) == labels) & valid)
    assert result.grads is not None
    error = (result.grads.cpu().double() - wanted).abs().max()
    assert error < TOLERANCES[result.grads.dtype] * wanted.abs().max()


def run_product(
    *,
    dtype: torch.dtype,
    backend: str = "auto",
    half_logits: bool = False,
    chunk_rows: int | None = 4,
    device: str = "cpu",
) -> CrossEntropyResult:
    """11 rows in chunks of 4, one of them not valid and NaN, checked."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(11, 16, generator=generator).to(dtype)
    lm_head = torch.randn(53, 16, generator=generator).to(dtype)
    labels = torch.randint(0, 53, (11,), generator=generator)
    valid = torch.ones(11, dtype=torch.bool)
    valid[6] = False
    rows, lm_head, labels, valid = (part.to(device) for part in (rows, lm_head, labels, valid))
    given = rows.clone()
    given[6] = torch.nan
    arguments = {"labels": labels, "valid": valid, "lm_head": lm_head}
    result = cross_entropy(
        given,
        **arguments,
        weight=WEIGHT,
        half_logits=half_logits,
        chunk_rows=chunk_rows,
        backend=backend,
    )
    check_product(result, rows=rows, **arguments)
    statistics = cross_entropy(given, **arguments, half_logits=half_logits, backend=backend)
    assert statistics.grads is None
    torch.testing.assert_close(statistics.nll, result.nll, atol=1e-3, rtol=0)
    return result


def check_gather(
    *, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype, backend: str, device: str = "cpu"
) -> None:
    """Rows by index, some left out, scaled; a row that nobody asked for is NaN."""
    generator = torch.Generator().manual_seed(hidden)
    values = torch.randn(6, hidden, generator=generator).to(dtype)
    values[4] = torch.nan
    index = torch.tensor([3, -1, 0, 0, 5, -1, 2, 1, 3])
    scale = torch.rand(9, generator=generator)
    scale[1] = torch.nan
    wanted = torch.stack(
        [
            values[i] * s if i >= 0 else torch.zeros(hidden)
            for i, s in zip(index, scale, strict=True)
        ]
    )
    out = torch.full((9, hidden), torch.nan, dtype=out_dtype, device=device)
    moved = {"index": index.to(device), "out": out}
    gather_rows(values.to(device), **moved, scale=scale.to(device), backend=backend)
    torch.testing.assert_close(out.cpu().float(), wanted.float(), atol=1e-2, rtol=1e-2)
    gather_rows(values.to(device), **moved, backend=backend)
    expected = torch.where(index[:, None] < 0, 0, values[index.clamp(min=0)]).to(out_dtype)
    assert torch.equal(out.cpu(), expected)
