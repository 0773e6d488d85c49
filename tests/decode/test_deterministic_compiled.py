"""Compiled deterministic steps: every pass runs the same code, whose products are ours.

The compiler's backend is one that runs what was traced, after its products were replaced; captured
steps are called again, as in test_captured_loop. Bits are compared on a GPU (test_deterministic).
"""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.store_kv import NewRows
from mtp_research.kernels.experts.expert_mlp import expert_pairs
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.build import build_products
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs.capture import captured_sizes
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.step import DeviceParts
from mtp_research.models.experts import EXPERTS_NAME
from mtp_research.models.rewrites import apply_rewrites as rewrites
from mtp_research.models.rewrites import invariant, region_pass, regions
from mtp_research.models.rewrites.apply_rewrites import apply_rewrites
from mtp_research.models.rewrites.invariant import InvariantProducts, replace_products
from mtp_research.models.rewrites.row_modules import RowModule, compile_row_modules, run_rows
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.decode.test_captured_loop import stand_in_for_graphs

PROMPTS = ([5, 6, 7, 8, 9], [3, 4, 5], [9, 9, 8, 7, 6, 5, 4], [11, 12])
DETERMINISTIC = {"deterministic": True, "deferred_output": True, "audit": False}
COMPILED = {**DETERMINISTIC, "cuda_graphs": True, "compile": True}
PRODUCTS = (nn.functional.linear, torch.matmul, torch.bmm, torch.mm)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[fx.GraphModule]]:
    """What was compiled, after its products were replaced."""
    found: list[fx.GraphModule] = []

    @functools.cache
    def backend(options: tuple[tuple[str, object], ...]) -> Callable:
        def run(graph: fx.GraphModule, _: list[Tensor]) -> Callable:
            replace_products(graph)
            found.append(graph)
            return graph.forward

        return run

    torch._dynamo.reset()
    regions.compiled_once.cache_clear()
    monkeypatch.setattr(regions, "invariant_backend", backend)
    stand_in_for_graphs(monkeypatch)
    yield found
    torch._dynamo.reset()
    regions.compiled_once.cache_clear()


def decode(models, *, num_drafts: int, policy: str = "training", **engine: object):
    target, heads = models
    settings = {"max_num_requests": 4, "max_model_len": 64, **engine}
    decoder = SpecDecoder(
        target,
        heads if num_drafts else None,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=EngineConfig(**settings),
    )
    records = decoder.generate(PROMPTS, max_new_tokens=10)
    return {record.request_id: record.output_token_ids for record in records}


def models_of(recipe: str):
    target = tiny.tiny_target(recipe, dtype=torch.float32, num_hidden_layers=3)
    return target, tiny.tiny_heads(target, num_mtp_modules=1)


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """New rows of every layer's attention, and where they were stored."""
    found = []
    attend = region_pass.attend_pages

    def watch(*args: object, new_rows: NewRows, **kwargs: object) -> Tensor:
        found.append((len(new_rows.key), new_rows.slot_mapping.tolist()))
        return attend(*args, new_rows=new_rows, **kwargs)

    monkeypatch.setattr(region_pass, "attend_pages", watch)
    return found


def test_every_pass_runs_code_that_was_compiled_once(
    graphs: list[fx.GraphModule], stored: list[tuple[int, list[int]]]
) -> None:
    models = models_of("qwen3")
    expected = decode(models, num_drafts=0, max_num_requests=1, **DETERMINISTIC)
    loops = (
        {"num_drafts": 0, "capture_mixed": True},
        # Prompt rows run as they come, one by one.
        {"num_drafts": 0, "max_num_requests": 1, "max_prefill_chunk": 1},
        {"num_drafts": 2, "policy": "eagle", "capture_mixed": True, "max_prefill_chunk": 2},
    )
    for loop in loops:
        stored.clear()
        assert decode(models, **loop, **COMPILED) == expected, loop
        assert stored, "layers were called"
        assert all(num_rows == len(slots) for num_rows, slots in stored)
        if loop.get("max_prefill_chunk") == 1:
            assert any(num_rows == 2 and slots[1] == -1 for num_rows, slots in stored)
    called = Counter(node.target for graph in graphs for node in graph.graph.nodes)
    assert called[torch.ops.mtp_research.attend_here.default] == 1, "a layer is compiled once"
    # Two norms and the two of queries and keys in that layer, and those outside of layers.
    assert called["mean"] == 4 + 1
    assert called["cos"] == 1
    assert not [called[product] for product in PRODUCTS if called[product]]
    assert called[invariant._linear] > 7  # of the layer, and of heads


def test_a_layer_has_the_same_bits_for_one_row_as_among_others(graphs) -> None:
    target, _ = models_of("qwen3")
    apply_rewrites(target, None, EngineConfig(**COMPILED))
    hidden = torch.randn(1, 5, target.config.hidden_size)
    norm = cast(RowModule, target.final_norm)
    with torch.inference_mode():
        whole = norm(hidden)
        alone = norm(hidden[:, 3:4])
    assert alone.shape == (1, 1, hidden.shape[2])
    assert torch.equal(alone, whole[:, 3:4])
    assert len(graphs) == 1, "one row has no code of its own"
    assert norm(hidden).requires_grad is False
    assert type(copy.deepcopy(norm)) is norm.plain_class
    hidden.requires_grad_()
    norm(hidden).sum().backward()  # training goes on without regions
    assert hidden.grad is not None


