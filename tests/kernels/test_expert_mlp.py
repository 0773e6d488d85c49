"""The mixture-of-experts MLP without a GPU: reference, routing, refused calls, one graph node."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mtp_research.kernels.bench import __main__ as bench
from mtp_research.kernels.bench import bench_experts
from mtp_research.kernels.experts import expert_mlp as expert_mlp_launch
from mtp_research.kernels.experts.expert_mlp import (
    SharedExpert,
    choose_expert_config,
    expert_mlp,
    expert_pairs,
)
from mtp_research.kernels.experts.expert_router import route_tokens
from mtp_research.kernels.experts.expert_routing import most_tiles, padded_experts, route_pairs

from tests.kernels.expert_cases import (
    check_all_on_one_expert,
    check_expert_mlp,
    check_experts_that_are_away,
    check_fp8_experts,
    check_router,
    check_shared_expert,
    check_unchosen_expert_is_not_read,
    make_fp8_operands,
    make_operands,
)

routings = st.integers(1, 9).flatmap(
    lambda num_experts: st.tuples(
        st.just(num_experts), st.lists(st.integers(0, num_experts - 1), max_size=70)
    )
)


@pytest.mark.parametrize("run", [expert_mlp, torch.compile(expert_mlp, backend="eager")])
def test_outputs_of_a_tokens_experts_are_added_up_in_float32(run, monkeypatch):
    pairs = torch.tensor([256.0] + [1.0] * 8)[None, :, None]  # bfloat16 has no 257
    for outputs, total in ((pairs.bfloat16(), 264.0), (pairs.double() + 2**-40, 264 + 9 * 2**-40)):
        monkeypatch.setattr(
            expert_mlp_launch, "expert_pairs", lambda *_, found=outputs, **__: found
        )
        torch.compiler.reset()
        assert run(*make_operands(1, dtype=outputs.dtype)).item() == total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 13])
def test_expert_mlp_by_reference_equals_its_definition(num_tokens, dtype):
    check_expert_mlp(num_tokens, dtype=dtype, backend="reference")


def test_expert_mlp_by_reference_takes_any_routing():
    check_all_on_one_expert(torch.float32, backend="reference")
    check_unchosen_expert_is_not_read(torch.float32, backend="reference", device="cpu")
    check_experts_that_are_away(13, dtype=torch.float32, backend="reference")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [32, 0], ids=["blocks", "rows"])
def test_fp8_experts_by_reference_equal_their_plain_weights(block, dtype):
    for num_tokens in (0, 1, 13):
        check_fp8_experts(num_tokens, block=block, dtype=dtype, backend="reference")


@given(routings, st.sampled_from([1, 4, 16]))
@settings(max_examples=40, deadline=None)
def test_routing_places_every_pair_once_in_a_tile_of_its_expert(routing, block_m):
    num_experts, chosen = routing
    experts = torch.tensor(chosen, dtype=torch.int64)
    tiles = route_pairs(experts, num_experts=num_experts, block_m=block_m)
    assert len(tiles.tile_group) == most_tiles(
        len(chosen), num_experts=num_experts, block_m=block_m
    )
    used = tiles.tile_group >= 0
    assert int(used.sum()) == sum(-(-chosen.count(expert) // block_m) for expert in set(chosen))
    placed = tiles.pair_index.view(-1, block_m)[used]
    assert sorted(placed[placed >= 0].tolist()) == list(range(len(chosen)))
    for expert, pairs in zip(tiles.tile_group[used].tolist(), placed.tolist(), strict=True):
        found = [pair for pair in pairs if pair >= 0]
        assert found, "a tile without a pair would stream weights for nothing"
        assert found == sorted(found)
        assert all(chosen[pair] == expert for pair in found)


def test_most_tiles_is_reached_by_the_worst_routing():
    # Nine experts with one pair, and the tenth with all others: 9 + ceil(31 / 16) = 11.
    assert most_tiles(40, num_experts=10, block_m=16) == 11
    assert most_tiles(3, num_experts=10, block_m=16) == 3
    assert most_tiles(0, num_experts=10, block_m=16) == 0


def test_histogram_has_a_bin_for_padding():
    assert [padded_experts(number) for number in (1, 5, 127, 128)] == [2, 8, 128, 256]


@pytest.mark.parametrize(
    ("num_pairs", "num_experts", "block_m"),
    [(32, 128, 16), (1024, 128, 16), (4096, 128, 64), (8192, 128, 128), (131_072, 16, 128)],
    ids=["verify", "verify_batch", "prompts", "more_prompts", "training"],
)
def test_tiles_are_small_for_few_pairs_and_wide_for_many(num_pairs, num_experts, block_m):
    config = choose_expert_config(
        num_pairs, num_experts=num_experts, inner_size=384, element_bytes=2
    )
    assert config.block_m == block_m


def test_router_by_reference_equals_its_definition():
    check_router(torch.float32, backend="reference")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 6}, "got top_k=6 and E=5"),
        ({"weight": torch.zeros(5, 7)}, r"weight must have shape \[E, H\] = \[5, 8\]"),
        ({"weight": torch.zeros(5, 8).double()}, "weight must have dtype torch.float32"),
        ({"bias": torch.zeros(5).double()}, "bias must have dtype torch.float32"),
        ({"bias": torch.zeros(4)}, r"bias must have shape \[E\] = \[5\]"),
    ],
)
def test_router_refuses_wrong_operands(change, message):
    operands = {"x": torch.zeros(2, 8), "weight": torch.zeros(5, 8), "bias": torch.zeros(5)}
    rule = {"top_k": 2, "normalises": True, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        route_tokens(**{**operands, **rule, **change})


X, GATE_UP, DOWN, INDEX, WEIGHTS = make_operands(3, dtype=torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": X[0]}, r"x must have shape \[T, H\]"),
        ({"gate_up_proj": GATE_UP.mT}, r"gate_up_proj must have shape \[E, 2I, H\]"),
        ({"down_proj": DOWN.mT}, r"down_proj must have shape \[E, H, I\]"),
        ({"down_proj": DOWN.double()}, "down_proj must have dtype torch.float32"),
        ({"top_k_index": INDEX.int()}, "top_k_index must have dtype torch.int64"),
        ({"top_k_weights": WEIGHTS[:2]}, r"top_k_weights must have shape \[T, top_k\]"),
        ({"backend": "fast"}, "backend must be one of"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_operands_are_refused(change, message):
    names = ("x", "gate_up_proj", "down_proj", "top_k_index", "top_k_weights")
    operands = dict(zip(names, (X, GATE_UP, DOWN, INDEX, WEIGHTS), strict=True))
    with pytest.raises(ValueError, match=message):
        expert_pairs(**{**operands, **change})


def test_wrong_scales_are_refused():
    operands, scales, _ = make_fp8_operands(3, block=32, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gate_up_proj must have dtype torch.float8_e4m3fn"):
        expert_pairs(X, GATE_UP, DOWN, INDEX, WEIGHTS, scales=scales)
    with pytest.raises(ValueError, match=r"down_proj_scale must have shape .* = \[5, 2, 1\]"):
        expert_pairs(*operands, scales=scales._replace(down=scales.gate_up))
    with pytest.raises(ValueError, match=r"gate_up_proj must have dtype torch\.float32"):
        expert_pairs(*operands)


def test_routing_refuses_floating_experts():
    with pytest.raises(ValueError, match=r"experts must have dtype torch.int32 or int64"):
        route_pairs(torch.zeros(3), num_experts=2, block_m=16)


def test_compiled_code_sees_one_node():
    names = []

    def count(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    compiled = torch.compile(expert_mlp, backend=count, fullgraph=True)
    operands = make_operands(4, dtype=torch.float32)
    torch.testing.assert_close(compiled(*operands), expert_mlp(*operands))
    assert sum("expert_pairs" in name for name in names) == 1


def test_bench_peer_computes_what_the_kernel_computes():
    shape = bench_experts.ExpertShape("tiny", 40, 64, 32, num_experts=5, top_k=2)
    inputs, other = bench_experts.make_inputs(shape, device="cpu")[:2]
    assert not torch.equal(inputs.top_k_index, other.top_k_index)
    expected = expert_mlp(*inputs).float()
    torch.testing.assert_close(
        bench_experts.grouped_mlp(*inputs).float(), expected, atol=4e-2, rtol=0
    )
    moved = [inputs.gate_up_proj, inputs.down_proj, inputs.x, inputs.x]
    assert shape.num_bytes(num_chosen=5) == sum(tensor.nbytes for tensor in moved)


def test_bench_peer_routes_as_the_router_does():
    x, weight, bias, _, _ = make_operands(9, dtype=torch.float32)
    weight, bias = weight[:, 0], bias[:, 0, 0]
    routed = route_tokens(x, weight, bias, top_k=2, normalises=True, scale=1.0)
    weights = bench_experts.single_router(x, weight, bias, 2)
    torch.testing.assert_close(weights.sort().values, routed.weights.sort().values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_without_device_says_so_and_exits_4(capsys):
    assert bench.main(["experts"]) == 4
    expected = "error: the kernel benchmark needs a CUDA device; none is visible.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("block", [None, 0, 16], ids=["plain", "rows", "blocks"])
def test_shared_expert_by_reference_is_one_of_the_stack(block):
    check_shared_expert(9, dtype=torch.float32, backend="reference", block=block)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": torch.zeros(24, 40)}, r"shared.gate_up must have shape .* = \[48, 40\]"),
        ({"down": torch.zeros(40, 24).double()}, "shared.down must have dtype torch.float32"),
        ({"down_scale": torch.ones(40, 1)}, "shared.down_scale must be given if and only if"),
        ({"down": torch.zeros(24, 40).mT}, "shared.down must be contiguous"),
    ],
)
def test_wrong_shared_experts_are_refused(change, message):
    shared = SharedExpert(GATE_UP[0], DOWN[0])._replace(**change)
    with pytest.raises(ValueError, match=message):
        expert_mlp(X, GATE_UP, DOWN, INDEX, WEIGHTS, shared=shared)


def test_shared_expert_does_not_go_with_experts_that_are_away():
    shared = SharedExpert(GATE_UP[0], DOWN[0])
    with pytest.raises(ValueError, match="some_are_away=True excludes shared"):
        expert_mlp(X, GATE_UP, DOWN, INDEX, WEIGHTS, shared=shared, some_are_away=True)
