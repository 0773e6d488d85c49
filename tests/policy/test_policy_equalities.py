"""Policies that must draft alike: with one draft on any history, or right after a prompt."""

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.policy.fields import POLICIES
from tests import tiny
from tests.decode.hashed_loop import HashedLoop
from tests.decode.loops import PROMPTS

TARGETS = ("qwen3", "glm4_moe", "deepseek_v3", "mimo_v2")


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest):
    return tiny.tiny_target(request.param)


def _rounds(target, policy: str, *, num_drafts: int, deferred: bool = False) -> dict[str, list]:
    """Per request, accepted counts and (length, drafts) of its rounds."""
    heads = tiny.tiny_heads(target, num_mtp_modules=num_drafts)
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=num_drafts),
        engine=EngineConfig(max_num_requests=4, deferred_output=deferred),
    )
    loop = HashedLoop(decoder)
    requests = [
        decoder.add_request(
            prompt, sampling=SamplingParams(max_new_tokens=14), request_id=str(index)
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    loop.decode(requests)
    return {
        request.request_id: [tuple(request.num_accepted_per_round), loop.rounds[request.request_id]]
        for request in requests
    }


@pytest.mark.parametrize("deferred", [False, True], ids=["at_once", "deferred"])
def test_one_draft_makes_all_policies_draft_alike(target, deferred: bool) -> None:
    rounds = {
        policy: _rounds(target, policy, num_drafts=1, deferred=deferred)
        for policy in sorted(POLICIES)
    }
    window = rounds.pop("window")
    expected = rounds["training"]
    assert all(found == expected for found in rounds.values())
    differs = False
    for name, (accepted, history) in expected.items():
        # A fully accepted round leaves a slot that `window` never writes; until then it is equal.
        num_equal = next((t for t, a in enumerate(accepted) if a == 1), len(history) - 1) + 1
        assert window[name][1][:num_equal] == history[:num_equal]
        differs |= window[name][1] != history
    assert differs


def test_right_after_the_prompt_training_drafts_as_its_naive_roll(target) -> None:
    refreshed, naive, eagle = (
        _rounds(target, policy, num_drafts=3)
        for policy in ("training", "training_norefresh", "eagle")
    )
    first = {name: rounds[1][0] for name, rounds in refreshed.items()}
    assert first == {name: rounds[1][0] for name, rounds in naive.items()}
    assert first != {name: rounds[1][0] for name, rounds in eagle.items()}
    assert refreshed != naive  # a round with two rejections tells them apart
