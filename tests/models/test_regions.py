"""Layers that are compiled once: how often the compiler runs, which layers, and the same texts.

The compiler's backend is one that runs what was traced, so that a test counts and compares without
a code generator; captured steps are called again, as in test_captured_loop.
"""

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV
from mtp_research.kernels.attention.paged_attention import attend_pages
from mtp_research.kernels.latent import expanded_attention
from mtp_research.kernels.latent.expanded_attention import Prompts
from mtp_research.kernels.latent.head_product import head_product
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs import mixed_graphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention import paged
from mtp_research.models.rewrites import region_pass, regions
from mtp_research.models.rewrites.regions import LayerRegion, compile_layers_once
from mtp_research.models.target import load_target
from tests import tiny
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.inductor_kernels import generated_kernels
from tests.models.test_loading import quantise, save

PROMPTS = ([5, 6, 7, 8, 9], [3, 4, 5], [9, 9, 8, 7, 6, 5, 4], [11, 12])


def count_compilations(monkeypatch: pytest.MonkeyPatch, run: Callable) -> Iterator[Counter[str]]:
    """How often each function was compiled, while captured steps are called again.

    What `run` makes of a graph and its inputs stands for compiled code.
    """
    found: Counter[str] = Counter()
    compile_ = torch.compile

    @functools.cache  # Inductor is the same for every decoder, too
    def backend_of(name: str) -> Callable:
        def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
            found[name] += 1
            return run(graph, inputs)

        return backend

    def counting(function: Callable, *, dynamic: bool, **_: object) -> Callable:
        # A break in a graph ends a capture, if it reads a number on the host.
        backend = backend_of(function.__name__)
        return compile_(function, dynamic=dynamic, backend=backend, fullgraph=True)

    torch._dynamo.reset()
    regions.compiled_once.cache_clear()
    monkeypatch.setattr(torch, "compile", counting)
    stand_in_for_graphs(monkeypatch)
    yield found
    torch._dynamo.reset()
    regions.compiled_once.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    yield from count_compilations(monkeypatch, lambda graph, _: graph.forward)


def decode(
    models,
    *,
    num_drafts: int,
    policy: str = "training",
    temperature: float = 0.0,
    **engine: object,
):
    target, heads = models
    settings = {"max_num_requests": 4, "max_model_len": 64, "deferred_output": True, "audit": False}
    decoder = SpecDecoder(
        target,
        heads if num_drafts else None,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=EngineConfig(**settings | engine),
    )
    sampling = SamplingParams(max_new_tokens=10, seed=3, temperature=temperature)
    records = list(decoder.generate(PROMPTS, sampling=sampling))
    records += decoder.generate(PROMPTS[:1], sampling=sampling)  # a batch of one
    return [(one.output_token_ids, one.num_accepted_per_round) for one in records]


def models_of(recipe: str, **changes: object):
    target = tiny.tiny_target(recipe, dtype=torch.float32, **changes)
    return target, tiny.tiny_heads(target, num_mtp_modules=2)


CAPTURED = {"cuda_graphs": True, "compile": True, "capture_mixed": True}


def test_layers_batch_sizes_and_conditions_share_their_code(compiled: Counter[str]) -> None:
    target, heads = models_of("qwen3", num_hidden_layers=3)
    # How often its passes are compiled is told in test_compiled_parts.
    conditions = ((0, "training", 0.0), (1, "eagle", 0.8))
    for num_drafts, policy, temperature in conditions:
        if policy == "eagle":  # heads that are made after their target was rewritten
            heads = tiny.tiny_heads(target, num_mtp_modules=2)
        models = target, heads
        condition = {"num_drafts": num_drafts, "policy": policy, "temperature": temperature}
        plain = decode(models, **condition)
        assert decode(models, **condition, **CAPTURED) == plain
        before = Counter(compiled)
        assert decode(models, **condition, **CAPTURED) == plain
        assert compiled == before, "another decoder finds the code of the first one"
    # A layer whose rows its attention stores, and one whose rows lie in a longer prompt.
    assert compiled["_run"] == 2
    assert compiled["_run_layers"] == 1


