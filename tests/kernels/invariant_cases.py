"""Checks of the batch-invariant products, shared by the reference, interpreter and GPU runs.

Each compares values with float64, and bits between batches: every M, shuffled rows, padded rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from mtp_research.kernels.products.invariant_matmul import (
    invariant_grouped_matmul,
    invariant_matmul,
    row_sum,
)
from torch import Tensor

from tests.kernels.kernel_cases import AttentionCase, make_inputs, slow_arguments

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def randn(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def check_matmul(
    dtype: torch.dtype,
    *,
    backend: str,
    device: str = "cpu",
    sizes: tuple[int, ...] = tuple(range(1, 34)),
    num_outputs: int = 37,
    depth: int = 72,
) -> None:
    """Odd N and K, with bias; then a batch of weights that are views of other strides."""
    most = max(sizes)
    x = randn(most, depth, dtype=dtype, device=device)
    weight = randn(num_outputs, depth, dtype=dtype, device=device, seed=1) / depth**0.5
    bias = randn(num_outputs, dtype=dtype, device=device, seed=2)
    whole = invariant_matmul(x, weight, bias, backend=backend)
    expected = x.double() @ weight.double().mT + bias.double()
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCES[dtype], rtol=0)
    for size in sizes:
        part = invariant_matmul(x[most - size :], weight, bias, backend=backend)
        assert torch.equal(part, whole[most - size :]), f"other bits for M={size}"
    order = torch.randperm(most, generator=torch.Generator().manual_seed(3)).to(device)
    shuffled = invariant_matmul(x[order], weight, bias, backend=backend)
    assert torch.equal(shuffled, whole[order]), "other bits in another place"
    padded = torch.cat((x, x.new_full((7, depth), torch.nan)))
    assert torch.equal(invariant_matmul(padded, weight, bias, backend=backend)[:most], whole)
    heads = x.view(most, 3, -1).transpose(0, 1)  # [3, M, K / 3]
    weights = weight.view(num_outputs, 3, -1).transpose(0, 1)
    batched = invariant_matmul(heads, weights, backend=backend)
    expected = heads.double() @ weights.double().mT
    torch.testing.assert_close(batched.double(), expected, atol=TOLERANCES[dtype], rtol=0)
    one = invariant_matmul(heads[:, 1:2], weights, backend=backend)
    assert torch.equal(one, batched[:, 1:2]), "other bits for M=1 of a batch"


def check_grouped(dtype: torch.dtype, *, backend: str, device: str = "cpu") -> None:
    """Two pairs a row, groups of uneven sizes, one of them empty."""
    x = randn(21, 40, dtype=dtype, device=device)
    weight = randn(5, 24, 40, dtype=dtype, device=device, seed=1) / 40**0.5
    generator = torch.Generator().manual_seed(2)
    groups = torch.tensor([0, 1, 3, 4])[torch.randint(4, (42,), generator=generator)].to(device)
    groups[:20] = 3
    whole = invariant_grouped_matmul(x, weight, groups, backend=backend)
    rows = x.double().repeat_interleave(2, dim=0)
    expected = (weight[groups].double() @ rows[..., None])[..., 0]
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCES[dtype], rtol=0)
    for first in (0, 7, 20):
        part = invariant_grouped_matmul(x[first:], weight, groups[2 * first :], backend=backend)
        assert torch.equal(part, whole[2 * first :]), f"other bits without {first} rows"


def check_row_sum(dtype: torch.dtype, *, backend: str, device: str = "cpu") -> None:
    """Rows longer than a block, of odd length; strided and alone."""
    x = randn(6, 2077, dtype=dtype, device=device)
    whole = row_sum(x, backend=backend)
    atol = 100 * TOLERANCES[dtype] if dtype in (torch.bfloat16, torch.float16) else 2e-4
    torch.testing.assert_close(whole.double(), x.double().sum(1), atol=atol, rtol=0)
    for row in range(6):
        assert torch.equal(row_sum(x[row : row + 1], backend=backend), whole[row : row + 1])
    assert torch.equal(row_sum(x.mT.contiguous().mT, backend=backend), whole)
    assert row_sum(x[:0], backend=backend).shape == (0,)


class Variant(NamedTuple):
    """A form of attention whose rows are compared between batches."""

    name: str
    has_window: bool = False  # of half of the text
    sinks: bool = False
    latent: bool = False


VARIANTS = (
    Variant("full"),
    Variant("window_sinks", has_window=True, sinks=True),
    Variant("latent", latent=True),
)


def check_attention(
    variant: Variant,
    dtype: torch.dtype,
    *,
    attend: Callable,
    device: str = "cpu",
    num_keys: int = 140,
    split_keys: int = 64,
) -> None:
    """Rows of a prompt chunk, of a verify batch and alone, in tables of other widths.

    Args:
        variant: the form.
        dtype: of queries and pages.
        attend: `attend(query, **keywords)`; the query of latent attention is cut into its parts.
        device: of the tensors.
        num_keys: length of the text.
        split_keys: a position before and behind which rows are compared: the first split ends here.
    """
    case = AttentionCase(
        variant.name,
        query_lens=(num_keys,),
        seq_lens=(num_keys,),
        num_heads=2,
        num_kv_heads=1,
        key_dim=24 if variant.latent else 16,
        sliding_window=num_keys // 2 if variant.has_window else None,
        sinks=variant.sinks,
    )
    inputs = make_inputs(case, dtype=dtype, values_in_keys=variant.latent).to(device)
    fixed = {"key_cache": inputs.key_cache, "value_cache": inputs.value_cache}
    fixed |= slow_arguments(case) | {"sinks": inputs.sinks}

    def run(spans: list[tuple[int, int]], num_columns: int) -> Tensor:
        """Rows [begin, end) of the text as one request per span."""
        table = inputs.block_table[:, :1].expand(len(spans), num_columns).clone()
        width = min(num_columns, inputs.block_table.shape[1])
        table[:, :width] = inputs.block_table[:, :width]
        lengths = torch.tensor([end - begin for begin, end in spans])
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        return attend(
            torch.cat([inputs.query[begin:end] for begin, end in spans]),
            block_table=table,
            seq_lens=torch.tensor([end for _, end in spans]).int().to(device),
            query_start_loc=starts.to(device),
            max_query_len=int(lengths.max()),
            **fixed,
        )

    last, width = num_keys - 1, inputs.block_table.shape[1]
    chunk = run([(0, num_keys)], width)
    assert not chunk.isnan().any()
    for row in (0, split_keys - 1, split_keys, last):
        alone = run([(row, row + 1)], width if row % 2 else 3 * width)
        assert torch.equal(alone, chunk[row : row + 1]), f"row {row}: other bits alone"
    spans = [(split_keys - 4, split_keys), (7, 8), (last - 6, last - 2)]
    verified = run(spans, 2 * width)
    whole = torch.cat([chunk[begin:end] for begin, end in spans])
    assert torch.equal(verified, whole), "other bits in a verify batch"
