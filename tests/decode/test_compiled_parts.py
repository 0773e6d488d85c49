"""Captured steps whose parts are compiled one by one: what is compiled how often, what is written.

Captured steps are called again, as in test_captured_loop. Where values are compared, both front
ends of the compiler run, with their rules for what writes in place; no code is generated.
"""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import ExpectedGainLength
from mtp_research.decode.graphs import capture, mixed_graphs
from mtp_research.decode.graphs.capture import CompiledParts
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.weights import load_heads
from mtp_research.models.rewrites import regions
from mtp_research.models.rewrites.regions import mark_any_size
from mtp_research.models.target import load_target
from mtp_research.runtime.errors import EnvironmentFault
from tests import tiny
from tests.decode.test_captured_loop import LAB
from tests.inductor_kernels import are_spelled_alike, kernels_of_graph, watch_sizes
from tests.models.test_regions import count_compilations

PROMPTS = ([5, 6, 7, 8, 9], [3, 4, 5], [9, 9, 8, 7, 6, 5, 4], [11, 12])
SAMPLED = SamplingParams(max_new_tokens=10, temperature=0.7, seed=3)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts alone: what is traced runs as it is."""
    yield from count_compilations(monkeypatch, lambda graph, _: graph.forward)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    yield from count_compilations(monkeypatch, aot_eager)


def _decoder(
    models,
    *,
    num_drafts: int,
    policy: str = "eagle",
    compiles: bool,
    mixed: bool = False,
    **spec: object,
):
    target, heads = models
    engine = EngineConfig(
        **{"max_num_requests": 4, "max_model_len": 60, "deferred_output": True, "audit": False},
        # As where memory decides, each condition has another number of blocks.
        **{"cuda_graphs": True, "compile": compiles, "num_blocks": 40 + 3 * num_drafts},
        **{"capture_mixed": mixed, "max_num_batched_tokens": 64 + 64 * mixed},
        **{"max_prefill_chunk": 3},  # prompts wait beside requests that draft
    )
    spec = SpecSettings(policy=policy, num_speculative_tokens=num_drafts, **spec)
    return SpecDecoder(target, heads if num_drafts else None, spec=spec, engine=engine)


def _decode(decoder: SpecDecoder, sampling: SamplingParams | None = None):
    sampling = sampling or SamplingParams(max_new_tokens=10)
    records = list(decoder.generate(PROMPTS, sampling=sampling))
    records += decoder.generate(PROMPTS[:1], sampling=sampling)
    return [(one.output_token_ids, one.num_accepted_per_round) for one in records]


def mark_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that compiled code for any K made are of any K for the next part, too."""

    def mark(value: object) -> None:
        if isinstance(value, StepInputs):
            mark_any_size(value.draft_token_ids, dim=1)
        mark_others(value)

    mark_others = capture._mark
    monkeypatch.setattr(capture, "_mark", mark)


def _small():
    target = tiny.tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=3)
    return target, tiny.tiny_heads(target, num_mtp_modules=1)


@pytest.fixture(scope="module")
def small():
    return _small()


