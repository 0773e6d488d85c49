"""The mixture-of-experts programs compile for sm_90 without a GPU: no spills, memory fits."""

import pytest
import torch
from mtp_research.kernels.experts import (
    expert_gemv,
    expert_router,
    expert_routing,
)
from mtp_research.kernels.experts import (
    expert_mlp as expert_mlp_launch,
)
from mtp_research.kernels.experts.expert_mlp_triton import down_kernel, gate_up_kernel
from mtp_research.kernels.experts.expert_router import router_choice_kernel, router_logits_kernel
from mtp_research.kernels.products.gemv import slab_of
from mtp_research.kernels.products.scaled_weights import FP8

pytest.importorskip("triton")
from tests.kernels.expert_cases import configs_of
from tests.kernels.test_sm90_compile import (
    POINTERS,
    SHARED_MEMORY_BYTES,
    _compile,
    _num_spilled_bytes,
    kinds_first,
    starts_next_first,
)

KERNELS = {"gate_up": gate_up_kernel, "down": down_kernel}
NONE = torch.empty(0)
LAYOUTS = {None: "plain", 128: "blocks", 0: "rows"}  # of scales
TABLES = dict.fromkeys(("pair_index", "tile_expert", "counts", "offsets"), "*i32")
SHIPPED = {  # programs that differ: rows a tile, the product's shape, scales, and a shared expert
    "-".join(
        (name, f"{config.block_m}x{'x'.join(map(str, getattr(config, name)[:-1]))}", layout, shared)
    ): (name, config.block_m, getattr(config, name), block, shared == "shared")
    for block, layout in LAYOUTS.items()
    for config in sorted(configs_of(torch.bfloat16, is_fp8=block is not None), key=str)
    for name in KERNELS
    for shared in ("alone", "shared")
}
# Both products with either instruction, each layout of scales, with a shared expert and without.
USUAL = {
    *("gate_up-16x32x128x4x4-plain-shared", "gate_up-64x64x128x4x3-blocks-alone"),
    *("gate_up-32x64x128x4x5-rows-alone", "down-16x64x128x4x5-blocks-shared"),
    *("down-32x64x128x4x4-plain-alone", "down-128x128x64x4x3-plain-alone"),
    "down-64x64x128x4x4-rows-shared",
}


@pytest.mark.parametrize("program", kinds_first(SHIPPED, USUAL))
def test_expert_product_sm90_has_no_spills(program, tmp_path):
    name, block_m, product, block, has_shared = program
    kernel = KERNELS[name]
    inner_size = 192 if product.block_n == 64 else 384
    dtype = torch.bfloat16 if block is None else FP8
    lines = expert_mlp_launch.early_lines(dtype, block_m=block_m)
    constants = {"OVERLAPS": True} | ({"TOP_K": 2} if name == "gate_up" else lines)
    scales = None if block is None else expert_mlp_launch.ExpertScales(NONE, NONE, block)
    constants |= expert_mlp_launch.product_constants(512, inner_size, block_m, product, scales)
    types = dict.fromkeys(kernel.arg_names, "i32") | TABLES
    types |= dict.fromkeys(("x", "weight", "inner", "out"), POINTERS[torch.bfloat16])
    types |= {"router_weights": "*fp32", "scale": "constexpr" if scales is None else "*fp32"}
    types |= dict.fromkeys(("shared", "shared_scale"), "constexpr")
    if scales is not None:
        types["weight"] = "*fp8e4nv"
    if has_shared:
        types |= {"shared": types["weight"], "shared_scale": types["scale"]}
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        kernel,
        types=types,
        constants=constants,
        num_warps=product.num_warps,
        num_stages=product.num_stages,
    )
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert ("wgmma" in compiled.asm["ptx"]) == (block_m >= 64)
    assert not starts_next_first(compiled)
    asks_early = name == "down" and block_m == 16
    assert ("prefetch.global.L2" in compiled.asm["ptx"]) == asks_early
    assert "cp.async.cg" in compiled.asm["ptx"], "loads run ahead of the products"
    if scales is not None and block_m >= 64 and name == "gate_up":  # outputs of down turn in it
        assert "st.shared" not in compiled.asm["ptx"], "converted numbers stay in registers"
    # To bfloat16 over float32: the direct conversion is slower than memory.
    assert ("cvt.rn.f16x2.e4m3x2" in compiled.asm["ptx"]) == (scales is not None)
    assert "cvt.bf16.f16" not in compiled.asm["ptx"]