@pytest.mark.parametrize(
    "in_regions",
    [
        pytest.param(True, id="regions"),
        pytest.param(False, id="whole", marks=pytest.mark.every_case),
    ],
)
def test_only_attention_behind_its_own_layer_s_products_reads_tables_before_it_waits(
    in_regions: bool, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step compiled whole the kernel in front may be the one that makes the tables."""
    models = models_of("qwen3")
    plain = decode(models, num_drafts=0)
    found: set[bool] = set()

    def attend(query: Tensor, kv: PagedKV, rows: AttentionRows, *others: object, **named: object):
        found.add(rows.are_settled)
        return attend_pages(query, kv, rows, *others, **named)

    for module in (region_pass, paged):
        monkeypatch.setattr(module, "attend_pages", attend)
    assert decode(models, num_drafts=0, **CAPTURED, layer_regions=in_regions) == plain
    assert (True in found) == in_regions
    assert found
    assert bool(compiled["_run"]) == in_regions
    assert compiled["_run_layers"] == 1


def test_layers_of_two_kinds_are_compiled_twice(compiled: Counter[str]) -> None:
    models = models_of("gemma3")  # with a window and without
    plain = decode(models, num_drafts=0)
    assert decode(models, num_drafts=0, **CAPTURED) == plain
    assert compiled["_run"] == 4


@pytest.mark.every_case
def test_layers_that_keep_fp8_are_compiled_once_for_each_kind(
    compiled: Counter[str], tmp_path: Path
) -> None:
    quantise(save(tmp_path, "glm4_moe", num_hidden_layers=3))
    target = load_target(tmp_path, dtype="float32", device="cpu", weights="stored_fp8")
    models = target, tiny.tiny_heads(target, num_mtp_modules=2)
    plain = decode(models, num_drafts=1)
    assert decode(models, num_drafts=1, **CAPTURED) == plain
    # The dense layer, those with experts and modules, whose weights are plain; each with and
    # without rows that lie in a longer prompt.
    assert compiled["_run"] == 6


@pytest.mark.parametrize(
    ("recipe", "branches", "num_in_heads"),
    [
        pytest.param("mimo", ["mlp"] * 2, 1, id="dense"),
        pytest.param("gemma3", ["post_feedforward_layernorm"] * 3, 1, id="norm_behind_products"),
        pytest.param("glm4_moe", ["mlp"] * 2, 1, id="experts"),
        pytest.param("glm4_moe_lite", ["mlp"] * 2, 1, id="latents"),
        pytest.param("deepseek_v32", [], 0, id="forward_replaced"),
        pytest.param("longcat_flash", [], 0, id="two_attentions"),
    ],
)
def test_layers_are_taken_by_what_they_give(recipe, branches: list[str], num_in_heads) -> None:
    target = tiny.tiny_target(recipe, dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    num_layers = len(branches)
    for _ in range(2):  # the second decoder on a model finds it changed
        assert compile_layers_once(target, target.model, enabled=True, options={}) == num_layers
        assert compile_layers_once(target, heads, enabled=True, options={}) == num_in_heads
    regional = [m for m in target.model.modules() if isinstance(m, LayerRegion)]
    assert [layer.branch for layer in regional] == branches
    followed = [layer.region.is_followed for layer in regional if layer.region is not None]
    assert followed == [True] * (num_layers - 1) + [False] * bool(num_layers)
    assert compile_layers_once(target, target.model, enabled=False, options={}) == 0
    assert [layer.region for layer in regional] == [None] * num_layers


def test_layers_add_what_those_in_front_left_apart(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = models_of("qwen3", num_hidden_layers=3)
    plain = decode(models, num_drafts=0)
    passes: list[tuple[int, Tensor, Tensor]] = []  # layer, what it was given and what it left
    run_layer = regions._Region.run

    def note(region, hidden, before, *others):
        outputs = run_layer(region, hidden, before, *others)
        passes.append((region.layer_idx, before, outputs[1]))
        return outputs

    monkeypatch.setattr(regions._Region, "run", note)
    assert decode(models, num_drafts=0, **CAPTURED) == plain
    assert {layer for layer, *_ in passes} == {0, 1, 2}
    left = torch.zeros(())
    for layer, given, own in passes:
        assert torch.equal(given, left.expand_as(given) if layer else torch.zeros_like(given))
        assert own.any()
        left = own
    assert compiled["_run"] == 2


class Ends(torch.nn.Module):
    """A layer of one module, which adds it up as `form` says."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.mlp = form, torch.nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.form == "twice":
            hidden = hidden + self.mlp(hidden)
        if self.form == "scaled":
            return hidden + 2 * self.mlp(hidden)
        return hidden + self.mlp(hidden)


@pytest.mark.parametrize(("form", "branch"), [("once", "mlp"), ("twice", None), ("scaled", None)])
def test_last_branch_is_added_once_as_it_is(form: str, branch: str | None) -> None:
    hidden = torch.linspace(-1.0, 1.0, 12).view(1, 3, 4)
    layer = Ends(form)
    drifting = iter(range(9))  # as experts whose sums come in another order each time
    layer.mlp.register_forward_hook(lambda *args: args[2] * (1 + 1e-3 * next(drifting)))
    with torch.no_grad():
        found = regions._last_branch(layer, lambda _, caller: Ends.forward(caller, hidden))
    assert found == branch


def test_layers_that_end_otherwise_stand_between_those_that_end_with_a_sum(
    compiled: Counter[str],
) -> None:
    models = models_of("qwen3", num_hidden_layers=3)
    layers = models[0].model.base_model.layers
    usual = type(layers[1])

    class Doubled(usual):
        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return 2 * usual.forward(self, *args, **kwargs)

    layers[1].__class__ = Doubled
    plain = decode(models, num_drafts=0)
    assert decode(models, num_drafts=0, **CAPTURED) == plain
    assert [layer.branch for layer in layers] == ["mlp", None, "mlp"]
    assert compiled["_run"] == 4


def test_a_layer_whose_output_is_changed_on_its_way_adds_up_itself(compiled: Counter[str]) -> None:
    models = models_of("qwen3", num_hidden_layers=3)
    layers = models[0].model.base_model.layers
    layers[1].register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    plain = decode(models, num_drafts=0)
    assert decode(models, num_drafts=0, **CAPTURED) == plain
    assert [layer.region.is_followed for layer in layers] == [False, True, False]
    assert compiled["_run"] == 2


class Tripled(torch.nn.Module):
    def forward(self, hidden: Tensor, **_: object) -> Tensor:
        return 3 * hidden


def test_a_layer_that_runs_in_the_step_adds_what_the_one_in_front_left() -> None:
    layer = regions._regional(Tripled, "mlp")()
    context = object.__new__(paged.PagedContext)
    vars(context).update(pool=SimpleNamespace(runs_regions=False), _apart=[])
    hidden, branch = torch.ones(1), torch.full((1,), 5.0)
    assert context.leave_apart(hidden, branch) is hidden
    assert layer(hidden, attention_context=context) == 18
    assert layer(hidden, attention_context=context) == 3
    context.leave_apart(hidden, branch)
    with pytest.raises(AssertionError, match=r"engine\.layer_regions=false"):
        layer(2 * hidden, attention_context=context)


def test_the_last_sum_of_a_layer_is_no_launch() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    compile_layers_once(target, target.model, enabled=True, options={})
    layer = target.model.base_model.layers[0]
    hidden, before = torch.randn(2, 1, 6, target.config.hidden_size)
    positions = torch.arange(6)[None]
    both = torch.cat(target.position_embeddings(hidden, positions))

    rows = (hidden, both, positions, before)
    found = []
    for branch in ("mlp", None):
        layer.__class__ = regions._regional(layer.plain_class, branch)
        with torch.no_grad():
            found.append(
                generated_kernels(lambda *rows: regions._run(layer, "heads", True, *rows), *rows)
            )
    apart, whole = found
    assert len(apart) == len(whole) - 1 == 5


def test_changed_layers_are_copied_as_the_library_s_and_keep_their_weights() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    layer = target.model.base_model.layers[1]
    before, kind = layer.state_dict(), type(layer)
    compile_layers_once(target, target.model, enabled=True, options={})
    assert type(layer) is not kind
    copied = pickle.loads(pickle.dumps(layer))
    assert type(copied) is kind
    for state in (layer.state_dict(), copied.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], value) for name, value in before.items())
    assert layer.self_attn.layer_idx == 1


