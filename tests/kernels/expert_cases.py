"""Checks of the mixture-of-experts MLP, shared by the reference, interpreter and GPU runs."""

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.experts import expert_mlp as expert_mlp_launch
from mtp_research.kernels.experts.expert_mlp import (
    ExpertScales,
    SharedExpert,
    expert_mlp,
    expert_pairs,
)
from mtp_research.kernels.experts.expert_router import route_tokens
from mtp_research.kernels.experts.expert_routing import route_pairs, route_pairs_ref
from mtp_research.kernels.products.scaled_weights import dequantise
from torch import Tensor

from tests.kernels.few_rows_cases import draw_fp8

TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 8e-2,
}


def make_operands(
    num_tokens: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    num_experts: int = 5,
    top_k: int = 2,
    hidden_size: int = 40,
    inner_size: int = 24,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Fresh inputs of `expert_mlp`; the last expert is chosen by no token."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = randn(num_tokens, hidden_size)
    gate_up = randn(num_experts, 2 * inner_size, hidden_size) / hidden_size**0.5
    down = randn(num_experts, hidden_size, inner_size) / inner_size**0.5
    scores = torch.rand(num_tokens, max(num_experts - 1, 1), generator=generator)
    index = scores.topk(min(top_k, scores.shape[1]), dim=-1).indices.to(device)
    weights = torch.rand(index.shape, generator=generator).to(device)
    return *(tensor.to(dtype).to(device) for tensor in (x, gate_up, down)), index, weights


def slow_expert_mlp(
    x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """The definition, one pair at a time, in float64 on the CPU."""
    x, gate_up, down, weights = (t.double().cpu() for t in (x, gate_up, down, weights))
    out = torch.zeros_like(x)
    inner_size = down.shape[2]
    for token, choices in enumerate(index.tolist()):
        for choice, expert in enumerate(choices):
            gate = gate_up[expert, :inner_size] @ x[token]
            up = gate_up[expert, inner_size:] @ x[token]
            inner = gate / (1 + torch.exp(-gate)) * up
            out[token] += weights[token, choice] * (down[expert] @ inner)
    return out


def check_expert_mlp(
    num_tokens: int, *, dtype: torch.dtype, backend: str, device: str = "cpu", **sizes: int
) -> None:
    """Values against the definition; twice the same bits; rows of a larger tensor."""
    operands = make_operands(num_tokens, dtype=dtype, device=device, **sizes)
    out = expert_mlp(*operands, backend=backend)
    expected = slow_expert_mlp(*operands)
    torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCES[dtype], rtol=0)
    assert torch.equal(expert_mlp(*operands, backend=backend), out), "other bits when run again"
    x, *rest = operands
    wide = torch.cat((x, torch.full_like(x, torch.nan)), dim=1)[:, : x.shape[1]]
    assert torch.equal(expert_mlp(wide, *rest, backend=backend), out), "other bits from a view"


def make_fp8_operands(
    num_tokens: int, *, block: int, dtype: torch.dtype, device: str = "cpu", **sizes: int
) -> tuple[tuple[Tensor, ...], ExpertScales, tuple[Tensor, ...]]:
    """Inputs with FP8 weights, their scales, and the same inputs with plain weights in float64."""
    x, *weights, index, shares = make_operands(num_tokens, dtype=dtype, device=device, **sizes)
    generator = torch.Generator().manual_seed(1)
    drawn, plain = [], []
    for weight, num_parts in zip(weights, (2, 1), strict=True):
        shape = tuple(weight.shape)
        found = draw_fp8(shape, block=block, generator=generator, num_parts=num_parts)
        parts = (tensor.unflatten(1, (num_parts, -1)) for tensor in found)
        plain.append(dequantise(*parts, block=block, dtype=torch.float64).flatten(1, 2))
        drawn.append([tensor.to(device) for tensor in found])
    (gate_up, gate_up_scale), (down, down_scale) = drawn
    scales = ExpertScales(gate_up_scale, down_scale, block)
    return (x, gate_up, down, index, shares), scales, (x, *plain, index, shares)


def check_fp8_experts(
    num_tokens: int,
    *,
    block: int,
    dtype: torch.dtype,
    backend: str,
    device: str = "cpu",
    **sizes: int,
) -> None:
    """Values against plain weights; NaN scales of an expert that no token chose change nothing."""
    operands, scales, plain = make_fp8_operands(
        num_tokens, block=block, dtype=dtype, device=device, **sizes
    )
    out = expert_mlp(*operands, scales=scales, backend=backend)
    expected = slow_expert_mlp(*plain)
    torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCES[dtype], rtol=0)
    scales.gate_up[-1] = scales.down[-1] = torch.nan
    assert torch.equal(expert_mlp(*operands, scales=scales, backend=backend), out)


