"""Layers of steps on a CPU: the library's numbers, only where asked, and taken back."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from mtp_research import EngineConfig, SpecDecoder, SpecSettings, load_target
from mtp_research.heads.weights import load_heads
from mtp_research.models.experts import expert_stacks
from mtp_research.models.rewrites import cpu_layers
from mtp_research.models.rewrites.cpu_layers import (
    EXPERTS_NAME,
    MAX_ROWS,
    FewRowsLinear,
    FusedNorm,
    fuse_norms,
    join_experts,
    order_weights,
)
from mtp_research.models.target import target_hashes
from mtp_research.runtime.provenance import REPOSITORY_ROOT
from tests.tiny import tiny_target

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")
TARGET = str(REPOSITORY_ROOT / "assets" / "lab_tiny" / "target")


def frozen(num_outputs, depth, *, bias=False, dtype=torch.float32):
    return nn.Linear(depth, num_outputs, bias=bias, dtype=dtype).requires_grad_(False)


def left_of(model):
    return {name for name, module in model.named_modules() if type(module) is FewRowsLinear}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.parametrize("sizes", [(640, 256), (256, 640)])
def test_output_is_the_librarys(sizes, num_rows, bias):
    torch.manual_seed(0)
    linear = frozen(*sizes, bias=bias)
    x = torch.randn(1, num_rows, sizes[1])
    expected = linear(x)
    assert order_weights([linear], enabled=True) == 1
    with torch.inference_mode():
        output = linear(x)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert output.is_contiguous()


def test_few_rows_are_computed_with_the_weight_left(monkeypatch):
    linear = frozen(640, 256)
    order_weights([linear], enabled=True)
    seen = []
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *of: seen.append(of[1].shape) or product(*of))
    with torch.inference_mode():
        for num_rows in (1, 2, MAX_ROWS, MAX_ROWS + 1):
            linear(torch.randn(num_rows, 256))
    assert seen == [(256, 2), (256, 2), (256, MAX_ROWS)]  # one row doubled, too many left alone


@pytest.mark.parametrize(
    "linear",
    [
        frozen(640, 128),  # too small
        frozen(640, 2048),  # too deep
        frozen(640, 256, dtype=torch.float64),
        nn.Linear(256, 640, bias=False),  # trained
    ],
    ids=["small", "deep", "float64", "trained"],
)
def test_others_are_left_alone(linear):
    assert order_weights([linear], enabled=True) == 0
    assert type(linear) is nn.Linear


def test_smaller_weights_go_left_in_a_model_that_leaves_the_cache():
    small = frozen(256, 224)
    assert order_weights([small], enabled=True) == 0
    assert order_weights([small, frozen(1024, 1024)], enabled=True) == 2
    assert order_weights([small, frozen(64, 64)], enabled=True) == 0  # as of these models


def test_weights_of_few_inputs_lie_by_columns_in_a_model_that_leaves_the_cache():
    torch.manual_seed(0)
    read = frozen(1024, 1024)
    for linear in (frozen(448, 128), frozen(64, 128, bias=True)):
        x = torch.randn(1, 8, 128)
        expected, weight = linear(x), linear.weight.clone()
        order_weights([linear, read], enabled=True)
        assert linear.weight.t().is_contiguous()
        assert type(linear) is nn.Linear
        assert torch.equal(linear.weight, weight)
        torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
        order_weights([linear, read], enabled=False)
        assert linear.weight.is_contiguous()
        assert torch.equal(linear.weight, weight)
    for linear in (frozen(448, 160), frozen(448, 128).double(), nn.Linear(128, 448)):
        order_weights([linear, read], enabled=True)
        assert linear.weight.is_contiguous()
    small = frozen(448, 128)
    order_weights([small, read], enabled=True)
    order_weights([small], enabled=True)
    assert small.weight.is_contiguous()  # of a model that stays in the cache


def test_weights_that_lie_by_columns_are_written_and_read(tmp_path):
    target = load_target(str(REPOSITORY_ROOT / "assets" / "lab_deep" / "target"), dtype="float32")
    folder = REPOSITORY_ROOT / "assets" / "lab_deep" / "heads" / "chain_n3"
    heads = load_heads(folder, target)
    before = {name: part.clone() for name, part in heads.state_dict().items()}
    hashes = target_hashes(target)
    SpecDecoder(target, heads, spec=SpecSettings(), engine=EngineConfig(max_num_requests=1))
    projections = {name: part for name, part in heads.named_parameters() if "q_proj" in name}
    assert projections
    assert not any(part.is_contiguous() for part in projections.values())
    again = load_heads(heads.save_pretrained(tmp_path), target)
    assert all(torch.equal(part, before[name]) for name, part in again.state_dict().items())
    assert target_hashes(target) == hashes


def norm_with(kind, *, size=48):
    norm = kind(size, eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    norm.weight.data = torch.randn(size, generator=generator)
    return norm.requires_grad_(False)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16])
def test_norm_of_fewer_calls_is_the_librarys(num_rows, scale):
    norm = norm_with(LlamaRMSNorm)
    x = torch.randn(1, num_rows, 48, generator=torch.Generator().manual_seed(2)) * scale
    expected = norm(x)
    assert fuse_norms([norm], enabled=True) == 1
    with torch.inference_mode():
        output = norm(x)
        one_by_one = [norm(row) for row in x[0]]
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-6)
    assert all(map(torch.equal, one_by_one, output[0]))  # whatever rows are beside it
    assert fuse_norms([norm], enabled=False) == 0
    assert type(norm) is LlamaRMSNorm


def test_fused_norm_calls_fewer_and_only_without_gradients(monkeypatch):
    norm = norm_with(LlamaRMSNorm)
    x = torch.randn(3, 48)
    fuse_norms([norm], enabled=True)
    calls = []
    monkeypatch.setattr(cpu_layers, "_rms_norm", lambda *of: calls.append(of) or of[1])
    with torch.no_grad():
        norm(x)
        norm(x.double())
        assert len(calls) == 1
    norm(x)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "norm",
    [
        norm_with(Gemma3RMSNorm),  # (1 + weight)
        norm_with(Qwen3NextRMSNorm),  # likewise
        norm_with(Qwen3NextRMSNormGated),
        norm_with(LlamaRMSNorm).double(),
        norm_with(LlamaRMSNorm).requires_grad_(True),
        nn.LayerNorm(48).requires_grad_(False),
    ],
    ids=["gemma", "qwen3_next", "gated", "float64", "trained", "layer_norm"],
)
def test_other_norms_are_left_alone(norm):
    kind = type(norm)
    assert fuse_norms([norm], enabled=True) == 0
    assert type(norm) is kind


def test_norm_that_only_looks_like_one_is_left_alone():
    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) + hidden_states / self.weight.abs().clamp(min=1)

    assert fuse_norms([norm_with(ShiftedRMSNorm)], enabled=True) == 0


def test_files_and_copies_of_a_fused_norm():
    norm = norm_with(LlamaRMSNorm)
    fuse_norms([norm], enabled=True)
    for other in (pickle.loads(pickle.dumps(norm)), copy.deepcopy(norm)):
        assert type(other) is LlamaRMSNorm
        assert torch.equal(other.weight, norm.weight)
    assert type(norm)(7).weight.shape == (7,)  # modules of a head are made from the class


@pytest.mark.parametrize("num_rows", [1, 3, 64, 65])
def test_all_experts_are_the_librarys_loop(num_rows):
    target = tiny_target("glm4_moe", dtype=torch.float32)
    stack = expert_stacks(target.model)[0]
    generator = torch.Generator().manual_seed(3)
    num_experts, hidden_size, _ = stack.down_proj.shape
    x = torch.randn(num_rows, hidden_size, generator=generator)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    weights, index = scores.topk(2, dim=-1)
    expected = stack(x, index, weights)
    assert join_experts([target.model], enabled=True) == len(expert_stacks(target.model))
    with torch.inference_mode():
        output = stack(x, index, weights)
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(stack(x, index, weights), expected)  # where gradients may be asked for
    assert join_experts([target.model], enabled=False) == 0
    assert stack.config._experts_implementation == "eager"


def test_large_experts_and_other_dtypes_keep_the_loop(monkeypatch):
    assert join_experts([tiny_target("glm4_moe").model], enabled=True) == 0
    monkeypatch.setattr(cpu_layers, "_MAX_EXPERT_WEIGHTS", 10)
    assert join_experts([tiny_target("glm4_moe", dtype=torch.float32).model], enabled=True) == 0


def test_decoder_says_whether_and_the_last_one_counts():
    target = load_target(TARGET, dtype="float32")
    moe = tiny_target("glm4_moe", dtype=torch.float32)
    spec = SpecSettings(num_speculative_tokens=0)
    names = target.model.state_dict().keys()
    for engine, is_left in (
        (EngineConfig(), True),
        (EngineConfig(few_rows_kernel=False), False),
        (EngineConfig(), True),
        (EngineConfig(deterministic=True), False),  # whose products are others
    ):
        SpecDecoder(target, spec=spec, engine=engine)
        SpecDecoder(moe, spec=spec, engine=engine)
        assert ("lm_head" in left_of(target.model)) is is_left
        assert bool(left_of(target.model)) is is_left
        assert isinstance(target.final_norm, FusedNorm) is is_left
        names_of_experts = {s.config._experts_implementation for s in expert_stacks(moe.model)}
        assert names_of_experts == {EXPERTS_NAME if is_left else "eager"}
    assert target.model.state_dict().keys() == names
