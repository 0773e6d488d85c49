"""The product of few rows on a CUDA device: every program shape of the table, and under a graph."""

import pytest
import torch
from mtp_research.kernels.products.few_rows_choice import (
    choose_config,
    choose_fp8_config,
    choose_gated_config,
)
from mtp_research.kernels.products.few_rows_product import FewRowsConfig, few_rows_product

from tests.kernels.few_rows_cases import (
    FP8_CASES,
    INTERPRETED_CASES,
    Case,
    check_dequantise,
    check_few_rows,
)

pytestmark = pytest.mark.gpu
poisoned = pytest.mark.usefixtures("nan_in_new_memory")
BF16 = torch.bfloat16
GATED = FewRowsConfig(32, 256, 2, 5)  # where the table has none
WEIGHTS = ((2048, 2048), (4096, 4096), (6144, 4096), (16_384, 4096), (32_001, 2048))


@poisoned
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", INTERPRETED_CASES + FP8_CASES, ids=lambda case: case.name)
def test_small_products_on_gpu_match_float64(case, dtype):
    has_tiles = isinstance(case.config, FewRowsConfig)
    if dtype is torch.float32 and has_tiles and case.config.block_n > 16:
        pytest.skip("float32 is multiplied without tensor cores, in small tiles")
    check_few_rows(case, dtype, backend="triton", device="cuda", seed=case.num_rows)


@poisoned
@pytest.mark.parametrize("num_rows", [1, 3, 4, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize(("num_outputs", "depth"), WEIGHTS)
def test_program_shapes_of_the_table_match_float64(num_rows, num_outputs, depth):
    for dtype in (BF16, torch.float16):
        config = choose_config(num_rows, num_outputs, depth, dtype=dtype)
        if config is not None:
            case = Case("", num_rows, num_outputs, depth, config, has_bias=True)
            check_few_rows(case, dtype, backend="triton", device="cuda", seed=num_rows)


@poisoned
@pytest.mark.parametrize("num_rows", [1, 16])
def test_gated_program_shapes_of_the_table_match_float64(num_rows):
    config = choose_gated_config(num_rows, 22_016, 4096, dtype=BF16)
    case = Case("", num_rows, 11_008, 4096, config, is_gated=True)
    check_few_rows(case, BF16, backend="triton", device="cuda", seed=num_rows)


@poisoned
@pytest.mark.parametrize("scale_block", [128, 0], ids=["blocks", "rows"])
@pytest.mark.parametrize("num_rows", [1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128])
def test_fp8_products_on_gpu_match_float64(num_rows, scale_block):
    for num_outputs, depth in ((4096, 4096), (2817, 1408), (14_336, 4096)):  # 22.008 blocks
        sizes = (num_rows, num_outputs, depth, choose_fp8_config(num_rows, depth))
        case = Case("", *sizes, has_bias=True, scale_block=scale_block)
        check_few_rows(case, BF16, backend="triton", device="cuda", seed=num_rows)
        if isinstance(case.config, FewRowsConfig):
            tiled = case._replace(config=case.config._replace(uses_descriptor=True))
            check_few_rows(tiled, BF16, backend="triton", device="cuda", seed=num_rows)


@poisoned
@pytest.mark.parametrize("num_rows", [128, 100])
def test_most_rows_on_gpu_match_float64(num_rows):
    case = Case("", num_rows, 4000, 1408, FewRowsConfig(128, 64, 8, 5, 1), has_bias=True)
    check_few_rows(case, BF16, backend="triton", device="cuda")


@pytest.mark.parametrize("num_rows", [1, 4])
def test_chain_of_overlapping_products_in_a_graph_reads_what_was_written(num_rows):
    """Each product reads what the one before wrote; a launch that read too early would differ."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((6144, 4096), (4096, 6144), (22_016, 4096), (4096, 11_008)) * 4
    weights = [
        torch.randn(shape, generator=generator, device="cuda", dtype=BF16) / shape[1] ** 0.5
        for shape in shapes
    ]
    x = torch.randn(num_rows, 4096, generator=generator, device="cuda", dtype=BF16)

    def run(rows: torch.Tensor, *, waits: bool) -> torch.Tensor:
        for weight in weights:
            is_gated = len(weight) == 22_016
            config = choose_config(num_rows, *weight.shape, dtype=BF16)
            if is_gated:
                config = choose_gated_config(num_rows, *weight.shape, dtype=BF16) or GATED
            rows = few_rows_product(rows, weight, config=config, is_gated=is_gated)
            if waits:
                torch.cuda.synchronize()
        return rows

    expected = run(x, waits=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, waits=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_plain_numbers_of_fp8_on_gpu_are_the_references(dtype):
    check_dequantise(dtype, device="cuda")
