"""The batch-invariant programs on a CUDA device: the same checks in all dtypes, real sizes."""

import pytest
import torch
from mtp_research.kernels.products.invariant_matmul import invariant_grouped_matmul

from tests.kernels.invariant_cases import (
    VARIANTS,
    check_attention,
    check_grouped,
    check_matmul,
    check_row_sum,
    randn,
)
from tests.kernels.test_invariant import attend_invariantly

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SIZES = (1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 65, 127, 128, 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_outputs", "depth"), [(37, 72), (4096, 1536), (10_000, 768), (20_000, 576)]
)
def test_products_on_gpu_have_the_same_bits_in_any_batch(dtype, num_outputs, depth):
    check_matmul(
        dtype,
        backend="triton",
        device="cuda",
        sizes=SIZES,
        num_outputs=num_outputs,
        depth=depth,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_and_sums_on_gpu_have_the_same_bits_in_any_batch(dtype):
    check_grouped(dtype, backend="triton", device="cuda")
    check_row_sum(dtype, backend="triton", device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_attention_on_gpu_has_the_same_bits_in_any_batch(variant, dtype):
    check_attention(variant, dtype, attend=attend_invariantly, device="cuda")


def test_grouped_product_on_gpu_never_synchronises():
    x = randn(32, 512, dtype=torch.bfloat16, device="cuda")
    weight = randn(16, 256, 512, dtype=torch.bfloat16, device="cuda")
    groups = torch.arange(64, device="cuda") % 16
    invariant_grouped_matmul(x, weight, groups)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = invariant_grouped_matmul(x, weight, groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    groups.copy_(groups.flip(0))
    graph.replay()
    assert torch.equal(out, invariant_grouped_matmul(x, weight, groups))
