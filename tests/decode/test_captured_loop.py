"""Captured steps without a GPU: a stand-in for CUDA graphs calls the step again on its tensors."""

import gc
import itertools
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.config.schema import POLICIES, EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs import decode_graphs as graphs
from mtp_research.decode.graphs import mixed_graphs
from mtp_research.decode.graphs.mixed_graphs import (
    MIXED_ROWS,
    MixedShape,
    large_sizes,
    padding_rows,
    pays_captured,
    row_buckets,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.step import StepResult
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from mtp_research.runtime.captures import no_collection
from tests.decode.loops import PROMPTS, run, texts_of
from tests.decode.test_loop_distribution import chain_target, copied_heads
from tests.decode.toy_grammar import PAIRS

LAB = "assets/lab_tiny"


class Recalled:
    """Stands for a captured graph; every replay gives new tensors, as a copy to the host would."""

    def __init__(self, call: Callable[[], StepResult]) -> None:
        self.call, self.result, self.num_replays = call, call(), 0

    @property
    def graph(self) -> "Recalled":
        return self

    def replay(self) -> None:
        self.result = self.call()
        self.num_replays += 1


def captured_engine(**sizes: int) -> EngineConfig:
    """Whole steps, those with prompt rows as well, as graphs."""
    return EngineConfig(
        **sizes, deferred_output=True, audit=False, cuda_graphs=True, capture_mixed=True
    )


def stand_in_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `engine.cuda_graphs` work on a CPU, by calling the step again."""
    for module in (graphs, mixed_graphs):
        monkeypatch.setattr(module, "capture_call", lambda call, pool: Recalled(call))
    monkeypatch.setattr(graphs, "require_capturable", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_graphs(monkeypatch)


@pytest.fixture(scope="module")
def lab():
    target = load_target(f"{LAB}/target", dtype="float64")
    lab = {
        name: (target, load_heads(f"{LAB}/heads/{name}", target)) for name in ("chain_n3", "ttt_n1")
    }
    small = chain_target(128, sharpness=3)
    return lab | {"copied": (small, copied_heads(small, blur=0.4))}  # drafts often right as well


def _decode(models, policy: str, *, num_drafts: int = 3, **changes: object):
    """Four requests of which three fit, so that the last one's prompt meets decoding ones."""
    target, heads = models
    settings = {
        "max_num_requests": 3,
        "max_prefill_chunk": 4,
        "max_model_len": 64,
        "deferred_output": True,
        "audit": False,
    }
    engine = EngineConfig(**(settings | changes))
    if num_drafts == 0:
        heads = None
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=engine,
    )
    sampling = [
        SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
        for count, temperature in ((9, 0.0), (4, 0.0), (7, 0.8), (8, 0.0))
    ]
    records = run(decoder, PROMPTS, sampling=sampling)
    rounds = {name: record.num_accepted_per_round for name, record in records.items()}
    return decoder, {name: one.output_token_ids for name, one in records.items()}, rounds


def _replays(decoder: SpecDecoder) -> int:
    mixed = decoder.graphs._mixed
    return sum(one.num_replays for one in mixed._graphs.values())


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("head", "policy"),
    [
        *(("copied", policy) for policy in POLICIES),
        ("chain_n3", "training"),
        ("ttt_n1", "eagle"),
    ],
)
def test_steps_with_prompt_rows_decode_what_the_plain_loop_decodes(lab, head, policy) -> None:
    _, *plain = _decode(lab[head], policy)
    decoder, *captured = _decode(lab[head], policy, cuda_graphs=True, capture_mixed=True)
    assert captured == plain
    assert _replays(decoder) >= 4
    assert sum(map(sum, plain[1].values())) > 0, "without accepted drafts this shows little"


@pytest.mark.usefixtures("without_gpu")
def test_steps_of_one_kind_decode_what_the_plain_loop_decodes(lab) -> None:
    _, *plain = _decode(lab["copied"], "training")
    decoder, *captured = _decode(
        lab["copied"], "training", cuda_graphs=True, capture_mixed=True, mixed_batches=False
    )
    assert captured == plain
    assert _replays(decoder) >= 4


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_steps_with_a_grammar_run_beside_captured_ones(lab, policy) -> None:
    grammar = SamplingParams(grammar=PAIRS, stop_token_ids=(1, 2), max_new_tokens=6)
    plain = SamplingParams(max_new_tokens=16)
    sampling = [plain, grammar, grammar, plain]
    target, heads = lab["copied"]
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0)), sampling=sampling)
    )
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy),
        engine=captured_engine(max_num_requests=3),
    )
    assert texts_of(run(decoder, sampling=sampling)) == expected
    assert sum(one.num_replays for one in decoder.graphs._graphs.values()) >= 5


