"""The fused mixture-of-experts MLP and its router against the same work in compiled PyTorch.

Where it sits: the benchmark `experts` of `kernels.bench`. Every shape is checked against float32
first; then a line: time, share of the copy bandwidth by the bytes of the chosen experts, TFLOP/s,
and transformers' `grouped_mm` experts, compiled. `--variants` tries other tile shapes and prints
the parts. Timings go over other routings, and other weights where they would stay in L2.
Letters: T tokens, P pairs of a token and an expert, E experts, H hidden size, I inner size.
"""

import argparse
import functools
from typing import NamedTuple

import torch
from mtp_research.kernels.bench.bench_runner import Bench, Row, Rows, compiled, show_row, time_calls
from mtp_research.kernels.experts.expert_mlp import (
    ExpertConfig,
    ProductConfig,
    choose_expert_config,
    expert_mlp,
    expert_pairs_ref,
    launch_down,
    launch_gate_up,
)
from mtp_research.kernels.experts.expert_router import (
    choose_experts_ref,
    route_tokens,
    router_logits_ref,
)
from mtp_research.kernels.experts.expert_routing import route_pairs
from mtp_research.kernels.products.invariant_matmul import PairTiles
from torch import Tensor
from torch.nn import functional

_ROTATED_BYTES = 256 * 2**20
_NUM_ROUTINGS = 8


class ExpertShape(NamedTuple):
    """One line of the table: T tokens in an expert layer of E experts `[2I, H]` and `[H, I]`."""

    model: str
    num_tokens: int
    hidden_size: int
    inner_size: int
    num_experts: int
    top_k: int

    def label(self) -> str:
        """The shape as the table prints it."""
        sizes = f"h {self.hidden_size} {self.num_experts}x{self.inner_size} top {self.top_k}"
        return f"{self.model} T={self.num_tokens} {sizes}"

    def num_flops(self) -> int:
        """Operations of both products."""
        return 6 * self.num_tokens * self.top_k * self.hidden_size * self.inner_size

    def num_bytes(self, num_chosen: float) -> float:
        """Bytes of the weights of `num_chosen` experts, of the rows read and of those written."""
        expert = 3 * self.hidden_size * self.inner_size
        return 2 * (num_chosen * expert + 2 * self.num_tokens * self.hidden_size)


SHAPES = (
    *(ExpertShape("glm45_air", count, 4096, 1408, 128, 8) for count in (1, 4, 32, 128, 512, 2048)),
    *(ExpertShape("glm47_flash", count, 2048, 1536, 64, 4) for count in (4, 128)),
    ExpertShape("lab_base", 65_536, 768, 384, 16, 2),
    ExpertShape("lab_small", 65_536, 512, 192, 16, 2),
)
# Other tile shapes, tried for many rows; for few the choice itself is timed alone.
TRAINING_VARIANTS = (
    ExpertConfig(128, ProductConfig(128, 64, 8, 4, 8), ProductConfig(128, 64, 8, 3, 8)),
    ExpertConfig(128, ProductConfig(128, 128, 8, 2, 8), ProductConfig(128, 128, 4, 2, 8)),
    ExpertConfig(128, ProductConfig(64, 128, 4, 2, 8), ProductConfig(64, 64, 4, 4, 8)),
)
_WITH_ROUTER = {("glm45_air", 4), ("glm47_flash", 4), ("glm47_flash", 128), ("lab_base", 65_536)}
_WITH_VARIANTS = {("glm45_air", 4), ("glm45_air", 2048), ("lab_base", 65_536)}


def measure_experts(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """Rows of every shape asked for, of its variants and its router."""
    rows: Rows = []
    for shape in SHAPES:
        if shape.model in options.shapes:
            rows += bench_shape(shape, ceilings["copy_tb_per_s"], variants=options.variants)
            if shape[:2] in _WITH_ROUTER:
                rows.append(bench_router(shape))
            torch.cuda.empty_cache()
    return rows


def _add_experts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", action="store_true", help="try other tile shapes")
    names = sorted({shape.model for shape in SHAPES})
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)


EXPERTS = Bench(measure_experts, _add_experts_options)


def bench_shape(shape: ExpertShape, copy: float, *, variants: bool) -> Rows:
    """One row, and with `variants` one for each tile shape, parts apart."""
    sets = make_inputs(shape, device="cuda")
    chosen = sum(len(inputs.top_k_index.unique()) for inputs in sets) / len(sets)
    row: Row = {"kernel": "expert_mlp", "shape": shape.label(), "bytes": shape.num_bytes(chosen)}
    row |= {"experts": chosen, "error": error_of(sets[0])}
    ours, peer = (
        time_calls([functools.partial(function, *inputs) for inputs in sets])
        for function in map(compiled, (expert_mlp, grouped_mlp))
    )
    show_row(row, ours, peer, copy=copy, num_flops=shape.num_flops())
    print(f"    {chosen:.1f} experts, error {row['error']:.1e}", flush=True)
    if not variants or shape[:2] not in _WITH_VARIANTS:
        return [row]
    sizes = {"num_experts": shape.num_experts, "inner_size": shape.inner_size}
    chosen_config = choose_expert_config(shape.num_tokens * shape.top_k, **sizes, element_bytes=2)
    others = TRAINING_VARIANTS if shape.num_tokens > 1024 else ()
    return [row, *(time_parts(sets, config) for config in (chosen_config, *others))]


