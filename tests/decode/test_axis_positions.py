"""Rotary positions that differ by axis (M-RoPE): target, modules, continuation, company, refusals.

Letters: L tokens of a text.
"""

import copy

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, Qwen3_5ForCausalLM

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import drafter as draft
from mtp_research.decode.graphs.decode_graphs import StepGraphs
from mtp_research.decode.sampling.sampling import sampling_tensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Scheduled
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.step import DeviceParts
from mtp_research.models.target import wrap_target
from mtp_research.runtime.errors import ConfigError
from tests import oracle, tiny, tiny_recurrent
from tests.decode.loops import PROMPTS, small_pool

NUM_NEW = 10
PLAIN = SpecSettings(num_speculative_tokens=0)
# An image of 2 x 3 tokens behind two of text, then one more of text, as the library lays it out.
IMAGE = [[0, 1, 2, 2, 2, 2, 2, 2, 5], [0, 1, 2, 2, 2, 3, 3, 3, 5], [0, 1, 2, 3, 4, 2, 3, 4, 5]]
ROWS = torch.tensor(IMAGE)
PROMPT = PROMPTS[2]


@pytest.fixture(scope="module")
def targets():
    """A text model with `mrope_section`, all of attention layers or with recurrent ones."""
    name, _, _, settings = tiny_recurrent.RECIPES["qwen3_5"]
    found = {}
    for kind, changes in (
        ("attention", {"layer_types": ["full_attention"] * 3}),
        ("recurrent", {}),
    ):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](**(settings | changes))
        model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="eager")
        tiny.randomise(model, seed=1)
        found[kind] = wrap_target(model.float())
    return found


@pytest.fixture(scope="module", params=["attention", "recurrent"])
def target(targets, request: pytest.FixtureRequest):
    return targets[request.param]


@pytest.fixture(scope="module")
def library(target):
    """The library's own forward: logits `[L, V]` of a text at positions `[axes, L]`."""
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")

    def logits(text: list[int], positions: Tensor) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor([text]), position_ids=positions[:, None]).logits[0]

    return logits


def _positions(num_tokens: int) -> Tensor:
    """Those of the image and of the text behind it, `[axes, L]`."""
    behind = torch.arange(6, 6 + num_tokens - ROWS.shape[1]).expand(3, -1)
    return torch.cat([ROWS, behind], dim=1)


def _decode(decoder: SpecDecoder, positions: object, *, beside: bool = True) -> list[int]:
    """Text of the prompt with an image, while plain requests come and go."""
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    with torch.inference_mode():
        for prompt in PROMPTS[:2] if beside else ():
            decoder.add_request(prompt, sampling=sampling)
        request = decoder.add_request(PROMPT, sampling=sampling, position_ids=positions)
        while decoder.has_work:
            decoder.step()
    return list(request.token_ids)


@pytest.fixture(scope="module")
def text(library) -> list[int]:
    """The greedy text, the library recomputing all of it for every token."""
    known = list(PROMPT)
    for _ in range(NUM_NEW):
        known.append(int(library(known, _positions(len(known)))[-1].argmax()))
    return known


def test_logits_and_text_are_the_librarys(target, library, text) -> None:
    decoder = SpecDecoder(target, spec=PLAIN)
    seen: list[Tensor] = []

    def watched(parts: DeviceParts) -> DeviceParts:
        def run(inputs):
            rows = parts.target(inputs)
            seen.append(rows.logits[0].clone())
            return rows

        return parts._replace(target=run)

    decoder.observe(watched)
    assert _decode(decoder, ROWS, beside=False) == text
    wanted = library(text, _positions(len(text)))[len(PROMPT) - 1 : -1]
    difference = (torch.stack(seen) - wanted).abs().max()
    assert difference < 1e-5 * wanted.abs().max()
    equal = torch.arange(len(text)).expand(3, -1)
    assert (library(text, equal)[len(PROMPT) - 1 : -1] - wanted).abs().max() > 0.01


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_drafts_are_those_of_modules_at_the_same_positions(
    target, text, policy: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=3),
        engine=EngineConfig(deferred_output=deferred, max_num_requests=2, max_prefill_chunk=4),
    )
    checked: list[int] = []
    choose = draft.choose_drafts

    def compare(logits: Tensor, step, *, draft_step: int, **others: object) -> Tensor:
        for row, name in enumerate(step.request_ids):
            known = int(step.state.num_known_tokens[row])
            if name == "request-2" and bool(step.state.drafting[row]) and known < len(text):
                positions = _positions(len(text) + 3)
                _, wanted = oracle.DRAFTS[policy](heads, text[:known], 3, positions)
                torch.testing.assert_close(logits[row], wanted[draft_step], rtol=1e-4, atol=1e-4)
                checked.append(draft_step)
        return choose(logits, step, draft_step=draft_step, **others)

    monkeypatch.setattr(draft, "choose_drafts", compare)
    assert _decode(decoder, IMAGE) == text
    assert {0, 1, 2} == set(checked)
    assert len(checked) > 9