@pytest.mark.usefixtures("without_gpu")
def test_without_drafts_and_with_preemption(lab) -> None:
    _, *plain = _decode(lab["copied"], "training", num_drafts=0)
    decoder, *captured = _decode(
        lab["copied"], "training", num_drafts=0, cuda_graphs=True, capture_mixed=True
    )
    assert captured == plain
    assert _replays(decoder) >= 4
    tight = {"block_size": 4, "num_blocks": 14}
    _, *plain = _decode(lab["copied"], "training", **tight)
    decoder, *captured = _decode(
        lab["copied"], "training", cuda_graphs=True, capture_mixed=True, **tight
    )
    assert decoder.stats.num_preemptions > 0
    assert captured[0] == plain[0]


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("policy", ["eagle", "window"])
def test_bucket_beyond_a_text_has_more_padding_requests(lab, monkeypatch, policy) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (128,))
    _, *plain = _decode(lab["copied"], policy)
    decoder, *captured = _decode(lab["copied"], policy, cuda_graphs=True, capture_mixed=True)
    assert captured == plain
    assert _replays(decoder) >= 4


@pytest.mark.usefixtures("without_gpu")
def test_small_budget_has_the_smallest_bucket(lab) -> None:
    few = {"max_num_batched_tokens": 16, "cuda_graphs": True, "capture_mixed": True}
    decoder, *captured = _decode(lab["copied"], "training", **few)
    assert captured == list(_decode(lab["copied"], "training", max_num_batched_tokens=16)[1:])
    assert _replays(decoder) >= 4


@pytest.mark.usefixtures("without_gpu")
def test_buckets_are_captured_before_the_first_step_and_large_steps_are_left_out(
    lab, monkeypatch
) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4, 8))
    target, heads = lab["copied"]
    engine = captured_engine(max_num_requests=2, max_model_len=64, max_num_batched_tokens=64)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=3), engine=engine)
    sampling = SamplingParams(max_new_tokens=3)
    with torch.inference_mode():
        decoder.graphs.prepare(sampling, draft_limits=[3])
    mixed = decoder.graphs._mixed
    assert len(mixed._graphs) == 2
    list(decoder.generate([[5] * 9], sampling=sampling))
    assert _replays(decoder) == 0
    list(decoder.generate([[5] * 3, [6] * 2], sampling=sampling))
    assert _replays(decoder) == 1
    assert len(mixed._graphs) == 2


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("head", "policy"), [("chain_n3", "training"), ("chain_n3", "window"), ("ttt_n1", "eagle")]
)
def test_steps_above_the_buckets_decode_what_the_plain_loop_decodes(
    lab, monkeypatch, head: str, policy: str
) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4,))
    _, *plain = _decode(lab[head], policy)
    decoder, *padded = _decode(lab[head], policy, cuda_graphs=True, capture_mixed=True)
    assert padded == plain
    assert _replays(decoder) < decoder.stats.num_steps  # most of the steps with prompt rows
    assert max(shape.num_rows for shape in decoder.graphs._mixed._shapes) == 512


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_large_steps_have_shapes_that_ran_in_the_warm_up(lab, monkeypatch, num_drafts) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4, 8))
    target, heads = lab["chain_n3"]
    engine = captured_engine(max_num_requests=3, max_model_len=64, max_num_batched_tokens=40)
    spec = SpecSettings(num_speculative_tokens=num_drafts)
    decoder = SpecDecoder(target, heads if num_drafts else None, spec=spec, engine=engine)
    shapes: set[tuple] = set()
    run_step = decoder.device_step.run
    monkeypatch.setattr(decoder, "_inputs", None)  # of steps that run as they come

    def noting(inputs, *args, **kwargs):
        rows = (len(inputs.input_ids), len(inputs.slots), inputs.block_table.shape[1])
        shapes.add((*rows, inputs.max_query_len, inputs.base_rows and inputs.base_rows[1:]))
        return run_step(inputs, *args, **kwargs)

    monkeypatch.setattr(decoder.device_step, "run", noting)
    sampling = SamplingParams(max_new_tokens=5)
    decoder.warm_up(sampling)
    warm, builds = set(shapes), decoder.num_builds
    shapes.clear()
    prompts = [[number + 2] * length for number, length in enumerate((9, 31, 1, 17, 25, 13, 2))]
    list(decoder.generate(prompts, sampling=sampling))
    assert {rows for rows, *_ in shapes} & {12, 16, 20, 24, 28, 32, 36, 40}, "no large step ran"
    assert shapes <= warm
    assert decoder.num_builds == builds