def check_shared_expert(
    num_tokens: int,
    *,
    dtype: torch.dtype,
    backend: str,
    block: int | None = None,
    device: str = "cpu",
    **sizes: int,
) -> None:
    """A shared expert that lies apart gives what the last of one stack does, to the bit."""
    how = {"dtype": dtype, "device": device, **sizes}
    scales = None
    if block is None:
        operands = make_operands(num_tokens, **how)
    else:
        operands, scales, _ = make_fp8_operands(num_tokens, block=block, **how)
    x, gate_up, down, index, weights = operands
    last = len(down) - 1
    index = torch.cat((index, torch.full_like(index[:, :1], last)), dim=1)
    weights = torch.cat((weights, torch.ones_like(weights[:, :1])), dim=1)
    expected = expert_mlp(x, gate_up, down, index, weights, scales=scales, backend=backend)
    apart = [tensor[last].clone() for tensor in (gate_up, down, *(scales or ())[:2])]
    others = [tensor[:last] for tensor in (gate_up, down)]
    if scales is not None:
        scales = ExpertScales(scales.gate_up[:last], scales.down[:last], scales.block)
    shared = SharedExpert(*apart)
    found = expert_mlp(x, *others, index, weights, scales=scales, shared=shared, backend=backend)
    assert torch.equal(found, expected)


def check_experts_that_are_away(
    num_tokens: int, *, dtype: torch.dtype, backend: str, device: str = "cpu"
) -> None:
    """Two calls with two and three of five experts add up to all."""
    x, gate_up, down, index, weights = make_operands(num_tokens, dtype=dtype, device=device)
    expected = slow_expert_mlp(x, gate_up, down, index, weights)
    total = torch.zeros_like(expected)
    for first, end in ((0, 2), (2, 5)):
        is_away = (index < first) | (index >= end)
        own = (index - first).masked_fill(is_away, end - first)
        operands = (x, gate_up[first:end], down[first:end], own, weights)
        total += expert_mlp(*operands, some_are_away=True, backend=backend).double().cpu()
    torch.testing.assert_close(total, expected, atol=2 * TOLERANCES[dtype], rtol=0)


def check_all_on_one_expert(dtype: torch.dtype, *, backend: str, device: str = "cpu") -> None:
    """More pairs than a tile holds go to one expert, both choices of a token."""
    x, gate_up, down, index, weights = make_operands(37, dtype=dtype, device=device)
    operands = (x, gate_up, down, torch.full_like(index, 3), weights)
    pairs = expert_pairs(*operands, backend=backend)
    assert not pairs.isnan().any()
    out = expert_mlp(*operands, backend=backend).double().cpu()
    torch.testing.assert_close(out, slow_expert_mlp(*operands), atol=TOLERANCES[dtype], rtol=0)


def check_invariant_experts(dtype: torch.dtype, *, device: str) -> None:
    """Pairs have the bits they have alone, where the usual launch takes another tile shape."""
    operands = make_operands(300, dtype=dtype, device=device)
    tensors = operands[:1], operands[1:3], operands[3:]
    whole = expert_pairs(*operands, backend=checks.INVARIANT)
    expected = slow_expert_mlp(*operands)
    torch.testing.assert_close(
        whole.double().sum(dim=1).cpu(), expected, atol=TOLERANCES[dtype], rtol=0
    )
    for num_tokens in (1, 2, 3, 33, 150):
        x, weights, chosen = tensors
        few = (*(t[-num_tokens:] for t in x), *weights, *(t[-num_tokens:] for t in chosen))
        found = expert_pairs(*few, backend=checks.INVARIANT)
        assert torch.equal(found, whole[-num_tokens:]), f"other bits for T={num_tokens}"


