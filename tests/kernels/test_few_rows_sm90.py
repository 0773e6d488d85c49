"""Every shipped few-rows program compiles for sm_90: no spills, shared memory fits."""

from typing import NamedTuple

import pytest
import torch
from mtp_research.kernels.products import few_rows_choice
from mtp_research.kernels.products.few_rows_product import (
    FewRowsConfig,
    choose_num_splits,
    few_rows_constants,
    few_rows_kernel,
)
from mtp_research.kernels.products.gemv import GemvConfig, gemv_kernel, slab_of

pytest.importorskip("triton")
from tests.kernels.test_sm90_compile import (
    SHARED_MEMORY_BYTES,
    _compile,
    _num_spilled_bytes,
    kinds_first,
)


class Program(NamedTuple):
    """A launch that differs from the others in what is compiled."""

    num_rows: int
    config: FewRowsConfig
    is_gated: bool = False
    is_split: bool = False
    has_bias: bool = False
    scale_block: int | None = None  # of an FP8 weight


def shipped():
    """Every program shape of the tables, split where the least weight of its row is split."""
    tables = {False: few_rows_choice._CHOICES, True: few_rows_choice._GATED_CHOICES}
    for is_gated, table in tables.items():
        for num_rows, choices in table.items():
            for choice in choices:
                config = choice.config
                if isinstance(config, GemvConfig):
                    continue
                num_tiles = -(-choice.min_outputs // config.block_n)
                splits = choose_num_splits(num_tiles, choice.min_depth, config=config) > 1
                for is_split in {False, splits and not is_gated}:
                    yield Program(num_rows, config, is_gated, is_split)


# A bias is added to sums that are in registers already: one program has it.
WITH_BIAS = Program(8, few_rows_choice._NARROW, has_bias=True)
FP8_PROGRAMS = [
    Program(num_rows, config, is_split=True, scale_block=block)
    for num_rows, config in few_rows_choice._FP8_CONFIGS.items()
    for block in (128, 0)
    if isinstance(config, FewRowsConfig)
]
PLAIN_PROGRAMS = [*dict.fromkeys(shipped()), WITH_BIAS, Program(1, few_rows_choice._NARROW)]
PROGRAMS = [*PLAIN_PROGRAMS, *FP8_PROGRAMS]


def name_of(program):
    words = ("gated", "split", "bias")
    kind = [word for word, has in zip(words, program[2:], strict=False) if has]
    kind += [] if program.scale_block is None else [f"fp8_{program.scale_block}"]
    return "_".join((f"{program.num_rows}_rows", *map(str, map(int, program.config)), *kind))


# One of each: copies by descriptor or not, split or not, and what a product takes in.
USUAL = {
    *("16_rows_32_256_2_5_0_0", "16_rows_64_128_4_5_0_0_gated", "64_rows_128_128_8_4_1_1"),
    *("8_rows_32_256_2_5_0_1_bias", "8_rows_64_128_4_6_2_1_split"),
    *("8_rows_64_128_4_6_2_0_split_fp8_0", "128_rows_128_128_8_4_1_1_split_fp8_128"),
}


@pytest.mark.parametrize(
    "program", kinds_first({name_of(program): program for program in PROGRAMS}, USUAL)
)
def test_few_rows_kernel_sm90_has_no_spills(program, tmp_path):
    config, depth = program.config, 4096
    constants = few_rows_constants(
        program.num_rows,
        depth,
        dtype=torch.bfloat16,
        config=config,
        is_gated=program.is_gated,
        scale_block=program.scale_block or 0,
    ) | {"OVERLAPS": True}
    types = dict.fromkeys(few_rows_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), "*bf16")
    types |= dict.fromkeys(("bias", "weight_tiles", "parts", "arrived", "scale"), "constexpr")
    if program.scale_block is not None:
        types |= {"weight": "*fp8e4nv", "scale": "*fp32"}
    if program.is_split:
        types |= {"parts": "*fp32", "arrived": "*i32"}
    if program.has_bias:
        types["bias"] = "*bf16"
    if config.uses_descriptor:
        stored = types["weight"].removeprefix("*")
        types["weight_tiles"] = f"tensordesc<{stored}[{config.block_n},{config.block_k}]>"
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
    assert ("cvt.rn.f16x2.e4m3x2" in ptx) == (program.scale_block is not None)
    assert "cvt.bf16.f16" not in ptx, "slower than memory"
    order = (
        "prefetch.global.L2",
        "griddepcontrol.wait",
        copies,
        "griddepcontrol.launch_dependents",
    )
    assert sorted(order, key=ptx.index) == list(order)


ONE_ROW = {
    "4096": (4096, None, False),
    "6144": (6144, None, False),
    "11008": (11_008, None, False),
    "4096_gated": (4096, None, True),
    "4096_fp8_128": (4096, 128, False),
    "12288_fp8_0": (12_288, 0, False),
}


@pytest.mark.parametrize(
    "program", kinds_first(ONE_ROW, {"6144", "4096_gated", "4096_fp8_128", "12288_fp8_0"})
)
def test_one_row_kernel_sm90_asks_for_its_weight_before_it_waits(program, tmp_path):
    depth, scale_block, is_gated = program
    config = few_rows_choice._ONE_ROW
    slab = slab_of(depth, config=config, scale_block=scale_block or 0)
    constants = slab | {"NUM_STEPS": -(-depth // slab["BLOCK_K"]), "IS_GATED": is_gated}
    constants |= {"OVERLAPS": True}
    types = dict.fromkeys(gemv_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out", "bias"), "*bf16") | {"scale": "constexpr"}
    if scale_block is not None:
        types |= {"weight": "*fp8e4nv", "scale": "*fp32"}
    compiled = _compile(
        gemv_kernel,
        types=types | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=config.num_warps,
        divisible=("num_outputs", "depth"),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    early, late = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global.v4" in early, "16 bytes a load"
    assert "ld.global.v4" in late, "of `x`"
    assert "griddepcontrol.launch_dependents" in late
