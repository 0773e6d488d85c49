"""The mixture-of-experts MLP on a CUDA device: the same checks, every tile shape, graphs."""

import pytest
import torch
from mtp_research.kernels.experts import expert_routing
from mtp_research.kernels.experts.expert_mlp import expert_mlp, launch_expert_pairs

from tests.kernels.expert_cases import (
    TOLERANCES,
    check_all_on_one_expert,
    check_expert_mlp,
    check_experts_that_are_away,
    check_fp8_experts,
    check_invariant_experts,
    check_router,
    check_routing,
    check_shared_expert,
    check_unchosen_expert_is_not_read,
    configs_of,
    make_fp8_operands,
    make_operands,
    slow_expert_mlp,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 33, 300])
def test_expert_mlp_on_gpu_equals_its_definition(num_tokens, dtype):
    sizes = {"num_experts": 9, "top_k": 3, "hidden_size": 272, "inner_size": 176}
    check_expert_mlp(num_tokens, dtype=dtype, backend="triton", device="cuda", **sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_expert_mlp_on_gpu_takes_any_routing(dtype):
    check_all_on_one_expert(dtype, backend="triton", device="cuda")
    check_unchosen_expert_is_not_read(dtype, backend="triton", device="cuda")
    for num_tokens in (1, 3, 4100):  # not routed, in one launch, and in several
        check_experts_that_are_away(num_tokens, dtype=dtype, backend="triton", device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_invariant_experts_on_gpu_have_the_same_bits_in_any_batch(dtype):
    check_invariant_experts(dtype, device="cuda")


@pytest.mark.parametrize("config", sorted(configs_of(torch.bfloat16)), ids=str)
def test_every_tile_shape_on_gpu_equals_the_definition(config):
    sizes = {"num_experts": 4, "hidden_size": 384, "inner_size": 320}
    operands = make_operands(150, dtype=torch.bfloat16, device="cuda", **sizes)
    out = torch.full((150, 2, 384), torch.nan, dtype=torch.bfloat16, device="cuda")
    launch_expert_pairs(*operands, out=out, config=config)
    expected = slow_expert_mlp(*operands)
    found = out.double().sum(dim=1).cpu()
    torch.testing.assert_close(found, expected, atol=TOLERANCES[torch.bfloat16], rtol=0)


@pytest.mark.parametrize("block", [128, 0], ids=["blocks", "rows"])
@pytest.mark.parametrize("config", sorted(configs_of(torch.bfloat16, is_fp8=True)), ids=str)
def test_every_tile_shape_of_fp8_experts_on_gpu_equals_plain_weights(config, block):
    sizes = {"num_experts": 4, "hidden_size": 400, "inner_size": 320}  # blocks are cut off
    operands, scales, plain = make_fp8_operands(
        150, block=block, dtype=torch.bfloat16, device="cuda", **sizes
    )
    out = torch.full((150, 2, 400), torch.nan, dtype=torch.bfloat16, device="cuda")
    launch_expert_pairs(*operands, scales=scales, out=out, config=config)
    found = out.double().sum(dim=1).cpu()
    tolerance = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(found, slow_expert_mlp(*plain), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 33])
def test_fp8_experts_on_gpu_equal_their_plain_weights(num_tokens, dtype):
    sizes = {"num_experts": 9, "top_k": 3, "hidden_size": 272, "inner_size": 176}
    for block in (128, 0):
        check_fp8_experts(
            num_tokens, block=block, dtype=dtype, backend="triton", device="cuda", **sizes
        )


@pytest.mark.parametrize("num_experts", [1, 5, 16, 128, 257])
@pytest.mark.parametrize("num_pairs", [1, 8, 1024, 4096, 4097, 50_000])
def test_routing_on_gpu_equals_the_reference(num_pairs, num_experts):
    experts = torch.randint(num_experts, (num_pairs,), device="cuda")
    for block_m in (16, 128):
        check_routing(experts, num_experts=num_experts, block_m=block_m)
    check_routing(torch.zeros_like(experts), num_experts=num_experts, block_m=64)


@pytest.mark.parametrize("num_tokens", [4, 4000], ids=["one_launch", "three_launches"])
def test_expert_mlp_on_gpu_never_synchronises_and_replays_other_routings(num_tokens):
    assert (num_tokens * 2 > expert_routing.MAX_ONE_LAUNCH_PAIRS) == (num_tokens == 4000)
    sizes = {"num_experts": 16, "hidden_size": 256, "inner_size": 128}
    operands = make_operands(num_tokens, dtype=torch.bfloat16, device="cuda", **sizes)
    expert_mlp(*operands)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = expert_mlp(*operands)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for routing in (torch.randint_like(operands[3], 16), torch.full_like(operands[3], 7)):
        operands[3].copy_(routing)
        graph.replay()
        assert torch.equal(out, expert_mlp(*operands))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden_size"), [(77, 16, 768), (200, 64, 2048), (9, 160, 520)]
)
def test_router_on_gpu_equals_its_definition(num_tokens, num_experts, hidden_size, dtype):
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "num_tokens": num_tokens}
    check_router(dtype, backend="triton", device="cuda", **sizes)


@pytest.mark.parametrize("block", [None, 0, 128], ids=["plain", "rows", "blocks"])
@pytest.mark.parametrize("num_tokens", [1, 37, 700])
def test_shared_expert_on_gpu_is_one_of_the_stack(num_tokens, block):
    sizes = {"num_experts": 9, "hidden_size": 256, "inner_size": 128, "device": "cuda"}
    check_shared_expert(num_tokens, dtype=torch.bfloat16, backend="triton", block=block, **sizes)
