"""Program shapes of the few-rows product compile for sm_90: no spills, shared memory fits."""

import pytest
import torch
from mtp_research.kernels.few_rows_choice import choose_config, choose_gated_config
from mtp_research.kernels.few_rows_product import few_rows_constants
from mtp_research.kernels.few_rows_triton import few_rows_kernel

pytest.importorskip("triton")
from tests.kernels.test_sm90_compile import (
    SHARED_MEMORY_BYTES,
    _compile,
    _num_spilled_bytes,
)

# Name: T, N, K, the number of programs that share it, gated.
PRODUCTS = {
    "qkv_4_rows": (4, 6144, 4096, 1, False),
    "split_1_row": (1, 2048, 5632, 8, False),
    "lm_head_64_rows": (64, 151_680, 4096, 1, False),
    "gated_16_rows": (16, 22_016, 4096, 1, True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_few_rows_kernel_sm90_has_no_spills(name, tmp_path):
    num_rows, num_outputs, depth, num_splits, is_gated = PRODUCTS[name]
    choose = choose_gated_config if is_gated else choose_config
    config = choose(num_rows, num_outputs, depth, dtype=torch.bfloat16)
    constants = few_rows_constants(
        num_rows, depth, dtype=torch.bfloat16, config=config, overlaps=True, is_gated=is_gated
    )
    types = dict.fromkeys(few_rows_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), "*bf16")
    types |= dict.fromkeys(("bias", "weight_tiles", "parts", "arrived"), "constexpr")
    if num_splits > 1:
        types |= {"parts": "*fp32", "arrived": "*i32"}
    if config.uses_descriptor:
        types["weight_tiles"] = f"tensordesc<bf16[{config.block_n},{config.block_k}]>"
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        few_rows_kernel,
        types=types,
        constants=constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        divisible=("num_outputs", "depth"),
    )
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    ptx = compiled.asm["ptx"]
    copies = "cp.async.bulk.tensor" if config.uses_descriptor else "cp.async.cg"
    assert copies in ptx
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index(copies)
