"""Captured steps decode what the loop without graphs decodes; settings they cannot follow."""

from collections.abc import Sequence

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention import attention_launch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import BatchTableLength
from mtp_research.decode.graphs import mixed_graphs
from mtp_research.decode.graphs.capture import (
    Kind,
    SharedSteps,
    StepShape,
    Wish,
    bucket_of,
    captured_sizes,
    require_grouped_experts,
    require_no_host_loop,
)
from mtp_research.decode.graphs.decode_graphs import StepGraphs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention import paged
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of

needs_gpu = pytest.mark.gpu


@pytest.mark.parametrize(
    ("wanted", "sizes"),
    [(None, (2, 4, 8, 12)), ([64], (12,)), ([4], (4,)), ([4, 8, 16, 32], (4, 8, 12))],
)
def test_captured_sizes_stay_within_the_largest_batch(wanted, sizes: tuple[int, ...]) -> None:
    assert captured_sizes(12, wanted=wanted) == sizes
    for num_requests in range(1, sizes[-1] + 1):
        bucket = bucket_of(num_requests, sizes)
        assert bucket in sizes
        assert num_requests <= bucket
        assert all(size < num_requests for size in sizes if size < bucket)


def test_powers_of_two_begin_with_two_and_end_at_a_largest_batch_that_is_one() -> None:
    assert captured_sizes(8, wanted=None) == (2, 4, 8)
    assert captured_sizes(1, wanted=None) == (1,)


def test_sizes_from_sixteen_on_have_another_one_between_them() -> None:
    assert captured_sizes(64, wanted=None) == (2, 4, 8, 16, 24, 32, 48, 64)
    assert captured_sizes(20, wanted=None) == (2, 4, 8, 16, 20)


