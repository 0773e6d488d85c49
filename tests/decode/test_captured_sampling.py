"""Processors, log-probabilities and grammars in captured steps: what the loop without graphs says.

Graphs are played on the CPU as in `test_captured_loop`; tests marked `gpu` capture them.
"""

from collections.abc import Callable
from operator import is_

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import BatchTableLength
from mtp_research.decode.graphs.capture import StaticParams
from mtp_research.decode.sampling.sampling import batch_tensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from tests import tiny
from tests.decode.loops import PROMPTS
from tests.decode.test_captured_loop import LAB, stand_in_for_graphs
from tests.decode.test_loop_distribution import chain_target, copied_heads
from tests.decode.test_loop_processors import PARAMS
from tests.decode.toy_grammar import PAIRS, WORD

EXTRAS = PARAMS | {
    "logprobs": {"logprobs": 3},
    "processed-logprobs": {"logprobs": 2, "logprobs_kind": "processed"},
    "all-logprobs": PARAMS["all"] | {"logprobs": 3, "logprobs_kind": "processed"},
}
GRAMMARS = {
    "grammar": {"grammar": PAIRS, "stop_token_ids": (1, 2)},
    "grammar-all": {
        **{"grammar": PAIRS, "stop_token_ids": (1, 2), "min_tokens": 4, "logprobs": 2},
        **PARAMS["repetition"],
        **PARAMS["dry"],
    },
}
ENGINE = {
    **{"max_num_requests": 3, "max_prefill_chunk": 4, "max_model_len": 64},
    **{"deferred_output": True, "audit": False},
}
CAPTURED = {"cuda_graphs": True, "capture_mixed": True}


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_graphs(monkeypatch)


@pytest.fixture(scope="module")
def lab():
    target = chain_target(128, sharpness=3)
    return target, copied_heads(target, blur=0.4)  # drafts that are often right


@pytest.fixture(scope="module")
def trained():
    target = load_target(f"{LAB}/target", dtype="float64")
    return target, load_heads(f"{LAB}/heads/chain_n3", target)


def _requests(fields: dict, temperature: float) -> list[SamplingParams]:
    """Two requests that use something, a plain one, and one that differs in kind."""
    word = {"grammar": WORD, "stop_token_ids": (1, 2)} if "grammar" in fields else {"min_p": 0.1}
    return [
        SamplingParams(max_new_tokens=12, temperature=temperature, seed=1, **fields),
        SamplingParams(max_new_tokens=16, temperature=temperature, seed=2),
        SamplingParams(max_new_tokens=7, **fields),
        SamplingParams(max_new_tokens=9, temperature=temperature, seed=3, presence_penalty=1.0)
        if "grammar" not in fields
        else SamplingParams(max_new_tokens=9, **word),
    ]


def _serve(
    decoder: SpecDecoder, sampling: list[SamplingParams], *, aborts_at: int | None = None
) -> dict[str, tuple]:
    """Texts, rounds and log-probabilities; one request may be aborted on the way.

    Four requests, of which three fit, so that the last one's prompt meets decoding ones.
    """
    requests = [
        decoder.add_request(prompt, sampling=one, request_id=str(index))
        for index, (prompt, one) in enumerate(zip(PROMPTS, sampling, strict=True))
    ]
    num_steps = 0
    while decoder.has_work:
        decoder.step()
        decoder.check_integrity()
        num_steps += 1
        if num_steps == aborts_at:
            decoder.abort(requests[0])
    return {
        record.request_id: (
            record.output_token_ids,
            record.finish_reason,
            record.num_accepted_per_round,
            record.token_logprobs,
        )
        for record in decoder.stats.records
    }


def _decoder(models, policy: str, num_drafts: int, **changes: object) -> SpecDecoder:
    target, heads = models
    spec = {"policy": policy, "num_speculative_tokens": num_drafts}
    engine = {key: value for key, value in changes.items() if key not in ("draft_length", "verify")}
    spec |= {key: value for key, value in changes.items() if key not in engine}
    return SpecDecoder(
        target,
        heads if num_drafts else None,
        spec=SpecSettings(**spec),  # pyright: ignore[reportArgumentType]
        engine=EngineConfig(**(ENGINE | engine)),
    )


