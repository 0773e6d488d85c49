"""Products of few rows against float64, shared by the interpreter and GPU runs."""

from typing import NamedTuple

import torch
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product
from mtp_research.kernels.products.gemv import GemvConfig
from mtp_research.kernels.products.scaled_weights import (
    FP8,
    dequantise,
    dequantise_ref,
    scale_shape,
)

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Case(NamedTuple):
    """A product whose sizes do not fit its tiles, or do."""

    name: str
    num_rows: int
    num_outputs: int  # F if gated
    depth: int
    config: FewRowsConfig | GemvConfig
    has_bias: bool = False
    is_gated: bool = False
    scale_block: int | None = None  # of an FP8 weight; 0: a scale per row


INTERPRETED_CASES = (
    Case("one_row", 1, 37, 72, FewRowsConfig(16, 32, 2, 3), has_bias=True),
    Case("two_splits", 9, 37, 72, FewRowsConfig(32, 16, 2, 3, 1), has_bias=True),
    Case("uneven_splits_of_tiles", 5, 64, 80, FewRowsConfig(32, 16, 1, 4, 2, uses_descriptor=True)),
    Case("one_tile", 16, 16, 16, FewRowsConfig(16, 16, 1, 2)),
    Case("gated", 9, 21, 72, FewRowsConfig(32, 32, 1, 4), is_gated=True),
    Case("gemv", 1, 37, 304, GemvConfig(8, 128, 2), has_bias=True),
    Case("gemv_gated", 1, 21, 304, GemvConfig(8, 128, 1), is_gated=True),
)

# The last block of a row, and of a column, is cut off; steps are as deep as a block, or less.
FP8_CASES = (
    Case("fp8_blocks", 5, 75, 88, FewRowsConfig(16, 64, 1, 3), has_bias=True, scale_block=32),
    Case("fp8_blocks_split", 9, 75, 88, FewRowsConfig(32, 16, 2, 3, 1), scale_block=32),
    Case("fp8_rows", 9, 37, 72, FewRowsConfig(32, 32, 2, 3), has_bias=True, scale_block=0),
    Case("fp8_rows_split", 1, 37, 72, FewRowsConfig(16, 16, 1, 3, 1), scale_block=0),
    Case("gemv_fp8_blocks", 1, 75, 304, GemvConfig(8, 128, 2), has_bias=True, scale_block=32),
    Case("gemv_fp8_rows", 1, 37, 72, GemvConfig(8, 128, 2), has_bias=True, scale_block=0),
)


def draw_fp8(
    shape: tuple[int, ...], *, block: int, generator: torch.Generator, num_parts: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """An FP8 weight `[..., O, C]` of `num_parts` matrices behind each other, and its scales.

    The product has the size of its rows; scales differ by a factor of 9.
    """
    *lead, rows, columns = shape
    rows_of_scales, columns_of_scales = scale_shape(rows // num_parts, columns, block=block)
    weight = 64 * torch.randn(shape, generator=generator)
    scales = (*lead, num_parts * rows_of_scales, columns_of_scales)
    scale = (torch.rand(scales, generator=generator) + 0.125) / 64 / columns**0.5
    return weight.to(FP8), scale


def check_few_rows(
    case: Case, dtype: torch.dtype, *, backend: str, device: str = "cpu", seed: int = 0
) -> None:
    """Values of rows cut from a wider matrix, equal bits of two calls, and an empty batch."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).to(device)

    num_weight_rows = case.num_outputs * (2 if case.is_gated else 1)
    x = randn(case.num_rows, case.depth + 16)[:, : case.depth]
    weight = plain = randn(num_weight_rows, case.depth) / case.depth**0.5
    bias = randn(num_weight_rows) if case.has_bias else None
    settings = {"config": case.config, "is_gated": case.is_gated, "backend": backend}
    if case.scale_block is not None:
        block = case.scale_block
        drawn = draw_fp8(tuple(weight.shape), block=block, generator=generator)
        weight, scale = (tensor.to(device) for tensor in drawn)
        settings |= {"scale": scale, "scale_block": block}
        plain = dequantise(weight, scale, block=block, dtype=torch.float64)
    out = few_rows_product(x, weight, bias, **settings)
    expected = x.double() @ plain.double().T
    if bias is not None:
        expected += bias.double()
    if case.is_gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=1e-2)
    assert torch.equal(few_rows_product(x, weight, bias, **settings), out)
    empty = few_rows_product(x[:0], weight, bias, **settings)
    assert empty.shape == (0, case.num_outputs)


def check_dequantise(dtype: torch.dtype, *, device: str = "cpu") -> None:
    """The kernel's numbers are the reference's bits: blocks and tiles cut off, and stacks."""
    generator = torch.Generator().manual_seed(0)
    for block in (16, 64, 256, 0):
        for shape in ((33, 50), (64, 128), (3, 21, 300)):
            drawn = draw_fp8(shape, block=block, generator=generator)
            weight, scale = (tensor.to(device) for tensor in drawn)
            found = dequantise(weight, scale, block=block, dtype=dtype, backend="triton")
            expected = dequantise_ref(weight, scale, block=block, dtype=dtype)
            assert torch.equal(found, expected), (block, shape)