def test_capture_of_every_bucket_is_told_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpecDecoder(tiny.tiny_target("qwen3"), spec=SpecSettings(num_speculative_tokens=0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    graphs = StepGraphs(
        decoder.device_step,
        batch_sizes=(1, 2, 4),
        num_table_blocks=2,
    )
    lines: list[str] = []

    def capture(bucket: int, *_: object) -> None:
        assert len(lines) == {4: 0, 2: 1, 1: 2}[bucket]  # not all of them at the end
        graphs._capture_s += 10.0 * bucket + 0.25

    monkeypatch.setattr(graphs, "_capture", capture)
    graphs.prepare(SamplingParams(), draft_limits=[0], log=lines.append)
    assert lines == [
        "captured 1 of 3: batch 4, 40.2 s, 40 s so far",
        "captured 2 of 3: batch 2, 20.2 s, 60 s so far",
        "captured 3 of 3: batch 1, 10.2 s, 71 s so far",
    ]
    graphs.prepare(SamplingParams(), draft_limits=[0])  # is there already, and nobody listens
    assert graphs.capture_s == 70.75
    lines.clear()
    monkeypatch.setattr(graphs, "_captured", lambda *_, **__: None)
    graphs.prepare(SamplingParams(), draft_limits=[0], num_requests=2, log=lines.append)
    assert [line.split(",")[0] for line in lines] == [
        "captured 1 of 2: batch 2",
        "captured 2 of 2: batch 1",
    ]


class Ranks:
    """Two ranks' hosts, each of which says one thing before a step."""

    kinds = (Kind(False, 2, 3), Kind(False, 4, 3), Kind(True, 64, 3))

    def __init__(self) -> None:
        self.hosts = [SharedSteps(self.kinds) for _ in range(2)]

    def agree(
        self, *wishes: Wish, lacks: Sequence[Sequence[int]] = ((0, 0, 0),) * 2
    ) -> StepShape | None:
        said = [host.say(*one) for host, *one in zip(self.hosts, wishes, lacks, strict=True)]
        most = [max(numbers) for numbers in zip(*said, strict=True)]
        first, second = (host.agreed(most) for host in self.hosts)
        assert first == second
        return first


IDLE = Wish(0, False, 64, 0, False, False)
TWO = Wish(2, False, 64, 3, False, False)
PROMPT = Wish(1, True, 256, 1, False, False)


@pytest.mark.parametrize(
    ("wishes", "shape"),
    [
        ((IDLE, IDLE), None),
        ((IDLE, TWO), StepShape(2, 0, 3)),
        ((TWO, TWO._replace(num_requests=3, draft_limit=1)), StepShape(3, 0, 3)),
        ((TWO, PROMPT), StepShape(2, 256, 3)),
        ((IDLE, PROMPT), StepShape(1, 256, 1)),
        ((TWO, IDLE._replace(is_unknown=True)), None),
        ((TWO._replace(cannot_mix=True), PROMPT), None),
        ((TWO._replace(cannot_mix=True), TWO), StepShape(2, 0, 3)),
    ],
)
def test_ranks_replay_what_holds_the_most_of_any_of_them(
    wishes: tuple[Wish, Wish], shape: StepShape | None
) -> None:
    assert Ranks().agree(*wishes) == shape
    assert Ranks().agree(*reversed(wishes)) == shape


def test_ranks_capture_what_one_of_them_lacks() -> None:
    shape = Ranks().agree(IDLE, TWO, lacks=[(0, 1, 0), (1, 0, 0)])
    assert shape is not None
    assert shape.missing == {Kind(False, 2, 3), Kind(False, 4, 3)}


@pytest.mark.parametrize("second", [None, Kind(False, 4, 3), Kind(False, 2, 2), Kind(True, 2, 3)])
def test_ranks_that_replayed_different_steps_are_told_so(second: Kind | None) -> None:
    ranks = Ranks()
    for host in ranks.hosts:
        host.note_replay(Kind(False, 2, 3))
    assert ranks.agree(TWO, IDLE) is not None
    ranks.hosts[0].note_replay(Kind(False, 2, 3))
    if second is not None:
        ranks.hosts[1].note_replay(second)
    with pytest.raises(AssertionError, match="ranks replayed different steps"):
        ranks.agree(TWO, IDLE)


def test_graphs_without_a_gpu_are_refused() -> None:
    engine = EngineConfig(cuda_graphs=True, deferred_output=True, audit=False)
    with pytest.raises(EnvironmentFault, match="needs the model on a CUDA GPU"):
        SpecDecoder(
            tiny.tiny_target("qwen3"), spec=SpecSettings(num_speculative_tokens=0), engine=engine
        )


@pytest.mark.parametrize("family", ["longcat_flash", "step3p5"])
def test_experts_in_a_loop_of_the_library_are_refused_by_name(family: str) -> None:
    engine = EngineConfig(cuda_graphs=True, deferred_output=True, audit=False)
    with pytest.raises(ConfigError, match=rf"got family {family}, whose \w+Experts .* Python"):
        SpecDecoder(
            tiny.tiny_target(family), spec=SpecSettings(num_speculative_tokens=0), engine=engine
        )


def test_loop_over_experts_is_refused_where_a_product_is_missing_for_the_dtype_only() -> None:
    target = tiny.tiny_target("glm4_moe", dtype=torch.float32)
    models = [target.model, tiny.tiny_heads(target)]
    require_no_host_loop(models, family_name="glm4_moe")
    with pytest.raises(ConfigError, match="got float32, in which transformers runs Glm4MoeExperts"):
        require_grouped_experts(models, dtype="float32")
    target.model.set_experts_implementation("grouped_mm")
    require_grouped_experts([target.model], dtype="float32")
    with pytest.raises(ConfigError, match="got float32"):  # heads have a configuration of their own
        require_grouped_experts(models, dtype="float32")


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3", dtype=torch.float32)


def _heads(target: Target, num_mtp_modules: int = 3) -> MTPHeads:
    """Target and heads on the GPU, made on the CPU as everywhere in the tests."""
    target.model.to("cpu")
    heads = tiny.tiny_heads(target, num_mtp_modules=num_mtp_modules)
    target.model.to("cuda")
    return heads.to("cuda")


def _engine(**changes: object) -> EngineConfig:
    settings = {
        "max_num_requests": 3,
        "max_prefill_chunk": 4,
        "deferred_output": True,
        "audit": False,
    }
    return EngineConfig(**(settings | changes))


@needs_gpu
@pytest.mark.parametrize("compile_step", [False, True])
@pytest.mark.parametrize(("policy", "num_modules"), [("training", 3), ("eagle", 1), ("eagle", 3)])
def test_graphs_decode_what_the_plain_loop_decodes(
    target, policy: str, num_modules: int, compile_step: bool
) -> None:
    heads = _heads(target, num_modules)
    sampling = [
        SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
        for count, temperature in ((24, 0.0), (9, 0.0), (17, 0.8), (30, 0.0))
    ]

    def decode(**changes: object):
        decoder = SpecDecoder(
            target, heads, spec=SpecSettings(policy=policy), engine=_engine(**changes)
        )
        return decoder, run(decoder, PROMPTS, sampling=sampling)

    _, plain = decode()
    decoder, captured = decode(cuda_graphs=True, compile=compile_step)
    assert texts_of(captured) == texts_of(plain)
    assert {name: r.num_accepted_per_round for name, r in captured.items()} == {
        name: r.num_accepted_per_round for name, r in plain.items()
    }
    assert decoder.graphs.num_graphs >= 2


@needs_gpu
@pytest.mark.parametrize("compile_step", [False, True])
def test_graphs_of_every_number_of_drafts_decode_what_the_plain_loop_decodes(
    target, compile_step: bool
) -> None:
    heads = _heads(target)
    rule = BatchTableLength(((1, 3), (2, 1), (3, 0)))
    spec = SpecSettings(policy="training", draft_length=rule)
    sampling = [SamplingParams(max_new_tokens=count) for count in (24, 9, 17, 30)]
    texts = []
    for changes in ({}, {"cuda_graphs": True, "compile": compile_step, "capture_mixed": True}):
        decoder = SpecDecoder(target, heads, spec=spec, engine=_engine(**changes))
        texts.append(texts_of(run(decoder, PROMPTS, sampling=sampling)))
    assert texts[0] == texts[1]


@needs_gpu
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.9}, {"top_k": 12}, {"top_k": 12, "top_p": 0.9}], ids=str
)
def test_compiled_steps_truncate_as_the_plain_loop_does(
    target: Target, cut: dict[str, float]
) -> None:
    heads = _heads(target)
    sampling = [
        SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed, **cut)  # type: ignore[arg-type]
        for seed in range(4)
    ]
    texts = []
    for changes in ({}, {"cuda_graphs": True, "compile": True}):
        decoder = SpecDecoder(target, heads, spec=SpecSettings(), engine=_engine(**changes))
        texts.append(texts_of(run(decoder, PROMPTS, sampling=sampling)))
    assert texts[0] == texts[1]


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_compiled_steps_of_a_large_vocabulary_decode_what_the_plain_loop_decodes(
    temperature: float,
) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32, vocab_size=49_152)
    heads = _heads(target, num_mtp_modules=1)
    sampling = [
        SamplingParams(max_new_tokens=12, temperature=temperature, seed=seed) for seed in range(4)
    ]
    texts = []
    for changes in ({}, {"cuda_graphs": True, "compile": True, "capture_mixed": True}):
        decoder = SpecDecoder(target, heads, spec=SpecSettings(), engine=_engine(**changes))
        texts.append(texts_of(run(decoder, PROMPTS, sampling=sampling)))
    assert texts[0] == texts[1]