ONE_TOKEN = {
    f"{name}-{layout}": (name, block, has_shared)
    for name in KERNELS
    for layout, block, has_shared in (
        ("plain", None, False),
        ("blocks_shared", 128, True),
        ("rows_shared", 0, True),
    )
}


@pytest.mark.parametrize(
    "program", kinds_first(ONE_TOKEN, {"gate_up-blocks_shared", "down-plain", "down-rows_shared"})
)
def test_product_of_one_token_sm90_has_no_spills(program, tmp_path):
    name, block, has_shared = program
    kernel = getattr(expert_gemv, f"{name}_gemv_kernel")
    config, depth = {"gate_up": (expert_gemv.GATE_UP, 4096), "down": (expert_gemv.DOWN, 1408)}[name]
    constants = {"HIDDEN": 4096, "INNER": 1408, "OVERLAPS": True}
    constants |= slab_of(depth, config=config, scale_block=block or 0)
    types = dict.fromkeys(kernel.arg_names, "i32") | {"index": "*i64", "router_weights": "*fp32"}
    types |= dict.fromkeys(("x", "weight", "inner", "out"), POINTERS[torch.bfloat16])
    types |= dict.fromkeys(("scale", "shared", "shared_scale"), "constexpr")
    if block is not None:
        types |= {"weight": "*fp8e4nv", "scale": "*fp32"}
    if has_shared:
        types |= {"shared": types["weight"], "shared_scale": types["scale"]}
    types |= dict.fromkeys(constants, "constexpr")
    compiled = _compile(kernel, types=types, constants=constants, num_warps=config.num_warps)
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    first, *between, late = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert "ld.global.v4" in late, "16 bytes a load"
    assert "griddepcontrol.launch_dependents" in late
    if name == "down":  # whose experts are known before
        assert "ld.global.v4" in first
        assert not between
    else:  # programs of the shared expert branch to their weights, around the first wait
        assert "ld.global.v4" not in first
        assert "ld.global.v4" in between[0]
        assert (" bra" in first) == has_shared


SMALL = {  # kernel, constants, warps, stages
    "route": (
        expert_routing.route_kernel,
        {
            "BLOCK_M": 16,
            "PADDED_PAIRS": 1024,
            "PADDED_EXPERTS": 256,
            "PADDED_TILES": 256,
            "OVERLAPS": True,
        },
        4,
        3,
    ),
    "offset": (
        expert_routing.offset_kernel,
        {"BLOCK_M": 128, "PADDED_EXPERTS": 256, "CHUNKS_A_STEP": 16, "TILES_A_STEP": 128},
        8,
        3,
    ),
    "count": (
        expert_routing.count_kernel,
        {"PADDED_EXPERTS": 256, "CHUNK": expert_routing._CHUNK},
        4,
        3,
    ),
    "place": (
        expert_routing.place_kernel,
        {"BLOCK_M": 128, "PADDED_EXPERTS": 256, "CHUNK": expert_routing._CHUNK},
        4,
        3,
    ),
    "logits": (
        router_logits_kernel,
        {"HIDDEN": 768, "SLICES": 1, "LINE": 64, "OVERLAPS": True, **expert_router.LOGITS_BLOCKS},
        expert_router.LOGITS_WARPS,
        expert_router.LOGITS_STAGES,
    ),
    **{
        f"choice_{top_k}_of_{num_experts}": (
            router_choice_kernel,
            {
                "NORMALISES": True,
                "PARTS": 8,
                "OVERLAPS": True,
                **expert_router.choice_constants(num_experts, top_k),
            },
            4,
            3,
        )
        for num_experts, top_k in ((64, 4), (128, 8))
    },
}


@pytest.mark.parametrize("name", kinds_first(SMALL.keys(), SMALL.keys() - {"choice_4_of_64"}))
def test_routing_kernel_sm90_has_no_spills(name, tmp_path):
    kernel, constants, num_warps, num_stages = SMALL[name]
    types = dict.fromkeys(kernel.arg_names, "i32") | TABLES | {"experts": "*i64", "index": "*i64"}
    types |= dict.fromkeys(("logits", "parts", "bias", "weights"), "*fp32")
    types |= dict.fromkeys(("x", "weight"), POINTERS[torch.bfloat16])
    types |= dict.fromkeys(("scale", "least_sum"), "fp32") | dict.fromkeys(constants, "constexpr")
    compiled = _compile(
        kernel, types=types, constants=constants, num_warps=num_warps, num_stages=num_stages
    )
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    if "OVERLAPS" in constants:
        assert starts_next_first(compiled) == name.startswith("choice")