def bench_router(shape: ExpertShape) -> Row:
    """One row: the router of the layer, and the same as single calls, compiled."""
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(shape.num_experts, shape.hidden_size, **options) / shape.hidden_size**0.5
    bias = torch.randn(shape.num_experts, device="cuda") / 10
    sets = [torch.randn(shape.num_tokens, shape.hidden_size, **options) for _ in range(4)]
    rule = {"top_k": shape.top_k, "normalises": True, "scale": 1.0}
    logits = router_logits_ref(sets[0], weight)
    expected = choose_experts_ref(logits, bias, **rule).index
    found = route_tokens(sets[0], weight, bias, **rule)
    torch.testing.assert_close(found.logits, logits, atol=1e-4, rtol=1e-4)
    others = (found.index.sort().values != expected.sort().values).any(dim=1).float().mean()
    ours = time_calls([lambda x=x: route_tokens(x, weight, bias, **rule) for x in sets]).median_us
    calls = compiled(single_router)
    peer = time_calls([lambda x=x: calls(x, weight, bias, shape.top_k) for x in sets]).median_us
    print(
        f"    router: {others:.2%} tokens with other experts than float32  {ours:8.1f} us  "
        f"peer {peer:8.1f} us {peer / ours:5.2f}x",
        flush=True,
    )
    return {"shape": shape.label(), "router_us": ours, "router_peer_us": peer}


class ExpertInputs(NamedTuple):
    """Arguments of `expert_mlp`."""

    x: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


def make_inputs(shape: ExpertShape, *, device: str) -> list[ExpertInputs]:
    """Inputs with other routings each, and other weights where a few would stay in L2."""
    num_experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.inner_size
    weight_bytes = 6 * num_experts * hidden * inner
    num_weights = max(1, min(_NUM_ROUTINGS, _ROTATED_BYTES // weight_bytes))
    options = {"device": device, "dtype": torch.bfloat16}
    sizes = ((2 * inner, hidden), (hidden, inner))
    weights = [
        [torch.randn(num_experts, *size, **options).mul_(size[1] ** -0.5) for size in sizes]
        for _ in range(num_weights)
    ]
    found = []
    for index in range(_NUM_ROUTINGS):
        scores = torch.rand(shape.num_tokens, num_experts, device=device)
        best = scores.topk(shape.top_k, dim=-1)
        share = best.values / best.values.sum(dim=-1, keepdim=True)
        x = torch.randn(shape.num_tokens, hidden, **options)
        found.append(ExpertInputs(x, *weights[index % num_weights], best.indices, share))
    return found


def time_parts(sets: list[ExpertInputs], config: ExpertConfig) -> Row:
    """Times of routing and of both products of one tile shape, each by itself."""

    def route(s: ExpertInputs) -> PairTiles:
        index, num_experts = s.top_k_index.view(-1), len(s.down_proj)
        return route_pairs(index, num_experts=num_experts, block_m=config.block_m)

    def gate_up(s: ExpertInputs, tiles: PairTiles) -> Tensor:
        top_k = s.top_k_index.shape[1]
        return launch_gate_up(s.x, s.gate_up_proj, tiles=tiles, top_k=top_k, config=config)

    routed = [route(s) for s in sets]
    pairs = list(zip(sets, routed, strict=True))
    inner = [gate_up(s, r) for s, r in pairs]
    out = sets[0].x.new_empty(*sets[0].top_k_index.shape, sets[0].x.shape[1])
    calls = {
        "route": [lambda s=s: route(s) for s in sets],
        "gate_up": [lambda s=s, r=r: gate_up(s, r) for s, r in pairs],
        "down": [
            lambda s=s, r=r, i=i: launch_down(
                i, s.down_proj, s.top_k_weights.view(-1), tiles=r, out=out, config=config
            )
            for (s, r), i in zip(pairs, inner, strict=True)
        ],
        "sum": [lambda: out.sum(dim=1)] * 4,
    }
    times = {name: time_calls(part).median_us for name, part in calls.items()}
    parts = "  ".join(f"{name} {us:7.1f} us" for name, us in times.items())
    tiles = f"M {config.block_m:<4}{tuple(config.gate_up)} {tuple(config.down)}"
    print(f"    {tiles}  {parts}", flush=True)
    return {"config": config, **times}


def error_of(inputs: ExpertInputs) -> float:
    """Largest error of ours relative to the largest output, in float32; refuses a wrong kernel."""
    x, *rest = inputs
    expected = expert_pairs_ref(x.float(), *rest).sum(dim=1)
    error = (expert_mlp(*inputs).float() - expected).abs().max() / expected.abs().max()
    assert error < 2e-2, f"the kernel's outputs differ from float32 by {error:.3f}"
    return float(error)


def grouped_mlp(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The peer: sort, gather, PyTorch's grouped products, and back, as transformers does."""
    num_experts, top_k = len(down_proj), top_k_index.shape[1]
    experts, order = torch.sort(top_k_index.flatten())
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=x.device), right=True)
    rows = x[order // top_k]
    gate, up = functional.grouped_mm(rows, gate_up_proj.mT, offs=ends.int()).chunk(2, dim=-1)
    outputs = functional.grouped_mm(functional.silu(gate) * up, down_proj.mT, offs=ends.int())
    weighted = outputs * top_k_weights.flatten()[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return weighted[back].view(*top_k_index.shape, -1).sum(dim=1).to(x.dtype)


def single_router(x: Tensor, weight: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """The router's peer: one group, its two top-k of groups included, as transformers calls it."""
    scores = functional.linear(x.float(), weight.float()).sigmoid()
    choice = scores + bias
    group_score = choice[:, None].topk(2, dim=-1).values.sum(dim=-1)
    group = group_score.topk(1, dim=-1, sorted=False).indices
    is_in_group = torch.zeros_like(group_score).scatter(1, group, 1).bool()
    index = choice.masked_fill(~is_in_group, -torch.inf).topk(top_k, dim=-1, sorted=False).indices
    weights = scores.gather(1, index)
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
