"""Shapes: those of lab targets, and of FP8 releases, whose weights are drawn as FP8."""

import pytest
import torch
from mtp_research.kernels.products.scaled_weights import FP8

from mtp_research.app.cli import compose_config
from mtp_research.bench.bench_row import evenly_used, step_bytes
from mtp_research.bench.shapes import SHAPES, random_target
from mtp_research.config.schema import TrainConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from tests.decode.loops import small_pool


@pytest.mark.parametrize("name", ["lab_base", "lab_small"])
def test_lab_shapes_are_the_configured_ones(name: str) -> None:
    model = compose_config(TrainConfig, ["task=target", f"model={name}"]).model
    sizes = dict(model.architecture, vocab_size=model.pretrain.vocab_size)
    assert SHAPES[name].arguments == sizes


def test_fp8_shape_is_its_plain_one_with_a_byte_a_number() -> None:
    """The limit of a step counts the bytes of FP8 experts that are used, and of their scales."""
    targets = [
        random_target(name, dtype=torch.bfloat16, device=torch.device("cpu"))
        for name in ("tiny_experts_fp8", "tiny_experts")
    ]
    sizes = [{n: p.shape for n, p in t.model.named_parameters()} for t in targets]
    assert {name: sizes[0][name] for name in sizes[1]} == sizes[1]
    stack = targets[0].model.get_submodule("model.layers.1.mlp.experts")
    assert stack.gate_up_proj.dtype == FP8
    found = []
    for target in targets:
        spec = SpecSettings(num_speculative_tokens=0)
        decoder = SpecDecoder(target, spec=spec, engine=small_pool(64))
        used = evenly_used(target.model, num_rows=3, top_k=2)
        found.append(step_bytes(decoder, None, num_tokens=0, used=used).target_weights)
    (share,) = {part.share for part in used.values()}
    numbers = sum(p.numel() for p in targets[0].model.parameters() if p.dtype == FP8)
    experts = stack.gate_up_proj.numel() + stack.down_proj.numel()
    scales = sum(p.nbytes for n, p in targets[0].model.named_parameters() if "scale" in n)
    of_experts = stack.gate_up_proj_scale.nbytes + stack.down_proj_scale.nbytes
    read = numbers - experts + scales - of_experts + share * (experts + of_experts)
    plain = 2 * (numbers - experts + share * experts)
    assert found[1] - found[0] == pytest.approx(plain - read, abs=8)