def test_target_that_drafts_for_itself_is_always_right(target, text) -> None:
    decoder = SpecDecoder(target, "oracle", spec=SpecSettings(num_speculative_tokens=3))
    assert _decode(decoder, ROWS) == text
    rounds = {r.request_id: r.num_accepted_per_round for r in decoder.stats.records}
    assert all(count == 3 for count in rounds["request-2"][:-1])


def test_equal_axes_give_the_plain_text(target, text) -> None:
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    (plain,) = SpecDecoder(target, heads).generate([PROMPT], sampling=sampling)
    equal = torch.arange(len(PROMPT)).expand(3, -1)
    got = _decode(SpecDecoder(target, heads), equal)[len(PROMPT) :]
    assert tuple(got) == plain.output_token_ids
    # One attention layer of three moves logits, and not this text.
    assert target.has_recurrent_state or got != text[len(PROMPT) :]


def test_plain_request_in_a_slot_used_again_has_its_own_positions(targets) -> None:
    target = targets["attention"]
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    (plain,) = SpecDecoder(target, spec=PLAIN).generate([PROMPT], sampling=sampling)
    decoder = SpecDecoder(target, spec=PLAIN, engine=EngineConfig(max_num_requests=2))
    for count in (2, 30):  # the first leaves its slot, the second is beside the plain one
        params = SamplingParams(max_new_tokens=count)
        decoder.add_request(PROMPT, sampling=params, position_ids=ROWS)
    (beside,) = decoder.generate([PROMPT], sampling=sampling)
    assert beside.output_token_ids == plain.output_token_ids


def test_preempted_request_keeps_its_positions(target, text) -> None:
    heads = tiny_recurrent.tiny_heads(target, num_mtp_modules=2)
    decoder = SpecDecoder(target, heads, engine=small_pool(9))
    assert _decode(decoder, ROWS) == text
    assert decoder.stats.num_preemptions > 0


def test_captured_steps_leave_such_requests_out(targets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    decoder = SpecDecoder(targets["attention"], spec=PLAIN)
    graphs = StepGraphs(
        decoder.device_step,
        batch_sizes=(2,),
        num_table_blocks=2,
    )
    accepted = []
    for positions in (None, ROWS):
        request = decoder.add_request(PROMPT, position_ids=positions)
        entry = Scheduled(request, 1, 0, False, True, False)
        params = sampling_tensors([request.sampling], device=torch.device("cpu"))
        accepted.append(graphs.wish([entry], params, draft_limit=0).shape() is not None)
    assert accepted == [True, False]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (ROWS[:, :-1], r"\[axes, prompt tokens\] = \[3, 9\], got \[3, 8\]"),
        (ROWS[0], r"= \[3, 9\], got \[9\]"),
        (ROWS.double(), "must be integers"),
        ([[0, 1], [0]], "must be a table of integers"),
        (ROWS - 1, r"must be in \[0, 256\), got -1\.\.4"),
        (ROWS + 251, r"must be in \[0, 256\), got 251\.\.256"),
    ],
)
def test_positions_that_do_not_fit_are_refused(targets, positions, message: str) -> None:
    decoder = SpecDecoder(targets["attention"], spec=PLAIN)
    with pytest.raises(ConfigError, match=message):
        decoder.add_request(PROMPT, position_ids=positions)
    assert not decoder.has_work


def test_prefix_cache_and_targets_with_one_axis_are_refused(targets) -> None:
    decoder = SpecDecoder(tiny.tiny_target("qwen3"), spec=PLAIN)
    with pytest.raises(ConfigError, match="whose rotary positions have several axes"):
        decoder.add_request(PROMPT, position_ids=ROWS)
    engine = EngineConfig(prefix_caching=True)
    decoder = SpecDecoder(targets["attention"], spec=PLAIN, engine=engine)
    with pytest.raises(ConfigError, match=r"set engine\.prefix_caching=false"):
        decoder.add_request(PROMPT, position_ids=ROWS)
