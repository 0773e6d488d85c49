"""Which code runs expert layers: by family, by what is trained, by `model.experts`."""

import copy
from types import MethodType

import pytest
import torch
from mtp_research.kernels.experts.expert_mlp import expert_mlp
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from mtp_research.models import experts as every_expert
from mtp_research.models.experts import (
    EVERY_EXPERT_NAME,
    EXPERTS_NAME,
    ExpertLoads,
    FusedRouter,
    expert_stacks,
    experts_forward,
    fuse_routers,
    fused_router,
    route_experts,
    why_not_fused,
)
from mtp_research.runtime.errors import ConfigError

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
GLM = SIZES | {"n_routed_experts": 4, "first_k_dense_replace": 0}
FAMILIES = {
    "glm4_moe": (GLM, "weights that are not"),
    "qwen3_moe": (SIZES | {"num_experts": 4, "decoder_sparse_step": 1}, "weights that are not"),
    "mixtral": (SIZES | {"num_local_experts": 4}, "weights that are not"),
    "gpt_oss": (SIZES | {"num_local_experts": 4}, "another layout in GptOssExperts"),
}


def make_model(model_type: str, **changes):
    arguments = FAMILIES[model_type][0] | changes
    config = AutoConfig.for_model(model_type, **arguments)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_family_is_fused_where_its_layout_is_known(model_type):
    (stack,) = expert_stacks(make_model(model_type))
    reason = why_not_fused(stack)
    assert reason is not None, "weights on a CPU are never fused"
    assert reason.startswith(FAMILIES[model_type][1])
    if not reason.startswith("weights"):
        return
    rows = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    index = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 1], [2, 1], [1, 0], [3, 2]])
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(2))
    stack.config._experts_implementation = "eager"
    found = expert_mlp(rows, stack.gate_up_proj, stack.down_proj, index, weights)
    torch.testing.assert_close(found, stack(rows, index, weights), atol=1e-6, rtol=0)


def test_other_activation_is_not_fused():
    (stack,) = expert_stacks(make_model("glm4_moe", hidden_act="gelu"))
    assert why_not_fused(stack) == "another activation in Glm4MoeExperts"


def test_dense_model_has_no_expert_stacks():
    config = AutoConfig.for_model("qwen3", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    route_experts(model)
    assert expert_stacks(model) == []
    with pytest.raises(ConfigError, match="got none"):
        route_experts(model, experts="fused")


@pytest.mark.parametrize("experts", ["auto", "grouped_mm"])
def test_cpu_keeps_the_loop_over_experts(experts):
    model = make_model("glm4_moe")
    route_experts(model, experts=experts)
    assert model.config._experts_implementation == "eager"


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ("fused", "got weights that are not contiguous bfloat16 on a GPU.* model.experts=auto"),
        ("fast", "model.experts must be one of auto, fused, grouped_mm, got 'fast'"),
    ],
)
def test_experts_that_cannot_run_are_refused(experts, message):
    with pytest.raises(ConfigError, match=message):
        route_experts(make_model("glm4_moe"), experts=experts)


def test_trained_experts_keep_the_librarys_path(monkeypatch):
    (stack,) = expert_stacks(make_model("glm4_moe"))
    stack.config._experts_implementation = EXPERTS_NAME
    calls = []
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda *args: calls.append(args) or args[1]
    )
    rows = torch.zeros(3, 32, requires_grad=True)
    index, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    stack(rows, index, weights)
    assert len(calls) == 1
    assert calls[0][0] is stack


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_fused_router_decides_as_the_class_does(is_trained, normalises):
    model = make_model("glm4_moe", routed_scaling_factor=1.8, norm_topk_prob=normalises)
    (router,) = [module for module in model.modules() if isinstance(module, Glm4MoeTopkRouter)]
    generator = torch.Generator().manual_seed(3)
    router.weight.data = torch.randn(router.weight.shape, generator=generator) / 6
    router.weight.requires_grad_(is_trained)
    router.e_score_correction_bias.copy_(torch.randn(4, generator=generator) / 2)
    rows = torch.randn(2, 9, 32, generator=generator)
    gradients = []
    for forward in (type(router).forward, fused_router):
        router.weight.grad = None
        logits, weights, index = forward(router, rows)
        order = index.argsort()
        weights = weights.gather(1, order)
        if is_trained:
            (weights * torch.arange(18.0)[:, None]).square().sum().backward()
        gradient = [router.weight.grad] if is_trained else []
        found = (logits, weights, index.gather(1, order))
        gradients.append([tensor.detach() for tensor in (*found, *gradient)])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_layer_with_fused_router_compiles_to_one_graph():
    model = make_model("glm4_moe").requires_grad_(False)
    route_experts(model)
    layer = model.base_model.layers[0].mlp
    layer.gate.forward = MethodType(fused_router, layer.gate)
    rows = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
    expected = layer(rows)
    layer.experts.config._experts_implementation = EXPERTS_NAME
    names = []

    def note(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.testing.assert_close(torch.compile(layer, backend=note, fullgraph=True)(rows), expected)
    assert sum("choose_experts" in name for name in names) == 1


def test_routers_are_replaced_once_and_go_on_to_their_class():
    model = make_model("glm4_moe")
    assert fuse_routers(model) == 1
    assert fuse_routers(model) == 0
    (router,) = [module for module in model.modules() if isinstance(module, Glm4MoeTopkRouter)]
    rows = torch.randn(3, 32, requires_grad=True)
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(router(rows), Glm4MoeTopkRouter.forward(router, rows), strict=True)
    )
    assert type(router) is type(copy.deepcopy(router)) is FusedRouter
    replaced = make_model("glm4_moe")
    (router,) = [module for module in replaced.modules() if isinstance(module, Glm4MoeTopkRouter)]
    router.forward = router.forward  # as a library's hook does
    assert fuse_routers(replaced) == 0
    assert fuse_routers(make_model("glm4_moe", n_group=2, topk_group=1)) == 0