def check_unchosen_expert_is_not_read(dtype: torch.dtype, *, backend: str, device: str) -> None:
    """NaN weights of an expert that no token chose change nothing."""
    operands = make_operands(9, dtype=dtype, device=device)
    expected = expert_mlp(*operands, backend=backend)
    operands[1][-1] = operands[2][-1] = torch.nan
    assert torch.equal(expert_mlp(*operands, backend=backend), expected)


def check_routing(experts: Tensor, *, num_experts: int, block_m: int) -> None:
    """The kernels' tiles are the reference's; pairs of spare tiles are undefined."""
    arguments = {"num_experts": num_experts, "block_m": block_m}
    tiles = route_pairs(experts, **arguments, backend="triton")
    expected = route_pairs_ref(experts.cpu(), **arguments)
    assert torch.equal(tiles.tile_group.cpu(), expected.tile_group)
    used = expected.tile_group >= 0
    pairs, expected_pairs = (
        found.pair_index.cpu().view(-1, block_m)[used] for found in (tiles, expected)
    )
    assert torch.equal(pairs, expected_pairs)


def configs_of(dtype: torch.dtype, *, is_fp8: bool = False) -> set[expert_mlp_launch.ExpertConfig]:
    """Every tile shape that `choose_expert_config` gives for the sizes in our tables."""
    sizes = [(128, 1408), (64, 1536), (16, 384), (16, 192)]
    return {
        expert_mlp_launch.choose_expert_config(
            num_pairs,
            num_experts=num_experts,
            inner_size=inner_size,
            element_bytes=dtype.itemsize,
            is_fp8=is_fp8,
        )
        for num_experts, inner_size in sizes
        for num_pairs in (8, 32, 1024, 2048, 4096, 8192, 131_072)
    }


def check_router(
    dtype: torch.dtype,
    *,
    backend: str,
    device: str = "cpu",
    num_tokens: int = 19,
    num_experts: int = 37,
    hidden_size: int = 300,
    top_k: int = 5,
) -> None:
    """Logits and choice against float64, ties, and the same bits in any batch."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = randn(num_tokens, hidden_size).to(dtype).to(device)
    weight = (randn(num_experts, hidden_size) / hidden_size**0.5).to(dtype).to(device)
    bias = (randn(num_experts) / 10).to(device)
    for normalises in (True, False):
        rule = {"top_k": top_k, "normalises": normalises, "scale": 1.8, "backend": backend}
        routed = route_tokens(x, weight, bias, **rule)
        logits = x.double() @ weight.double().mT
        torch.testing.assert_close(routed.logits.double(), logits, atol=5e-5, rtol=0)
        scores = routed.logits.sigmoid()
        best = (scores + bias).topk(top_k, dim=-1).indices
        assert torch.equal(routed.index.sort().values, best.sort().values)
        expected = scores.gather(1, routed.index)
        expected = expected / expected.sum(dim=-1, keepdim=True) if normalises else expected
        torch.testing.assert_close(routed.weights, 1.8 * expected, atol=1e-6, rtol=1e-5)
        alone = route_tokens(x[3:4], weight, bias, **rule)
        for whole, part in zip(routed, alone, strict=True):
            assert backend == "reference" or torch.equal(whole[3:4], part), "other bits alone"
    rule = {"top_k": top_k, "normalises": True, "scale": 1.8, "backend": backend}
    routed, shared = (
        route_tokens(x, weight, bias, **rule, has_shared=has) for has in (False, True)
    )
    assert torch.equal(shared.index[:, :-1], routed.index)
    assert torch.equal(shared.weights[:, :-1], routed.weights)
    assert set(shared.index[:, -1].tolist()) == {num_experts}
    assert set(shared.weights[:, -1].tolist()) == {1.0}
    tied = route_tokens(x, torch.zeros_like(weight), torch.zeros_like(bias), **rule)
    assert torch.equal(tied.index, torch.arange(top_k, device=device).expand(num_tokens, -1))
