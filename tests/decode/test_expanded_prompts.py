"""Prompts of latent attention read expanded in the loop: texts are those of absorbed prompts."""

import pytest
import torch
from mtp_research.kernels.latent import expanded_attention

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs import mixed_graphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention import paged
from tests import tiny
from tests.decode.loops import run
from tests.decode.test_captured_loop import stand_in_for_graphs

SHARED = [5, 9, 77, 31, 2, 64, 8, 100, 3, 12, 99, 1, 7, 44, 3, 8, 21, 90, 6]
PROMPTS = [[*SHARED, 11, 12], [8, 8, 8], [*SHARED, 13, 14, 15, 16, 17], [*SHARED[:9], 4]]


@pytest.fixture(scope="module", params=["glm4_moe_lite", "deepseek_v3"])
def models(request: pytest.FixtureRequest):
    target = tiny.tiny_target(request.param, dtype=torch.float64)
    return target, tiny.tiny_heads(target, num_mtp_modules=1)


class Seen:
    """Spans of the prompts that were read expanded, and how many rows decoded beside them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, expands: bool) -> None:
        self.prompts: list[expanded_attention.Prompts] = []
        attend = expanded_attention.attend_expanded

        def noting(query, weight, cache, plan, **options):
            self.prompts.append(plan.prompts)
            return attend(query, weight, cache, plan, **options)

        monkeypatch.setattr(expanded_attention, "attend_expanded", noting)
        monkeypatch.setattr(paged, "pays_expanded", lambda *_: expands)

    @property
    def spans(self) -> list[expanded_attention.Span]:
        return [span for prompts in self.prompts for span in prompts.spans]


def decode(models, **engine: object):
    """Four requests, three at a time, in chunks of up to 8 rows: the last prompt meets decoding."""
    target, heads = models
    settings = {"max_num_requests": 3, "max_prefill_chunk": 8, "max_model_len": 64}
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy="eagle", num_speculative_tokens=2),
        engine=EngineConfig(**settings | {"audit": False, "block_size": 4} | engine),
    )
    sampling = [SamplingParams(max_new_tokens=count) for count in (9, 4, 7, 8)]
    texts = []
    for _ in range(2):  # with a prefix cache, the second time its blocks are found
        records = run(decoder, PROMPTS, sampling=sampling)
        texts.append(
            {n: (one.output_token_ids, one.num_accepted_per_round) for n, one in records.items()}
        )
        decoder.stats.records.clear()
    return texts, decoder


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"deferred_output": True},
        {"prefix_caching": True},
        {"mixed_batches": False},
        {"num_blocks": 16},  # some are preempted and run again
    ],
    ids=str,
)
def test_texts_are_those_of_absorbed_prompts(models, engine, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        never = Seen(patch, expands=False)
        expected, _ = decode(models, **engine)
        assert not never.prompts
    seen = Seen(monkeypatch, expands=True)
    found, decoder = decode(models, **engine)
    assert found == expected
    assert found[0] == found[1]
    assert any(span.first > 0 for span in seen.spans), "no chunk behind a context"
    assert any(len(prompts.spans) > 1 for prompts in seen.prompts), "no two prompts in a step"
    if engine.get("mixed_batches", True):
        assert any(prompts.num_others for prompts in seen.prompts), "nobody decoded beside them"
    if "prefix_caching" in engine:
        assert decoder.prefix_cache_stats.num_cached_tokens > 0
        assert any(span.first and span.first % 8 for span in seen.spans), "no hit inside a chunk"
    if "num_blocks" in engine:
        assert decoder.stats.num_preemptions > 0


def test_large_captured_steps_read_prompts_expanded(models, monkeypatch) -> None:
    stand_in_for_graphs(monkeypatch)
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (4,))
    with monkeypatch.context() as patch:
        never = Seen(patch, expands=False)
        expected, _ = decode(models)
        assert not never.prompts
    seen = Seen(monkeypatch, expands=True)
    found, _ = decode(models, deferred_output=True, cuda_graphs=True, capture_mixed=True)
    assert found == expected
    assert any(span.first > 0 for span in seen.spans)
    assert any(prompts.num_others for prompts in seen.prompts)
    # The absorbed rows beside them are launched in one shape, whatever there is.
    assert len({prompts[2:] for prompts in seen.prompts if prompts.num_launched > 9}) == 1


@pytest.mark.parametrize("bound", [0.0, 1e9])
def test_steps_leave_the_graph_where_expanding_saves_more_than_launches(
    models, bound, monkeypatch
) -> None:
    stand_in_for_graphs(monkeypatch)
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (64,))
    monkeypatch.setattr(mixed_graphs, "_LAUNCH_BOUND", bound)
    monkeypatch.setattr(
        mixed_graphs, "products_saved", lambda spans, _: sum(s.first for s in spans)
    )
    expected, _ = decode(models)
    seen = Seen(monkeypatch, expands=True)
    found, decoder = decode(models, deferred_output=True, cuda_graphs=True, capture_mixed=True)
    assert found == expected
    assert bool(seen.prompts) is (bound == 0)
    replays = sum(one.num_replays for one in decoder.graphs._mixed._graphs.values())
    assert replays > 0, "prompts without context are captured still"
    if seen.prompts:
        assert all(any(span.first for span in prompts.spans) for prompts in seen.prompts)


def test_heads_of_all_latent_layers_are_counted(models) -> None:
    ((dims, count),) = mixed_graphs.latent_heads(models[0].model).items()
    assert dims == expanded_attention.LatentDims(latent=16, rope=8, nope=16, value=16)
    assert count == 4 * models[0].config.num_hidden_layers
    assert not mixed_graphs.latent_heads(tiny.tiny_target("qwen3").model)


def test_deterministic_attention_stays_absorbed(models, monkeypatch) -> None:
    seen = Seen(monkeypatch, expands=True)
    target = models[0]
    spec = SpecSettings(num_speculative_tokens=0)
    engine = EngineConfig(deterministic=True, max_model_len=64, audit=False)
    decoder = SpecDecoder(target, spec=spec, engine=engine)
    run(decoder, PROMPTS[:2], sampling=SamplingParams(max_new_tokens=2))
    assert not seen.prompts
