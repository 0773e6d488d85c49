"""The batch-invariant programs compile for sm_90 without a GPU: no spills, shared memory fits."""

import pytest
import torch
from mtp_research.kernels.attention.splits import merge_splits_kernel
from mtp_research.kernels.products import invariant_matmul
from mtp_research.kernels.products import invariant_matmul as row_sum

pytest.importorskip("triton")
from tests.kernels.test_sm90_compile import (
    POINTERS,
    SHARED_MEMORY_BYTES,
    _compile,
    _num_spilled_bytes,
    kinds_first,
)

BF16, FP32 = torch.bfloat16, torch.float32
PRODUCTS = {  # N, K, dtype, form: every tile shape of choose_matmul_config, and every form
    "few_outputs_bias": (4096, 4096, BF16, {"bias"}),
    "more_outputs": (11_008, 4096, BF16, set()),
    "lm_head": (151_552, 4096, BF16, set()),
    "odd_depth": (640, 80, BF16, set()),
    "experts": (2816, 4096, BF16, {"groups"}),
    "many_outputs_experts": (20_480, 4096, torch.float16, {"groups"}),
    "transposed": (512, 128, BF16, {"transposed"}),
    "router": (128, 4096, FP32, set()),
    "float32_experts": (2816, 4096, FP32, {"groups", "bias"}),
}


@pytest.mark.parametrize(
    "name",
    kinds_first(
        PRODUCTS.keys(), PRODUCTS.keys() - {"more_outputs", "lm_head", "many_outputs_experts"}
    ),
)
def test_invariant_matmul_kernel_sm90_has_no_spills(name, tmp_path):
    num_outputs, depth, dtype, forms = PRODUCTS[name]
    config = invariant_matmul.choose_matmul_config(num_outputs, element_bytes=dtype.itemsize)
    kernel = invariant_matmul.invariant_matmul_kernel
    pairs_per_row = 8 if "groups" in forms else 1
    constants = invariant_matmul.matmul_constants(depth, pairs_per_row=pairs_per_row, config=config)
    contiguous = "output" if "transposed" in forms else "depth"  # a stride of 1 is a constant
    constants[f"stride_weight_{contiguous}"] = 1
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), POINTERS[dtype])
    types["bias"] = POINTERS[dtype] if "bias" in forms else "constexpr"
    tables = "*i32" if "groups" in forms else "constexpr"
    types |= dict.fromkeys(("pair_index", "tile_group"), tables)
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        kernel,
        types=types,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        divisible=("num_outputs", "depth"),
    )
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert ("wgmma" in compiled.asm["ptx"]) == (dtype is not FP32)  # float32 stays exact


@pytest.mark.parametrize("value_dim", kinds_first((128, 256, 512), {"512"}))
def test_merge_splits_kernel_in_order_sm90_has_no_spills(value_dim, tmp_path):
    constants = {"NUM_HEADS": 32, "VALUE_DIM": value_dim, "PADDED_VALUE_DIM": value_dim}
    constants["PADDED_SPLITS"] = 0
    types = dict.fromkeys(("num_requests", "num_splits", "num_row_heads"), "i32")
    types |= {"partial": "*fp32", "lse": "*fp32", "query_start_loc": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(merge_splits_kernel, types=types, constants=constants, num_warps=4)
    assert _num_spilled_bytes(compiled, tmp_path) == 0


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_row_sum_kernel_sm90_has_no_spills(dtype, tmp_path):
    types = {"x": POINTERS[dtype], "out": POINTERS[dtype]}
    types |= {"num_columns": "i32", "stride_row": "i32", "BLOCK_D": "constexpr"}
    compiled = _compile(
        row_sum._row_sum_kernel,
        types=types,
        constants={"BLOCK_D": row_sum.BLOCK_D},
        num_warps=row_sum.NUM_WARPS,
        divisible=("num_columns",),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v" in compiled.asm["ptx"]
