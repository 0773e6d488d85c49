"""Measure the fused mixture-of-experts MLP against grouped products in compiled PyTorch.

    python -m mtp_research.kernels.bench_experts [--json PATH] [--variants] [--shapes NAME ...]

Checks every shape against float32 first, then prints a line: time, share of the copy bandwidth by
the bytes of the experts that were chosen, TFLOP/s, and the same work as transformers' `grouped_mm`
experts compute it, compiled. `--variants` tries other tile shapes and prints the parts: routing,
gate and up, down. Timings replay CUDA graphs over other routings, and other weights where they
would stay in L2. Without a CUDA device it exits with 4.
Letters: T tokens, P pairs of a token and an expert, E experts, H hidden size, I inner size.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
from mtp_research.kernels.bench_entry import Rows, make_bench_parser, run_bench
from mtp_research.kernels.bench_expert_cases import (
    SHAPES,
    ExpertInputs,
    ExpertShape,
    compiled,
    grouped_mlp,
    make_inputs,
    single_router,
)
from mtp_research.kernels.bench_timing import time_calls
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

VARIANTS = {
    "decode": (),
    "training": (
        ExpertConfig(128, ProductConfig(128, 64, 8, 4, 8), ProductConfig(128, 64, 8, 3, 8)),
        ExpertConfig(128, ProductConfig(128, 128, 8, 2, 8), ProductConfig(128, 128, 4, 2, 8)),
        ExpertConfig(128, ProductConfig(64, 128, 4, 2, 8), ProductConfig(64, 64, 4, 4, 8)),
    ),
}
_WITH_ROUTER = {("glm45_air", 4), ("glm47_flash", 4), ("glm47_flash", 128), ("lab_base", 65_536)}
_WITH_VARIANTS = {("glm45_air", 4), ("glm45_air", 2048), ("lab_base", 65_536)}


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark and returns the exit code."""
    return run_bench(measure, make_parser(), arguments)


def make_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    parser = make_bench_parser("bench_experts")
    parser.add_argument("--variants", action="store_true", help="try other tile shapes")
    names = sorted({shape.model for shape in SHAPES})
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    return parser


def measure(ceilings: dict[str, float], options: argparse.Namespace) -> Rows:
    """Rows of every shape asked for, of its variants and its router."""
    rows: Rows = []
    for shape in SHAPES:
        if shape.model in options.shapes:
            rows += bench_shape(shape, ceilings["copy_tb_per_s"], variants=options.variants)
            if (shape.model, shape.num_tokens) in _WITH_ROUTER:
                rows.append(bench_router(shape))
            torch.cuda.empty_cache()
    return rows


def bench_shape(shape: ExpertShape, copy: float, *, variants: bool) -> list[dict[str, object]]:
    """One row, and with `variants` one for each tile shape, parts apart."""
    sets = make_inputs(shape, device="cuda")
    chosen = sum(len(inputs.top_k_index.unique()) for inputs in sets) / len(sets)
    error = error_of(sets[0])
    ours, peer = (
        time_calls([functools.partial(function, *inputs) for inputs in sets]).median_us
        for function in map(compiled, (expert_mlp, grouped_mlp))
    )
    row: dict[str, object] = {
        "shape": shape.label(),
        "experts": chosen,
        "error": error,
        "median_us": ours,
        "peer_us": peer,
        "share_of_copy": shape.num_bytes(chosen) / ours / 1e6 / copy,
        "tflop_per_s": shape.num_flops() / ours / 1e6,
    }
    print(
        f"{shape.label():<46}{chosen:6.1f} experts  error {error:7.1e}  {ours:8.1f} us "
        f"{row['share_of_copy']:6.1%} of copy {row['tflop_per_s']:6.1f} TFLOP/s  "
        f"peer {peer:8.1f} us {peer / ours:5.2f}x",
        flush=True,
    )
    if not variants or (shape.model, shape.num_tokens) not in _WITH_VARIANTS:
        return [row]
    chosen_config = choose_expert_config(
        shape.num_tokens * shape.top_k,
        num_experts=shape.num_experts,
        inner_size=shape.inner_size,
        element_bytes=2,
    )
    kind = "training" if shape.num_tokens > 1024 else "decode"
    return [row, *(time_parts(sets, config) for config in (chosen_config, *VARIANTS[kind]))]


def bench_router(shape: ExpertShape) -> dict[str, object]:
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


def time_parts(sets: list[ExpertInputs], config: ExpertConfig) -> dict[str, object]:
    """Times of routing and of both products of one tile shape, each by itself."""
    routed = [
        route_pairs(s.top_k_index.view(-1), num_experts=len(s.down_proj), block_m=config.block_m)
        for s in sets
    ]
    pairs = list(zip(sets, routed, strict=True))
    inner = [
        launch_gate_up(s.x, s.gate_up_proj, tiles=r, top_k=s.top_k_index.shape[1], config=config)
        for s, r in pairs
    ]
    out = sets[0].x.new_empty(*sets[0].top_k_index.shape, sets[0].x.shape[1])
    calls = {
        "route": [
            lambda s=s: route_pairs(
                s.top_k_index.view(-1), num_experts=len(s.down_proj), block_m=config.block_m
            )
            for s in sets
        ],
        "gate_up": [
            lambda s=s, r=r: launch_gate_up(
                s.x, s.gate_up_proj, tiles=r, top_k=s.top_k_index.shape[1], config=config
            )
            for s, r in pairs
        ],
        "down": [
            lambda s=s, r=r, i=i: launch_down(
                i, s.down_proj, s.top_k_weights.view(-1), tiles=r, out=out, config=config
            )
            for (s, r), i in zip(pairs, inner, strict=True)
        ],
        "sum": [lambda: out.sum(dim=1)] * 4,
    }
    row: dict[str, object] = {"config": config}
    for name, part in calls.items():
        row[name] = time_calls(part).median_us
    parts = "  ".join(f"{name} {row[name]:7.1f} us" for name in calls)
    print(
        f"    M {config.block_m:<4}{tuple(config.gate_up)} {tuple(config.down)}  {parts}",
        flush=True,
    )
    return row


def error_of(inputs: ExpertInputs) -> float:
    """Largest error of ours relative to the largest output, in float32; refuses a wrong kernel."""
    x, *rest = inputs
    expected = expert_pairs_ref(x.float(), *rest).sum(dim=1)
    error = (expert_mlp(*inputs).float() - expected).abs().max() / expected.abs().max()
    assert error < 2e-2, f"the kernel's outputs differ from float32 by {error:.3f}"
    return float(error)


if __name__ == "__main__":
    sys.exit(main())