@pytest.mark.parametrize("model_type", ["glm4_moe", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("max_rows", [3, 64])
def test_every_expert_equals_the_loop_with_gradients(model_type, max_rows, monkeypatch):
    monkeypatch.setattr(every_expert, "_MAX_ROWS", max_rows)
    (stack,) = expert_stacks(make_model(model_type).double())
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(7, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(7, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in rows])
    found = []
    for name in ("eager", EVERY_EXPERT_NAME):
        stack.config._experts_implementation = name
        output = stack(rows, index, weights)
        inputs = (rows, weights, stack.gate_up_proj, stack.down_proj)
        found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for loop, every in zip(*found, strict=True):
        torch.testing.assert_close(every, loop)


@pytest.mark.parametrize(
    ("dtype", "model_type", "num_experts", "expected"),
    [
        (torch.float32, "glm4_moe", 4, EVERY_EXPERT_NAME),
        (torch.float16, "glm4_moe", 4, EVERY_EXPERT_NAME),
        (torch.float32, "glm4_moe", 64, "eager"),
        (torch.float32, "gpt_oss", 4, "eager"),
    ],
)
def test_few_experts_off_the_cpu_all_run_where_no_grouped_product_does(
    dtype, model_type, num_experts, expected
):
    name = "n_routed_experts" if model_type == "glm4_moe" else "num_local_experts"
    arguments = FAMILIES[model_type][0] | {name: num_experts}
    with torch.device("meta"):  # stands for a GPU: nothing is computed
        config = AutoConfig.for_model(model_type, **arguments)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    route_experts(model)
    assert {stack.config._experts_implementation for stack in expert_stacks(model)} == {expected}
    route_experts(model, experts="grouped_mm")
    assert {stack.config._experts_implementation for stack in expert_stacks(model)} == {"eager"}


@pytest.mark.gpu
@pytest.mark.parametrize("experts", ["auto", "fused"])
def test_frozen_experts_on_gpu_run_fused_and_trained_ones_get_gradients(experts):
    model = make_model("glm4_moe").to("cuda", torch.bfloat16).requires_grad_(False)
    (stack,) = expert_stacks(model)
    rows = torch.randn(6, 32, device="cuda", dtype=torch.bfloat16)
    index = torch.randint(4, (6, 2), device="cuda")
    weights = torch.rand(6, 2, device="cuda")
    expected = stack(rows, index, weights)
    route_experts(model, experts=experts)
    assert stack.config._experts_implementation == EXPERTS_NAME
    torch.testing.assert_close(stack(rows, index, weights), expected, atol=2e-2, rtol=2e-2)
    rows.requires_grad_()
    experts_forward(stack, rows, index, weights).sum().backward()
    assert rows.grad is not None
    assert bool(rows.grad.abs().sum() > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "frozen"])
def test_fused_router_on_gpu_decides_as_the_class_does(is_trained):
    model = make_model("glm4_moe", routed_scaling_factor=1.8).to("cuda", torch.bfloat16)
    assert fuse_routers(model) == 1
    (router,) = [module for module in model.modules() if isinstance(module, Glm4MoeTopkRouter)]
    router.weight.data.normal_()
    router.weight.requires_grad_(is_trained)
    rows = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    logits, weights, index = router(rows)
    expected = Glm4MoeTopkRouter.forward(router, rows)
    expected_logits, expected_weights, expected_index = expected
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=1e-5)
    order, expected_order = index.argsort(), expected_index.argsort()
    assert torch.equal(index.gather(1, order), expected_index.gather(1, expected_order))
    expected = expected_weights.gather(1, expected_order)
    torch.testing.assert_close(weights.gather(1, order), expected, atol=1e-4, rtol=1e-4)
    assert weights.requires_grad == is_trained


def test_expert_loads_are_counted_in_training_alone() -> None:
    config = AutoConfig.for_model("glm4_moe", **GLM)
    model = AutoModelForCausalLM.from_config(config)
    loads, chosen = ExpertLoads(model), []
    (stack,) = expert_stacks(model)
    stack.register_forward_pre_hook(lambda module, inputs: chosen.append(inputs[1]))
    token_ids = torch.arange(24).view(2, 12)
    model.eval()(token_ids)
    assert loads.take().tolist() == [0, 0, 0, 0]
    model.train()(token_ids)
    model(token_ids)
    expected = torch.bincount(torch.cat(chosen[1:]).flatten(), minlength=4).float()
    taken = loads.take()
    assert taken.tolist() == expected.tolist()
    assert sum(expected) == 2 * 24 * 2
    spread = [expected.max() / expected.mean(), expected.min() / expected.mean()]
    assert loads.spread(taken).tolist() == pytest.approx([float(x) for x in spread])
    assert loads.take().tolist() == [0, 0, 0, 0]
