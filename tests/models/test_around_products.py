"""Norms and sums that compiled products of few rows take over: which, and that results stay."""

import copy

import pytest
import torch
from mtp_research.kernels.products.few_rows_product import FewRowsConfig
from torch import nn

from mtp_research.models.rewrites import products
from mtp_research.models.rewrites.apply_rewrites import compile_options
from mtp_research.models.rewrites.around_products import JoinAroundProducts, mark_norms
from mtp_research.models.rewrites.products import merge_projections
from tests import tiny


class _RMSNorm(nn.Module):
    """The library's, or one that only looks like it."""

    def __init__(self, *, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.variance_epsilon, self.offset = 1e-5, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalised rows."""
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (self.weight + self.offset) * (x * torch.rsqrt(variance + 1e-5)).to(x.dtype)


class _Mlp(nn.Module):
    """The library's gated part."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(48, 32), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gated product."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    """A norm, a gated part and a sum; the norm may feed something else as well."""

    def __init__(self, *, offset: float = 0.0, is_shared: bool = False) -> None:
        super().__init__()
        self.norm, self.mlp, self.is_shared = _RMSNorm(offset=offset), _Mlp(), is_shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and what the gated part makes of it."""
        normed = self.norm(x)
        return (x + normed if self.is_shared else x) + self.mlp(normed)


@pytest.fixture
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is chosen for any weight on a CPU, where its op runs the reference."""

    def choose(*_: int, **__: torch.dtype) -> FewRowsConfig:
        return FewRowsConfig(16, 16, 1, 2)

    monkeypatch.setattr(products, "runs_on", lambda device: True)
    monkeypatch.setattr(products, "has_config", lambda *_, **__: True)
    monkeypatch.setattr(products, "choose_config", choose)
    monkeypatch.setattr(products, "choose_gated_config", choose)


def _rewritten(layer: nn.Module) -> nn.Module:
    layer.requires_grad_(False)
    merge_projections(layer, few_rows_kernel=True)
    mark_norms(layer, enabled=True)
    return layer


def _run(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """Output of compiled code behind the pass, and what it calls."""
    calls: list[str] = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        JoinAroundProducts()(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            if node.op == "call_function":
                extras = [name for name, value in node.kwargs.items() if value is not None]
                name = str(node.target).removeprefix("mtp_research.").removesuffix(".default")
                calls.append(" ".join((name, *extras)))
        return module

    torch._dynamo.reset()
    return torch.compile(module, backend=backend, dynamic=False)(x), calls


@pytest.mark.usefixtures("any_shape")
@torch.inference_mode()
def test_norm_and_sum_become_part_of_the_products() -> None:
    layer = _Layer()
    plain = copy.deepcopy(layer)
    names = list(layer.state_dict())
    _rewritten(layer)
    x = torch.randn(1, 8, 32)
    output, calls = _run(layer, x)
    assert calls == ["few_rows_gated_linear norm_weight eps", "few_rows_linear residual"]
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer(x), plain(x))  # without the compiler nothing changes
    assert list(layer.state_dict()) == names
    more = torch.randn(1, 9, 32)
    output, calls = _run(layer, more)
    assert not any("norm_weight" in call or "residual" in call for call in calls)
    torch.testing.assert_close(output, plain(more), rtol=1e-5, atol=1e-5)
    mark_norms(layer, enabled=False)
    assert type(layer.norm) is _RMSNorm


@pytest.mark.usefixtures("any_shape")
@torch.inference_mode()
def test_norm_that_feeds_something_else_stays() -> None:
    layer = _Layer(is_shared=True)
    plain = copy.deepcopy(layer)
    x = torch.randn(1, 4, 32)
    output, calls = _run(_rewritten(layer), x)
    assert [call for call in calls if "few" not in call] == [
        "rms_norm",
        "<built-in function add>",
    ]
    assert calls[-1] == "few_rows_linear residual"
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("any_shape")
def test_only_norms_with_the_very_numbers_are_marked() -> None:
    layer = _Layer(offset=1.0).requires_grad_(False)
    merge_projections(layer, few_rows_kernel=True)
    assert mark_norms(layer, enabled=True) == 0
    layer = _Layer().requires_grad_(False)
    assert mark_norms(layer, enabled=True) == 0  # nothing of ours reads it
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    merge_projections(target.model, few_rows_kernel=True)
    # Two a layer and the last one; those of queries and keys have another width.
    assert mark_norms(target.model, enabled=True) == 2 * target.config.num_hidden_layers + 1


@pytest.mark.usefixtures("any_shape")
@torch.inference_mode()
def test_compiler_takes_the_pass_and_decomposes_norms_that_stay() -> None:
    layer = _Layer(is_shared=True)
    plain = copy.deepcopy(layer)
    x = torch.randn(1, 4, 32)
    torch._dynamo.reset()
    compiled = torch.compile(
        _rewritten(layer), dynamic=False, options=compile_options(overlaps=False)
    )
    compiled(x)
    with torch.profiler.profile() as profile:
        output = compiled(x)
    calls = {event.name for event in profile.events()}
    assert "mtp_research::few_rows_linear" in calls
    assert "mtp_research::rms_norm" not in calls
    torch.testing.assert_close(output, plain(x), rtol=1e-5, atol=1e-5)