@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.every_case)])
def test_conditions_share_what_does_not_depend_on_them(
    all_of_them: bool, compiled: Counter[str], small, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_as_torch_does(monkeypatch)
    of_rows = {"_make_inputs": 1, "_decide": 1}  # none verified a request, one, or more
    of_round = of_rows | {"_end_round": 1}
    expected = {
        (0, "eagle"): of_rows | {"_run_layers": 1, "_read_logits": 1},
        (3, "eagle"): of_round | {"_run_pass": 2},
        (3, "training"): {"_run_pass": 2},
        (5, "eagle"): {"_decide": 1},  # one for each K
        (5, "training"): {},
    }
    if all_of_them:
        # Each pass may read one output more.
        expected[4, "window"] = {"_decide": 1, "_run_pass": 4}
        expected[1, "eagle"] = of_round | {"_run_pass": 1}
    for (num_drafts, policy), counts in expected.items():
        assert _prepared(compiled, small, num_drafts, policy) == counts, (num_drafts, policy)


def test_a_part_that_torch_cannot_compile_is_named_with_a_way_on(
    monkeypatch: pytest.MonkeyPatch, small
) -> None:
    def fail(*_: object) -> Callable:
        raise AssertionError("two sizes")

    for _ in count_compilations(monkeypatch, fail):
        decoder = _decoder(small, num_drafts=0, compiles=True)
        with (
            pytest.raises(EnvironmentFault, match=r"_make_inputs .*two sizes.*compile=false"),
            torch.inference_mode(),
        ):
            decoder.graphs.prepare(SamplingParams(), draft_limits=[0])


@pytest.mark.every_case
@pytest.mark.parametrize(("policy", "temperature"), [("training", 0.0), ("eagle", 0.8)])
def test_all_parts_for_a_large_vocabulary_spell_sizes_alike(
    policy: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        kernels_of_graph(graph, inputs)
        return graph.forward

    found = watch_sizes(monkeypatch)
    target = tiny.tiny_target("qwen3", dtype=torch.float32, vocab_size=49_152)
    models = target, tiny.tiny_heads(target, num_mtp_modules=1)
    mark_as_torch_does(monkeypatch)
    for _ in count_compilations(monkeypatch, generate):
        decoder = _decoder(
            models,
            num_drafts=3,
            policy=policy,
            compiles=True,
            mixed=True,
            draft_sampling="sample" if temperature else "greedy",
        )
        with torch.inference_mode():
            decoder.graphs.prepare(SamplingParams(temperature=temperature), draft_limits=[3])
    assert found
    assert are_spelled_alike(found)


def _prepared(
    compiled: Counter[str], models, num_drafts: int, policy: str, **engine: object
) -> Counter[str]:
    """What is compiled for one more condition, layers aside."""
    before = Counter(compiled)
    decoder = _decoder(models, num_drafts=num_drafts, policy=policy, compiles=True, **engine)
    with torch.inference_mode():
        decoder.graphs.prepare(SamplingParams(), draft_limits=[num_drafts])  # batches of 4, 2
    parts = compiled - before
    del parts["_run"]
    return parts


@pytest.mark.every_case
@pytest.mark.parametrize("mixed", [False, True])
def test_modules_share_their_passes(compiled: Counter[str], mixed: bool) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32, num_hidden_layers=3)
    models = target, tiny.tiny_heads(target, num_mtp_modules=3)
    counts = [
        _prepared(compiled, models, num_drafts, policy, mixed=mixed)["_run_pass"]
        for num_drafts, policy in ((2, "eagle"), (2, "training"), (5, "training"), (5, "eagle"))
    ]
    # Passes of `training` behind the first differ in their module alone. One of `eagle` has a row
    # of drafts more than the pass before, until each module has run: then it has as many.
    assert counts == [2, 2, 0, 2]


def test_a_layer_is_compiled_once_wherever_it_is_called(lowered: Counter[str]) -> None:
    decoder = _decoder(_small(), num_drafts=1, compiles=True)  # whose layers nothing compiled yet
    with torch.inference_mode():
        decoder.graphs.prepare(SamplingParams(), draft_limits=[1])
    assert lowered["_run"] == 1  # of target and module, by code that runs for the first time or not


@pytest.mark.every_case
def test_numbers_of_drafts_share_target_and_later_passes(compiled: Counter[str], small) -> None:
    decoder = _decoder(small, num_drafts=2, compiles=True, draft_length=ExpectedGainLength())
    with torch.inference_mode():
        decoder.graphs.prepare(SamplingParams(), draft_limits=range(2, -1, -1))
    assert compiled["_run_layers"] == compiled["_read_logits"] == 1
    assert compiled["_make_inputs"] == compiled["_decide"] == 3
    # Pass 0 that drafts and that does not, and the later ones.
    assert compiled["_run_pass"] == 2 + 2
    assert compiled["_end_round"] == 1


@pytest.mark.every_case
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_steps_of_fewer_passes_run_what_those_of_all_compiled(
    compiled: Counter[str], small, policy: str
) -> None:
    decoder = _decoder(
        small, num_drafts=2, policy=policy, compiles=True, draft_length=ExpectedGainLength()
    )
    with torch.inference_mode():
        decoder.graphs.prepare(SamplingParams(), draft_limits=range(2, -1, -1))
    before = Counter(compiled)
    decoder.warm_up(SamplingParams())
    numbers = {kind.num_passes for kind in decoder.recent.times.prices}
    assert numbers == ({0, 2} if policy == "eagle" else {0, 1, 2})
    assert compiled == before


@pytest.mark.parametrize(
    "policy",
    ["eagle", *(pytest.param(p, marks=pytest.mark.every_case) for p in ("training", "window"))],
)
def test_steps_with_prompt_rows_run_what_decode_steps_compiled(
    compiled: Counter[str], small, policy: str, monkeypatch
) -> None:
    asked = Counter[str]()
    plain = CompiledParts.compiled

    def count(parts: CompiledParts, part, **rows: int):
        asked[part.__name__] += 1
        return plain(parts, part, **rows)

    monkeypatch.setattr(CompiledParts, "compiled", count)
    told: list[tuple[int, int]] = []  # most rows of a request: as a layer is told, and as it is
    run_layer = regions._Region.run

    def note(region, *rows):
        now = rows[-1]
        told.append((now.rows.max_query_len, int(now.rows.query_start_loc.diff().max())))
        return run_layer(region, *rows)

    monkeypatch.setattr(regions._Region, "run", note)
    made = []
    for mixed in (False, True):
        before = compiled + Counter(), asked + Counter()
        decoder = _decoder(small, num_drafts=3, policy=policy, compiles=True, mixed=mixed)
        with torch.inference_mode():
            decoder.graphs.prepare(SamplingParams(), draft_limits=[3])
        made.append((compiled - before[0], asked - before[1]))
    del made[1][0]["_run"]  # layers, of any number of rows: see test_regions
    assert not made[1][0], "compiled again for prompt rows"
    num_shapes = 2  # of 64 and of 128 rows
    parts = ("_make_inputs", "_run_layers", "_read_logits", "_decide", "_end_round")
    more = dict.fromkeys(parts, num_shapes) | {"_run_pass": 3 * num_shapes}
    assert made[1][1] - made[0][1] == Counter(more)
    assert all(most >= longest for most, longest in told)
    assert max(longest for _, longest in told) > 4, "no pass had prompt rows"
    assert min(most for most, _ in told) <= 4


# Where steps with prompt rows are captured, others are, too.
@pytest.mark.parametrize("mixed", [True, pytest.param(False, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(
    ("head", "policy", "nums_drafts", "sampling"),
    [
        ("chain_n3", "training", [2, 3], SAMPLED),  # the third module and K = 3 find all code
        pytest.param("ttt_n1", "eagle", [2], None, marks=pytest.mark.every_case),
        pytest.param("ttt_n1", "eagle", [2], SAMPLED, marks=pytest.mark.every_case),
    ],
)
def test_compiled_parts_write_what_the_step_writes(
    head, policy, nums_drafts, sampling, mixed, lowered: Counter[str], monkeypatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (16,))  # no step here has more
    target = load_target(f"{LAB}/target", dtype="float64")
    target.model.set_experts_implementation("batched_mm")  # traced whole, as those of a GPU
    models = target, load_heads(f"{LAB}/heads/{head}", target)
    choice = {"draft_sampling": "sample"} if sampling else {}
    num_passes = []
    for num_drafts in nums_drafts:
        made = []
        for compiles in (False, True):
            condition = {"num_drafts": num_drafts, "policy": policy, "mixed": mixed, **choice}
            decoder = _decoder(models, compiles=compiles, **condition)
            texts = _decode(decoder, sampling)
            assert sum(map(sum, (accepted for _, accepted in texts))) > 0, "nothing was accepted"
            assert not mixed or decoder.graphs._mixed.num_graphs > 0
            made.append((texts, _state_of(decoder)))
        assert made[0][0] == made[1][0]
        for plain, by_parts in zip(made[0][1], made[1][1], strict=True):
            torch.testing.assert_close(by_parts, plain, rtol=1e-9, atol=1e-9)
        num_passes.append(lowered["_run_pass"])
    assert num_passes == num_passes[:1] * len(nums_drafts) != [0]


def _state_of(decoder: SpecDecoder) -> list[torch.Tensor]:
    """All that a step leaves for the next one, the spare page and slot aside."""
    state, spare = decoder.slot_state, decoder.cache.num_blocks - 1
    tensors = [stack.keys[:, :spare] for stack in decoder.cache.stacks]
    tensors += [stack.values[:, :spare] for stack in decoder.cache.stacks]
    tensors += [state.text[:-1], state.num_tokens[:-1], state.draft_token_ids[:-1]]
    tensors += [state.hidden[:-1]]
    if state.draft_probs is not None:
        tensors.append(state.draft_probs[:-1])
    return tensors