def test_a_rehearsed_step_runs_its_layers_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks on modules inside a layer, which count experts, are not called in a compiled one."""
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    assert compile_layers_once(target, target.model, enabled=True, options={}) > 0
    engine = EngineConfig(max_num_requests=1, max_model_len=64, audit=False)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    decoder.add_request(PROMPTS[0])
    decoder.step()
    decoder.cache.runs_regions = True  # as captured, compiled steps have it

    def refuse(*_: object) -> Tensor:
        raise AssertionError("a compiled layer ran")

    monkeypatch.setattr(regions, "run_layer", refuse)
    decoder.rehearse()


def test_nothing_is_compiled_after_the_warm_up(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4,))
    target, heads = models_of("qwen3")
    engine = EngineConfig(
        **{"max_num_requests": 4, "max_model_len": 64, "max_num_batched_tokens": 32},
        **{"deferred_output": True, "audit": False, **CAPTURED},
    )
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=2), engine=engine)
    sampling = SamplingParams(max_new_tokens=10)
    decoder.warm_up(sampling)
    warm, builds = Counter(compiled), decoder.num_builds
    assert warm["_run"] == 2
    list(decoder.generate([*PROMPTS, [7] * 40], sampling=sampling))
    assert compiled == warm
    assert decoder.num_builds == builds


def test_regions_read_prompts_of_large_steps_expanded(
    compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = {"mlp_layer_types": ["dense", "dense"]}
    target = tiny.tiny_target("glm4_moe_lite", dtype=torch.float32, **dense)
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4,))
    seen: list[Prompts] = []
    attend = expanded_attention.attend_expanded

    def noting(query, weight, cache, plan, **options):
        seen.append(plan.prompts)
        return attend(query, weight, cache, plan, **options)

    multiplied: set[int] = set()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        multiplied.add(x.shape[1])
        return head_product(x, weight)

    monkeypatch.setattr(region_pass, "head_product", product)
    monkeypatch.setattr(expanded_attention, "attend_expanded", noting)
    texts = []
    for expands, settings in ((False, {}), (True, CAPTURED)):
        monkeypatch.setattr(paged, "pays_expanded", lambda *_, answer=expands: answer)
        sizes = {"max_num_requests": 3, "max_model_len": 64, "max_prefill_chunk": 20}
        decoder = SpecDecoder(
            target,
            spec=SpecSettings(num_speculative_tokens=0),
            engine=EngineConfig(**sizes, deferred_output=True, audit=False, **settings),
        )
        prompts = [[5, 6, 7] * 11, [9, 8], [7] * 30, [3, 4, 5, 6] * 8]
        texts.append([one.token_ids for one in decoder.generate(prompts, max_new_tokens=6)])
        assert bool(seen) is expands
        assert ({2, 3} <= multiplied) is expands, "rows of steps that decode alone"
    assert texts[0] == texts[1]
    assert any(span.first > 0 for prompts in seen for span in prompts.spans)
    assert any(prompts.num_others for prompts in seen)
    assert compiled["_run"] == 2
    assert compiled["_run_layers"] == 1
