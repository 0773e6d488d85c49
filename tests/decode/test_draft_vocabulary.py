"""Drafting from part of the vocabulary: which tokens come out, and an unchanged text."""

import json
from pathlib import Path

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.draft_vocabulary import (
    RANKING_FILE,
    most_frequent,
    restrict_vocabulary,
    write_ranking,
)
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.runtime.errors import ConfigError, IntegrityError
from mtp_research.training.token_ranking import main
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of

LAB_TINY = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
SOME = [3, 90, 17, 41, 64, 8]


@pytest.fixture(scope="module")
def heads() -> MTPHeads:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    torch.manual_seed(1)
    return MTPHeads(target, spec=HeadSpec(num_mtp_modules=2)).eval()


def decoder(heads: MTPHeads, token_ids: list[int] | None, **changes: object) -> SpecDecoder:
    engine = EngineConfig(block_size=4, max_num_requests=4, audit=False)
    spec = SpecSettings(num_speculative_tokens=3, draft_token_ids=token_ids, **changes)
    return SpecDecoder(heads.target, heads, spec=spec, engine=engine)


@pytest.mark.parametrize("draft_sampling", ["greedy", "processed", "sample"])
def test_whole_vocabulary_in_any_order_changes_nothing(
    heads: MTPHeads, draft_sampling: str
) -> None:
    vocab_size = heads.target.config.vocab_size
    sampling = SamplingParams(temperature=0.8, seed=3, max_new_tokens=12, frequency_penalty=0.5)
    rounds = []
    for token_ids in (None, list(reversed(range(vocab_size)))):
        records = run(decoder(heads, token_ids, draft_sampling=draft_sampling), sampling=sampling)
        rounds.append([(r.output_token_ids, r.num_accepted_per_round) for r in records.values()])
    assert rounds[0] == rounds[1]


@pytest.mark.parametrize("draft_sampling", ["greedy", "processed", "sample"])
def test_only_chosen_tokens_are_drafted(heads: MTPHeads, draft_sampling: str) -> None:
    loop = decoder(heads, SOME, draft_sampling=draft_sampling)
    sampling = SamplingParams(temperature=1.0, seed=5, max_new_tokens=9)
    for prompt in PROMPTS:
        loop.add_request(prompt, sampling=sampling)
    drafted: set[int] = set()
    while loop.scheduler.has_work:
        loop.step()
        for request in loop.scheduler.running:
            drafted |= set(request.draft_token_ids)
    assert len(drafted) > 1
    assert drafted <= set(SOME)
    if draft_sampling == "sample":
        probs = loop.slot_state.read_draft_probs(
            torch.arange(4), num_drafts=loop.num_speculative_tokens
        )
        assert probs is not None
        outside = [t for t in range(heads.target.config.vocab_size) if t not in SOME]
        assert probs[..., outside].eq(0).all()


def test_restricted_drafts_are_the_best_of_the_chosen_tokens(heads: MTPHeads) -> None:
    vocabulary = restrict_vocabulary(heads, SOME)
    hidden = torch.randn(7, heads.target.config.hidden_size)
    whole = heads.logits(hidden)
    masked = torch.full_like(whole, -torch.inf)
    masked[:, SOME] = whole[:, SOME]
    logits = vocabulary.of_module(1).logits(hidden)
    assert torch.allclose(vocabulary.spread(logits), masked, atol=1e-6)
    assert torch.equal(vocabulary.token_ids[logits.argmax(-1)], masked.argmax(-1))


def test_text_is_that_of_plain_decoding(heads: MTPHeads) -> None:
    plain = SpecDecoder(heads.target, spec=SpecSettings(num_speculative_tokens=0))
    assert texts_of(run(decoder(heads, SOME))) == texts_of(run(plain))


@pytest.mark.parametrize("token_ids", [[], [5, 5], [-1, 3], [1_000_000]])
def test_ids_that_are_no_set_of_tokens_are_refused(heads: MTPHeads, token_ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="distinct token ids"):
        decoder(heads, token_ids)


def test_vocabulary_without_modules_is_refused(heads: MTPHeads) -> None:
    with pytest.raises(ConfigError, match="draft_token_ids needs MTP heads"):
        SpecDecoder(
            heads.target,
            "oracle",
            spec=SpecSettings(num_speculative_tokens=2, draft_token_ids=SOME),
        )


def test_ranking_counts_answers_and_is_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [
        {"id": str(i), "token_ids": [9, 9, i, 7, 7, 300 + i], "num_prompt_tokens": 3}
        for i in range(6)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, documents)))
    words = ["--head", str(tmp_path), "--target", str(LAB_TINY / "target"), "--data", str(data)]
    assert main([*words, "--eval-documents", "2"]) == 0
    assert "256 tokens cover 1.0000" in capsys.readouterr().out
    record = json.loads((tmp_path / RANKING_FILE).read_text())
    first, *others, after = record["token_ids"][:6]
    assert (first, after) == (7, 0)  # the prompts' 9 is not counted
    assert len(set(others) & set(range(300, 306))) == 4
    assert record["num_tokens"] == 3 * 4  # nor are held-out documents


def test_ranking_of_another_target_or_a_broken_one_is_refused(
    heads: MTPHeads, tmp_path: Path
) -> None:
    target = heads.target
    with pytest.raises(ConfigError, match="token_ranking"):
        most_frequent(tmp_path, num_tokens=4, target=target)
    counts = torch.arange(target.config.vocab_size)
    write_ranking(tmp_path, counts, target=target, source="test")
    best = most_frequent(tmp_path, num_tokens=2, target=target)
    assert best == [len(counts) - 1, len(counts) - 2]
    with pytest.raises(ConfigError, match=r"1\.\."):
        most_frequent(tmp_path, num_tokens=len(counts) + 1, target=target)
    record = json.loads((tmp_path / RANKING_FILE).read_text())
    (tmp_path / RANKING_FILE).write_text(json.dumps(record | {"tokenizer_sha256": "0"}))
    with pytest.raises(ConfigError, match="another tokenizer"):
        most_frequent(tmp_path, num_tokens=4, target=target)
    (tmp_path / RANKING_FILE).write_text(json.dumps(record | {"token_ids": [0, 0]}))
    with pytest.raises(IntegrityError, match="once"):
        most_frequent(tmp_path, num_tokens=4, target=target)