@needs_gpu
@pytest.mark.parametrize("policy", ["training", "eagle", "window"])
def test_captured_steps_with_prompt_rows_decode_what_the_plain_loop_decodes(
    target, policy: str
) -> None:
    heads = _heads(target)
    sampling = [
        SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
        for count, temperature in ((24, 0.0), (9, 0.0), (17, 0.8), (30, 0.0))
    ]

    def decode(**changes: object):
        decoder = SpecDecoder(
            target, heads, spec=SpecSettings(policy=policy), engine=_engine(**changes)
        )
        return run(decoder, PROMPTS, sampling=sampling)

    plain, captured = decode(), decode(cuda_graphs=True, capture_mixed=True)
    assert texts_of(captured) == texts_of(plain)


@needs_gpu
@pytest.mark.parametrize("recipe", ["qwen3", "glm4_moe_lite"])
def test_nothing_is_built_after_the_warm_up(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_graphs, "MIXED_ROWS", (64,))
    monkeypatch.setattr(paged, "pays_expanded", lambda *_: True)  # of latents, whatever the size
    dense = {"mlp_layer_types": ["dense", "dense"]} if recipe == "glm4_moe_lite" else {}
    target = tiny.tiny_target(recipe, dtype=torch.float32, **dense)
    target.model.to("cuda")
    sizes = {"max_num_requests": 5, "max_prefill_chunk": 96, "max_num_batched_tokens": 300}
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 128, (length,), generator=draw).tolist()
        for length in (17, 150, 96, 3, 200, 77, 131, 64, 199, 8, 33)
    ]
    sampling = SamplingParams(max_new_tokens=12)
    texts = []
    for captured in (False, True):
        settings = {"cuda_graphs": captured, "compile": captured, "capture_mixed": captured}
        engine = _engine(**sizes, **settings, max_model_len=256)
        spec = SpecSettings(num_speculative_tokens=0)
        decoder = SpecDecoder(target, spec=spec, engine=engine)
        decoder.warm_up(sampling)
        builds = decoder.num_builds
        found = decoder.generate(prompts, sampling=sampling)
        texts.append({one.request_id: one.token_ids for one in found})
        assert decoder.num_builds == builds
    assert texts[0] == texts[1]