def _watched(decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was replayed, and that none with a decoding request alone was not."""
    replay, were_replayed = decoder._replay, list[bool]()

    def watched(entries, params, shape):
        result = replay(entries, params, shape)
        were_replayed.append(result is not None)
        has_prompt_rows = any(entry.is_prefill for entry in entries)
        assert result is not None or has_prompt_rows, "a decoding step was not replayed"
        return result

    monkeypatch.setattr(decoder, "_replay", watched)
    return were_replayed


def _assert_same(found: dict[str, tuple], expected: dict[str, tuple], *, off: float) -> None:
    """Texts and rounds are equal; log-probabilities up to rounding, as a padded batch rounds."""
    assert {name: one[:-1] for name, one in found.items()} == {
        name: one[:-1] for name, one in expected.items()
    }
    for name, (*_, logprobs) in expected.items():
        if logprobs is None:
            assert found[name][-1] is None
            continue
        for ours, theirs in zip(found[name][-1], logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=off)
            assert [value for _, value in ours.top] == pytest.approx(
                [value for _, value in theirs.top], abs=off
            )


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("name", "policy", "num_drafts", "temperature"),
    [
        *((name, "training", 3, 0.9) for name in (*EXTRAS, *GRAMMARS)),
        *(
            (name, policy, num_drafts, temperature)
            for name in ("all-logprobs", "grammar-all")
            for policy, num_drafts in (("eagle", 0), ("eagle", 3), ("training", 3))
            for temperature in (0.0, 0.9)
            if (policy, temperature) != ("training", 0.9)
        ),
    ],
)
def test_captured_steps_say_what_the_loop_at_once_says(
    lab, name: str, policy: str, num_drafts: int, temperature: float, monkeypatch
) -> None:
    sampling = _requests((EXTRAS | GRAMMARS)[name], temperature)
    expected = _serve(_decoder(lab, policy, num_drafts, deferred_output=False), sampling)
    rounds = {count for _, _, accepted, _ in expected.values() for count in accepted}
    assert name != "logprobs" or rounds > {0, 1}, "some drafts must be right, some wrong"
    decoder = _decoder(lab, policy, num_drafts, **CAPTURED)
    were_replayed = _watched(decoder, monkeypatch)
    _assert_same(_serve(decoder, sampling), expected, off=1e-5)
    assert were_replayed.count(True) > 5
    assert all(were_replayed) == (name in EXTRAS)
    assert bool(decoder.graphs._targets) == (name in GRAMMARS)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("all-logprobs", {"block_size": 4, "num_blocks": 14}, id="preemption"),
        pytest.param("all-logprobs", {"graph_batch_sizes": [2]}, id="batch-in-parts"),
        pytest.param("grammar-all", {"graph_batch_sizes": [2]}, id="grammar-in-parts"),
        pytest.param(
            *("all-logprobs", {"draft_length": BatchTableLength(((1, 3), (2, 1), (3, 2)))}),
            id="few-drafts",
        ),
        pytest.param("grammar-all", {"verify": "block"}, id="block-verification"),
    ],
)
def test_captured_steps_under_other_conditions(
    trained, name: str, changes: dict, monkeypatch
) -> None:
    sampling = _requests((EXTRAS | GRAMMARS)[name], 0.0)
    plain = {key: value for key, value in changes.items() if key != "graph_batch_sizes"}
    expected = _serve(_decoder(trained, "training", 3, **plain), sampling)
    decoder = _decoder(trained, "training", 3, **changes, **CAPTURED)
    if "graph_batch_sizes" not in changes or name not in GRAMMARS:  # these are not split
        _watched(decoder, monkeypatch)
    _assert_same(_serve(decoder, sampling), expected, off=1e-5)
    assert bool(decoder.stats.num_preemptions) == ("num_blocks" in changes)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("name", ["all-logprobs", "grammar-all"])
def test_abort_between_captured_steps_changes_nobody_else(lab, name: str) -> None:
    sampling = _requests((EXTRAS | GRAMMARS)[name], 0.9)
    whole = _serve(_decoder(lab, "training", 3), sampling)
    cut = _serve(_decoder(lab, "training", 3, **CAPTURED), sampling, aborts_at=4)
    assert cut.pop("0")[1] == "abort"
    assert {request: whole[request][0] for request in cut} == {
        request: found[0] for request, found in cut.items()
    }


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("name", ["all-logprobs", "grammar-all"])
def test_warm_up_captures_all_that_requests_sampled_like_this_need(lab, name: str) -> None:
    decoder = _decoder(lab, "training", 3, **CAPTURED)
    fields = {"max_new_tokens": 6} | (EXTRAS | GRAMMARS)[name]
    decoder.warm_up(SamplingParams(**fields))
    num_builds = decoder.num_builds
    _serve(decoder, [SamplingParams(**fields, seed=seed) for seed in range(4)])
    assert decoder.num_builds == num_builds


@pytest.mark.usefixtures("without_gpu")
def test_plain_batches_have_the_graphs_of_before(lab) -> None:
    decoder = _decoder(lab, "training", 3, **CAPTURED)
    plain = [SamplingParams(max_new_tokens=6)] * 4
    _serve(decoder, plain)
    num_graphs = decoder.graphs.num_graphs
    _serve(decoder, [SamplingParams(max_new_tokens=6, **EXTRAS["all"])] * 4)
    assert decoder.graphs.num_graphs > num_graphs
    num_graphs = decoder.graphs.num_graphs
    _serve(decoder, plain)
    assert decoder.graphs.num_graphs == num_graphs


@pytest.mark.usefixtures("without_gpu")
def test_masks_are_made_behind_the_launch_of_the_target_pass(lab, monkeypatch) -> None:
    decoder = _decoder(lab, "training", 3, **CAPTURED)
    order: list[str] = []

    def noting(name: str, function: Callable) -> Callable:
        def noted(*args: object, **rest: object) -> object:
            order.append(name)
            return function(*args, **rest)

        return noted

    parts = decoder.device_step.parts
    decoder.device_step.parts = parts._replace(
        target=noting("target", parts.target), verify=noting("verify", parts.verify)
    )
    monkeypatch.setattr(decoder._ledger, "catch_up", noting("commit", decoder._ledger.catch_up))
    fields = GRAMMARS["grammar"] | {"max_new_tokens": 16, "min_tokens": 12}
    _serve(decoder, [SamplingParams(**fields)] * 4)
    captures = "".join(name[0] for name in order)  # a stand-in runs a part when it captures it
    assert captures.endswith("tcv" * 3)


@pytest.mark.usefixtures("without_gpu")
def test_steps_of_a_batch_that_stays_copy_nothing_but_their_masks(lab, monkeypatch) -> None:
    copied: list[str] = []

    def noting(name: str) -> None:
        function = getattr(StaticParams, name)

        def noted(*args: object, **rest: object) -> None:
            copied.append(name)
            function(*args, **rest)

        monkeypatch.setattr(StaticParams, name, noted)

    noting("_copy")
    noting("write_bitmask")
    decoder = _decoder(lab, "training", 3, **CAPTURED)
    fields = GRAMMARS["grammar-all"] | {"max_new_tokens": 40, "min_tokens": 36}
    for prompt in PROMPTS[:3]:
        decoder.add_request(prompt, sampling=SamplingParams(**fields))
    for _ in range(5):
        decoder.step()
    copied.clear()
    for _ in range(3):
        decoder.step()
    assert copied == ["write_bitmask"] * 3


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("verify", "copies"), [("standard", False), ("typical", True)])
def test_greedy_requests_that_come_and_go_have_nothing_to_copy(
    lab, monkeypatch, verify: str, copies: bool
) -> None:
    decoder = _decoder(lab, "training", 3, verify=verify, **CAPTURED)

    def held() -> list[torch.Tensor]:
        every = decoder.graphs._params, decoder.graphs._mixed._params
        return [value for one in every for value in one._copied.values()]

    few, many = (SamplingParams(max_new_tokens=n, seed=n) for n in (3, 9))
    _serve(decoder, [many, few, many, few])
    before = held()
    assert len(before) == 10
    _serve(decoder, [few, many, few, many])
    assert all(map(is_, held(), before)) != copies


@pytest.mark.usefixtures("without_gpu")
def test_target_pass_has_run_before_what_reads_it_is_warmed_up(lab) -> None:
    decoder = _decoder(lab, "training", 3, **CAPTURED)
    with torch.inference_mode():
        decoder.graphs.prepare(SamplingParams(**GRAMMARS["grammar"]), draft_limits=[3])
    targets = list(decoder.graphs._targets.values())
    assert targets
    assert all(target.graph.num_replays > 0 for target in targets), "what lay there was read"


needs_gpu = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu():
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=3)
    target.model.to("cuda")
    return target, heads.to("cuda")


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    ("name", "compile_step"),
    [
        *((name, False) for name in (*EXTRAS, *GRAMMARS)),
        *((name, True) for name in ("all-logprobs", "grammar-all")),
    ],
)
def test_graphs_say_what_the_loop_without_graphs_says(
    on_gpu, name: str, temperature: float, compile_step: bool, monkeypatch
) -> None:
    sampling = _requests((EXTRAS | GRAMMARS)[name], temperature)
    expected = _serve(_decoder(on_gpu, "training", 3), sampling)
    decoder = _decoder(on_gpu, "training", 3, **CAPTURED, compile=compile_step)
    _watched(decoder, monkeypatch)
    _assert_same(_serve(decoder, sampling), expected, off=1e-4)


@needs_gpu
@pytest.mark.parametrize("name", [*EXTRAS, *GRAMMARS])
def test_decoding_with_extras_never_waits_for_the_device(on_gpu, name: str) -> None:
    decoder = _decoder(on_gpu, "training", 3, cuda_graphs=True, max_model_len=256)
    fields = {"max_new_tokens": 200} | (EXTRAS | GRAMMARS)[name]
    fields = fields | {"min_tokens": 150, "stop_token_ids": (1, 2)}
    for prompt in PROMPTS[:3]:
        decoder.add_request(prompt, sampling=SamplingParams(**fields))
    for _ in range(12):
        decoder.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(decoder.live_requests) == 3
    assert decoder.stats.num_emitted_tokens > 60


@needs_gpu
def test_masks_copied_beside_a_pass_are_there_for_what_follows_it() -> None:
    sampling = [SamplingParams(**GRAMMARS["grammar"])] * 3
    batch = batch_tensors(
        sampling,
        num_prompt_tokens=[1] * 3,
        num_speculative_tokens=2,
        vocab_size=1 << 16,
        device=torch.device("cuda"),
    )
    params = StaticParams(4, device=torch.device("cuda"))
    params.upload(batch)
    place = params.view(batch, 3).bitmask
    host = torch.empty(place.shape, dtype=torch.int32, pin_memory=True)
    weight = torch.randn(4096, 4096, device="cuda")

    def keep_busy() -> None:
        for _ in range(20):
            torch.mm(weight, weight)

    for number in range(8):  # in the same memory, as `StepMasks` makes them
        host.fill_(number)
        keep_busy()
        seen = place.clone()
        before = torch.cuda.current_stream().record_event()
        keep_busy()
        params.write_bitmask(host, after=before)
        written = place.clone()
        torch.cuda.synchronize()
        assert (seen == number - 1).all(), "copied before the step that reads the former masks"
        assert (written == number).all(), "read before they were there"
