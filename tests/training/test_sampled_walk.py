"""The walk's sampled length against the sampled loop's; `mixed` is measured as a chain."""

from pathlib import Path

import numpy as np
import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.prompts import encode_prompt, load_prompts
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer
from mtp_research.training.losses.losses import UnrollSpec
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.walk.acceptance import bootstrap_error, pooled_length
from mtp_research.training.walk.replay import AnchorDrafts, held_out_drafts, walk_report

LAB = Path(__file__).resolve().parents[2] / "assets" / "lab_tiny"
NUM_DRAFTS, NUM_NEW = 3, 40


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(LAB / "target", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def heads(target: Target) -> MTPHeads:
    return load_heads(LAB / "heads" / "chain_n3", target)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = load_tokenizer(LAB / "target")
    return [encode_prompt(prompt, tokenizer) for prompt in load_prompts(None)][::2]


def sampled(
    target: Target, heads: MTPHeads | None, prompts: list[tuple[int, ...]], *, first_seed: int
) -> list[RequestRecord]:
    """Texts at temperature 1, which do not stop, with drafts where there are heads."""
    spec = SpecSettings(
        num_speculative_tokens=NUM_DRAFTS if heads else 0,
        verify="standard",
        draft_sampling="sample" if heads else "greedy",
    )
    engine = EngineConfig(
        max_num_requests=192, max_num_batched_tokens=8192, max_model_len=512, audit=False
    )
    decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=1.0, seed=first_seed + index, max_new_tokens=NUM_NEW, stop_token_ids=()
        )
        decoder.add_request(prompt, sampling=sampling, request_id=str(index))
    while decoder.scheduler.has_work:
        decoder.step()
    return sorted(decoder.stats.records, key=lambda record: int(record.request_id))


def drafts_of(
    target: Target, heads: MTPHeads, documents: list[EncodedDocument], *, unroll: str
) -> dict[int, AnchorDrafts]:
    packed = pack_first_fit(documents, seq_len=256)
    rows = TrainingRows(packed, target=target, hidden_source="post_norm", keep_hidden=False)
    batches = [range(first, min(first + 4, len(rows))) for first in range(0, len(rows), 4)]
    return held_out_drafts(
        heads, rows, spec=UnrollSpec(NUM_DRAFTS, unroll), row_batches=[[*b] for b in batches]
    )


@pytest.fixture(scope="module")
def documents(target: Target, prompts: list[tuple[int, ...]]) -> list[EncodedDocument]:
    """The target's own text at temperature 1, made without drafts."""
    made = sampled(target, None, prompts, first_seed=0)
    return [
        EncodedDocument(
            doc_id=str(index),
            domain="lab",
            token_ids=prompt + record.output_token_ids,
            loss_mask=(False,) * len(prompt) + (True,) * NUM_NEW,
        )
        for index, (prompt, record) in enumerate(zip(prompts, made, strict=True))
    ]


def test_sampled_length_of_the_walk_is_that_of_the_sampled_loop(
    target: Target,
    heads: MTPHeads,
    prompts: list[tuple[int, ...]],
    documents: list[EncodedDocument],
) -> None:
    drafts = drafts_of(target, heads, documents, unroll="chain")
    report = walk_report(drafts, documents=documents, num_depths=NUM_DRAFTS)
    records = sampled(target, heads, prompts, first_seed=10_000)
    counts = [
        [sum(r.num_accepted_per_round) for r in records],
        [len(r.num_accepted_per_round) for r in records],
    ]
    length, error = pooled_length(*counts), bootstrap_error(*counts)
    allowed = 3 * float(np.hypot(error, report.sampled_standard_error))
    assert allowed < 0.3
    assert abs(report.sampled_acceptance_length - length) < allowed


def test_mixed_heads_are_measured_as_the_chain_that_decodes_them(
    target: Target, heads: MTPHeads, documents: list[EncodedDocument]
) -> None:
    mixed, again, chain = (
        drafts_of(target, heads, documents[:6], unroll=unroll)
        for unroll in ("mixed", "mixed", "chain")
    )
    for index, drafts in chain.items():
        for measured in (mixed[index], again[index]):
            assert np.array_equal(measured.is_hit, drafts.is_hit)
            assert np.array_equal(measured.acceptance, drafts.acceptance)
    assert any(drafts.is_hit[:, 1:].any() for drafts in chain.values())
