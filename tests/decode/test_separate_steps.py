"""`engine.mixed_batches=false`: no step has both kinds of rows, and the texts stay the same."""

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from tests import tiny
from tests.decode.loops import PROMPTS, draft_rightly, run, texts_of

pytestmark = pytest.mark.usefixtures("output_timing")

SAMPLING = [
    SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
    for count, temperature in ((20, 0.0), (4, 0.0), (13, 0.8), (1, 0.0), (16, 0.0))
]
MANY = [*PROMPTS, [13, 90, 2, 2, 71, 8, 30]]


@pytest.fixture(scope="module")
def target():
    return tiny.tiny_target("qwen3")


@pytest.fixture(scope="module")
def heads(target):
    return tiny.tiny_heads(target, num_mtp_modules=2)


def _texts_and_kinds(decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch):
    """Texts, and of each step whether its rows are prompt rows."""
    steps: list[set[bool]] = []
    begin = decoder._ledger.begin

    def observed(schedule) -> None:
        steps.append({entry.is_prefill for entry in schedule.entries})
        begin(schedule)

    monkeypatch.setattr(decoder._ledger, "begin", observed)
    return texts_of(run(decoder, MANY, sampling=SAMPLING)), steps


@pytest.mark.parametrize(
    ("policy", "num_blocks"), [("eagle", None), ("training", 14)], ids=["roomy", "tight"]
)
def test_texts_are_those_of_mixed_batches(target, heads, policy, num_blocks, monkeypatch) -> None:
    outcomes = {}
    for mixed in (True, False):
        engine = EngineConfig(
            block_size=4,
            num_blocks=num_blocks,
            max_num_requests=3,
            max_prefill_chunk=3,
            mixed_batches=mixed,
        )
        decoder = SpecDecoder(target, heads, spec=SpecSettings(policy=policy), engine=engine)
        outcomes[mixed] = _texts_and_kinds(decoder, monkeypatch)
        assert (decoder.stats.num_preemptions > 0) == (num_blocks is not None)
        assert decoder.auditor.num_dirty_rounds == 0
    assert outcomes[False][0] == outcomes[True][0]
    assert {True, False} in outcomes[True][1]
    assert {True, False} not in outcomes[False][1]
    assert len(outcomes[False][1]) > len(outcomes[True][1])


def test_turns_change_nothing_about_accepted_drafts(target, heads, monkeypatch) -> None:
    greedy = [SamplingParams(max_new_tokens=12)] * len(PROMPTS)
    plain = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    expected = texts_of(run(plain, sampling=greedy))
    draft_rightly(monkeypatch, expected, chance=0.6)
    rounds = []
    for mixed in (True, False):
        engine = EngineConfig(max_num_requests=2, max_prefill_chunk=3, mixed_batches=mixed)
        records = run(SpecDecoder(target, heads, engine=engine), sampling=greedy)
        assert texts_of(records) == expected
        rounds.append({name: one.num_accepted_per_round for name, one in records.items()})
    assert rounds[0] == rounds[1]