def test_a_usual_engine_puts_modules_back() -> None:
    target, _ = models_of("qwen3")
    norm = target.final_norm
    apply_rewrites(target, None, EngineConfig(**COMPILED))
    first = cast(RowModule, norm).region
    assert first is not None
    apply_rewrites(target, None, EngineConfig(**COMPILED))
    assert cast(RowModule, norm).region is first, "compiled steps name it"
    apply_rewrites(target, None, EngineConfig(**{**COMPILED, "deterministic": False}))
    assert cast(RowModule, norm).region is None


def test_unknown_modules_and_layers_are_refused() -> None:
    target, _ = models_of("qwen3")
    target.model.base_model.register_module("extra", nn.Tanh())
    with pytest.raises(ConfigError, match=r"got model\.extra, Tanh; set engine\.compile=false"):
        apply_rewrites(target, None, EngineConfig(**COMPILED))
    target, _ = models_of("qwen3")
    layer = target.model.base_model.layers[1]
    layer.mlp.forward = layer.mlp.forward  # what libraries do that move modules
    with pytest.raises(ConfigError, match=r"model\.layers\.1, Qwen3DecoderLayer"):
        apply_rewrites(target, None, EngineConfig(**COMPILED))


def test_experts_that_have_an_invariant_form_stay_and_others_are_refused() -> None:
    target, _ = models_of("qwen3_moe")
    with pytest.raises(ConfigError, match=r"got experts by eager; set engine\.compile=false"):
        decode((target, None), num_drafts=0, **COMPILED)
    target.model.config._experts_implementation = EXPERTS_NAME
    mode = build_products(target, None, engine=EngineConfig(**COMPILED))
    assert mode is not None
    with mode:
        assert target.model.config._experts_implementation == EXPERTS_NAME


def test_compiled_parts_are_traced_without_the_mode() -> None:
    weight, traced = torch.ones(3, 4), []

    def watch(graph: fx.GraphModule, _: list[Tensor]) -> Callable:
        traced.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    parts = DeviceParts(*[lambda x: nn.functional.linear(x, weight)] * 4)
    part = parts.inside(InvariantProducts([])).target
    torch.compile(part, backend=watch)(torch.ones(2, 4))
    assert nn.functional.linear in traced


def test_rewrites_whose_kernels_go_by_the_rows_are_off(monkeypatch) -> None:
    names = ("merge_projections", "join_shared_experts", "leave_rotary_to_attention")
    asked: dict[str, dict] = {}
    for name in names:
        monkeypatch.setattr(
            rewrites, name, lambda *_, _name=name, **how: asked.update({_name: how})
        )
    target, _ = models_of("qwen3")
    apply_rewrites(target, None, EngineConfig(**COMPILED))
    expected = ({"few_rows_kernel": False}, {"always": True}, {"enabled": False})
    assert asked == dict(zip(names, expected, strict=True))


def test_traced_experts_are_asked_for_their_invariant_form() -> None:
    def layer(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return expert_pairs(x, gate_up, down, index, weights)

    backends = []

    def watch(graph: fx.GraphModule, _: list[Tensor]) -> Callable:
        replace_products(graph)
        backends.extend(n.args[-1] for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    operands = (torch.randn(3, 16), torch.randn(2, 32, 16), torch.randn(2, 16, 16))
    chosen = (torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    found = torch.compile(layer, backend=watch)(*operands, *chosen)
    assert backends == [checks.INVARIANT]
    torch.testing.assert_close(found, layer(*operands, *chosen))


def test_traced_product_without_an_invariant_form_is_refused() -> None:
    graph = fx.symbolic_trace(lambda x: torch.einsum("ij,kj->ik", x, x))
    with pytest.raises(ConfigError, match="no batch-invariant form of einsum"):
        replace_products(graph)


def test_regions_of_modules_that_are_gone_are_gone() -> None:
    target, _ = models_of("qwen3")
    apply_rewrites(target, None, EngineConfig(**COMPILED))
    number = cast(RowModule, target.final_norm).region.number
    cast(RowModule, target.final_norm).region = None
    with pytest.raises(KeyError):
        run_rows([torch.zeros(1, 2, 64)], number, [64])


def test_no_bucket_of_deterministic_steps_holds_one_request() -> None:
    assert captured_sizes(4, wanted=[1, 4], least=2) == (2, 4)
    assert captured_sizes(1, wanted=None, least=2) == (2,)
    assert captured_sizes(4, wanted=[1, 4]) == (1, 4)


def test_the_compiler_knows_a_region_s_outputs_by_the_call_alone() -> None:
    # Code that calls one of them serves others, and other processes.
    with FakeTensorMode():
        rows = [torch.empty(1, 5, 24), torch.empty(1, 5, dtype=torch.int64)]
        outputs = run_rows(rows, torch.empty((), dtype=torch.int64), [16, 8])
    assert [(out.shape, out.dtype) for out in outputs] == [
        ((1, 5, 16), torch.float32),
        ((1, 5, 8), torch.float32),
    ]


def test_module_that_changes_the_dtype_is_no_region() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.bfloat16)
    target.final_norm.weight.data = target.final_norm.weight.data.float()
    with pytest.raises(ConfigError, match=r"dtype of their rows, torch\.bfloat16, got .*RMSNorm"):
        compile_row_modules(target, target.model.base_model.norm, options={"deterministic": True})