@needs_gpu
@pytest.mark.parametrize("compile_step", [False, True])
def test_requests_that_share_splits_decode_what_others_decode(
    target: Target, compile_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = _heads(target)
    draw = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(3, 128, (length,), generator=draw).tolist() for length in (300, 6, 40, 150)
    ]
    sampling = SamplingParams(max_new_tokens=24)
    texts, shares = [], []
    choose = attention_launch.choose_num_at_once

    def note_share(*sizes: int, **others: int) -> int:
        shares.append(choose(*sizes, **others))
        return shares[-1]

    monkeypatch.setattr(attention_launch, "choose_num_at_once", note_share)
    for captured in (False, True):
        if captured:  # on a device that so few requests fill
            monkeypatch.setattr(checks, "num_multiprocessors", lambda _: 3)
            shares.clear()
        engine = _engine(
            max_prefill_chunk=64,
            max_model_len=512,
            cuda_graphs=captured,
            compile=captured and compile_step,
        )
        decoder = SpecDecoder(target, heads, engine=engine)
        texts.append(texts_of(run(decoder, prompts, sampling=sampling)))
        assert any(shares) == captured
    assert texts[0] == texts[1]


@needs_gpu
def test_graphs_survive_preemption(target) -> None:
    heads = _heads(target)
    sampling = SamplingParams(max_new_tokens=20)
    plain = SpecDecoder(target, heads, engine=_engine(block_size=16))
    wanted = texts_of(run(plain, PROMPTS, sampling=sampling))
    decoder = SpecDecoder(
        target, heads, engine=_engine(block_size=16, num_blocks=5, cuda_graphs=True)
    )
    assert texts_of(run(decoder, PROMPTS, sampling=sampling)) == wanted
    assert decoder.stats.num_preemptions > 0


@needs_gpu
@pytest.mark.parametrize("captured", [False, True])
def test_requests_are_admitted_without_waiting_for_the_device(target, captured: bool) -> None:
    engine = _engine(cuda_graphs=captured, capture_mixed=captured, max_model_len=256)
    decoder = SpecDecoder(target, _heads(target), engine=engine)
    sampling = [SamplingParams(max_new_tokens=9 + 3 * i) for i in range(len(PROMPTS))]
    wanted = texts_of(run(decoder, PROMPTS, sampling=sampling))  # captures what it needs
    decoder.stats.records.clear()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert texts_of(run(decoder, PROMPTS, sampling=sampling)) == wanted
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
def test_steady_decoding_never_waits_for_the_device(target) -> None:
    decoder = SpecDecoder(
        target, _heads(target), engine=_engine(cuda_graphs=True, max_model_len=256)
    )
    for prompt in PROMPTS[:3]:
        decoder.add_request(prompt, sampling=SamplingParams(max_new_tokens=200))
    for _ in range(12):
        decoder.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert decoder.stats.num_emitted_tokens > 60
