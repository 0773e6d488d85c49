"""Compiled products of few rows: which weights the kernel gets, and that results stay."""

import copy

import pytest
import torch
from mtp_research.kernels.products import few_rows_choice
from mtp_research.kernels.products.few_rows_product import FewRowsConfig
from torch import nn

from mtp_research.models.rewrites import products as few_rows
from mtp_research.models.rewrites import products as merged
from mtp_research.models.rewrites.products import merge_projections
from tests import tiny


class _Mlp(nn.Module):
    """A group of two, a projection of its own with a bias, and one that nothing may change."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(48, 32)
        self.hooked = nn.Linear(32, 32)
        self.hooked.forward = self.hooked.forward  # as a library's hook does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gated product, then the hooked projection."""
        return self.hooked(self.down_proj(self.gate_proj(x).sin() * self.up_proj(x)))


@pytest.fixture
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is chosen for up to four rows on a CPU, where its op runs the reference."""

    def choose(num_rows: int, *_: int, **__: torch.dtype) -> FewRowsConfig | None:
        return FewRowsConfig(16, 16, 1, 2) if num_rows <= 4 else None

    monkeypatch.setattr(merged, "runs_on", lambda device: True)
    monkeypatch.setattr(few_rows, "has_config", lambda *_, **__: True)
    monkeypatch.setattr(few_rows, "choose_config", choose)
    monkeypatch.setattr(few_rows, "choose_gated_config", choose)


def _run(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Output of the compiled module, and the weight's shape in each call of the op."""
    shapes: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            if "mtp_research" in str(node.target):
                shapes.append(tuple(node.args[1].meta["example_value"].shape))
        return graph

    torch._dynamo.reset()
    return torch.compile(module, backend=backend, dynamic=False)(x), shapes


@pytest.mark.usefixtures("any_shape")
@torch.inference_mode()
def test_compiled_products_of_few_rows_call_the_op() -> None:
    module = _Mlp().requires_grad_(False)
    plain = copy.deepcopy(module)
    names = list(module.state_dict())
    assert merge_projections(module, few_rows_kernel=True) == 1
    x = torch.randn(1, 4, 32)
    output, shapes = _run(module, x)
    assert shapes == [(96, 32), (32, 48)]
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(module(x), plain(x))  # without the compiler nothing changes
    assert list(module.state_dict()) == names
    more = torch.randn(5, 32)
    output, shapes = _run(module, more)
    assert shapes == [(96, 32), (32, 48)]  # in the op, the library's product
    torch.testing.assert_close(output, plain(more), rtol=1e-5, atol=1e-5)
    merge_projections(module)  # the next decoder on this model does without
    assert _run(module, x)[1] == []


class _GatedMlp(nn.Module):
    """The library's gated part, or one that only looks like it."""

    def __init__(self, act_fn: nn.Module, *, scale: float = 1.0, limit: float = 1e9) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(48, 32, bias=False)
        self.act_fn, self.scale, self.limit = act_fn, scale, limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gated product."""
        gate = self.act_fn(self.gate_proj(x))
        up = self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(gate * up) * self.scale


@pytest.mark.usefixtures("any_shape")
@torch.inference_mode()
def test_gated_part_is_one_op_in_compiled_code() -> None:
    module = _GatedMlp(nn.SiLU()).requires_grad_(False)
    plain = copy.deepcopy(module)
    merge_projections(module, few_rows_kernel=True)
    merge_projections(module, few_rows_kernel=True)  # a second decoder finds it fused
    x = torch.randn(1, 4, 32)
    output, shapes = _run(module, x)
    assert shapes == [(96, 32), (32, 48)]
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(module(x), plain(x))
    assert list(module.state_dict()) == list(plain.state_dict())
    more = torch.randn(5, 32)
    torch.testing.assert_close(_run(module, more)[0], plain(more), rtol=1e-5, atol=1e-5)
    merge_projections(module)
    assert _run(module, x)[1] == []


@pytest.mark.parametrize(
    "module",
    [
        _GatedMlp(nn.GELU()),
        _GatedMlp(nn.SiLU(), scale=2.0),
        _GatedMlp(nn.SiLU(), limit=7.0),
    ],
    ids=["gelu", "other_code", "clamped"],
)
@pytest.mark.usefixtures("any_shape")
def test_part_with_other_numbers_is_not_fused(module: _GatedMlp) -> None:
    merge_projections(module.requires_grad_(False), few_rows_kernel=True)
    assert type(module) is _GatedMlp


@pytest.mark.usefixtures("any_shape")
def test_tied_output_weight_stays_tied() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    embedding = target.model.get_input_embeddings()
    target.lm_head.weight = embedding.weight
    before, place = target.lm_head.weight.clone(), embedding.weight.data_ptr()
    merge_projections(target.model, few_rows_kernel=True)
    assert target.lm_head.weight is embedding.weight
    assert torch.equal(embedding.weight, before)
    # Moving it would take its memory twice, and untie parameters that share no more than memory.
    assert target.lm_head.merged.weight.data_ptr() == embedding.weight.data_ptr() == place


@pytest.mark.usefixtures("any_shape")
def test_op_agrees_with_what_the_compiler_is_told_of_it() -> None:
    x = torch.randn(1, 3, 40)[..., ::2]
    ops, tests = torch.ops.mtp_research, ("test_schema", "test_faketensor")
    weight = torch.randn(24, 20)
    torch.library.opcheck(ops.few_rows_linear, (x, weight, torch.randn(24)), test_utils=tests)
    torch.library.opcheck(ops.few_rows_gated_linear, (x, weight), test_utils=tests)


def test_cpu_products_are_left_to_the_library() -> None:
    module = _Mlp().requires_grad_(False)
    merge_projections(module, few_rows_kernel=True)
    assert not module.down_proj.merged.may_use_kernel
    assert few_rows_choice.choose_config(4, 4096, 4096, dtype=torch.float32) is None
    assert few_rows_choice.choose_config(4, 128, 4096, dtype=torch.bfloat16) is None
    assert few_rows_choice.choose_config(4, 4096, 4096, dtype=torch.bfloat16) is not None