@pytest.mark.usefixtures("without_gpu")
def test_warm_up_writes_no_block_and_no_slot_that_a_request_can_have(lab, monkeypatch) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4,))
    target, heads = lab["chain_n3"]
    engine = captured_engine(max_num_requests=3, max_model_len=64, max_num_batched_tokens=16)
    decoder = SpecDecoder(target, heads, spec=SpecSettings(num_speculative_tokens=3), engine=engine)
    cache, state = decoder.cache, decoder.slot_state
    monkeypatch.setattr(cache, "fill", lambda _: None)
    for pool in cache._pools:
        pool[:, :-1] = 7.0
    tensors = (state.text, state.num_tokens, state.draft_token_ids, state.hidden)
    before = [tensor[:-1].clone() for tensor in tensors]
    decoder.warm_up(SamplingParams(max_new_tokens=5))
    assert any(pool[:, -1].any() for pool in cache._pools), "the warm-up ran nothing"
    assert all((pool[:, :-1] == 7.0).all() for pool in cache._pools)
    assert all(torch.equal(tensor[:-1], old) for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_requests_that_ended_leave_a_smaller_captured_batch(lab, num_drafts: int) -> None:
    target, heads = lab["chain_n3"]
    engine = captured_engine(max_num_requests=32, max_model_len=64)
    spec = SpecSettings(num_speculative_tokens=num_drafts)
    decoder = SpecDecoder(target, heads if num_drafts else None, spec=spec, engine=engine)
    live_by_bucket: dict[int, set[int]] = {}
    replay = decoder.graphs._replay

    def noting(entries, params, *rest):
        before = {key: one.num_replays for key, one in decoder.graphs._graphs.items()}
        result = replay(entries, params, *rest)
        (bucket,) = {
            key[0]
            for key, one in decoder.graphs._graphs.items()
            if one.num_replays > before.get(key, 0)
        }
        live_by_bucket.setdefault(bucket, set()).add(len(entries))
        return result

    decoder.graphs._replay = noting
    for number in range(32):  # 32 live, then 20, 12, 5 and 1
        length = next(
            n for most, n in ((12, 4), (20, 12), (27, 20), (31, 28), (32, 36)) if number < most
        )
        sampling = SamplingParams(max_new_tokens=length)
        decoder.add_request([5 + number, 9], sampling=sampling, request_id=str(number))
    while decoder.has_work:
        decoder.step()
    for bucket, live in live_by_bucket.items():
        smaller = [size for size in (2, 4, 8, 16, 24, 32) if size < bucket]
        assert min(live) > max(smaller, default=0), f"{live} at the graph of {bucket}"
    assert {2, 8, 16, 24, 32} <= set(live_by_bucket)
    assert 5 in live_by_bucket[8]


def test_large_steps_are_padded_by_an_eighth_at_most() -> None:
    assert large_sizes(1024, most=2500) == [*range(1152, 2049, 128), 2304, 2500]
    assert large_sizes(1024, most=1024) == []
    sizes = [1024, *large_sizes(1024, most=8192)]
    assert sizes[-1] == 8192
    assert len(sizes) == 25
    assert all(larger <= size * 9 / 8 for size, larger in itertools.pairwise(sizes))


def test_small_targets_have_larger_steps_captured() -> None:
    largest = {
        num_parameters: max(
            r for r in MIXED_ROWS if pays_captured(r, num_parameters=num_parameters)
        )
        for num_parameters in (135_000_000, 1_500_000_000, 7_000_000_000)
    }
    assert largest == {135_000_000: 4096, 1_500_000_000: 2048, 7_000_000_000: 1024}


@pytest.mark.parametrize(("max_rows", "largest"), [(40, 64), (1024, 1024), (1100, 1536)])
def test_steps_are_captured_up_to_the_first_bucket_that_holds_all_rows(
    max_rows: int, largest: int
) -> None:
    sizes = row_buckets(max_rows, num_parameters=135_000_000)
    assert sizes == [rows for rows in MIXED_ROWS if rows <= largest]
    assert row_buckets(4096, num_parameters=7_000_000_000)[-1] == 1024


@given(st.integers(1, 1024), st.integers(1, 70), st.integers(16, 600), st.integers(0, 5))
def test_padding_requests_take_all_rows_that_are_left(
    num_rows: int, max_requests: int, max_text: int, num_drafts: int
) -> None:
    bucket = next(rows for rows in MIXED_ROWS if num_rows <= rows)
    shape = MixedShape.of(
        bucket, max_requests=max_requests, max_text=max_text, num_rerun=num_drafts
    )
    most_entries = min(max_requests, num_rows)
    left = padding_rows(bucket - num_rows, shape.num_requests - most_entries, most=shape.longest)
    assert sum(left) == bucket - num_rows
    assert max(left, default=0) + num_drafts <= max_text  # draft rows lie behind


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_cycle_is_collected_while_a_step_is_captured(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        found = []
        with suppress(ZeroDivisionError), no_collection():
            found.append(gc.isenabled())
            found.append(1 // 0)
        assert found == [False]
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()
