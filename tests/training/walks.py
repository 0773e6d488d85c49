"""The replay walk against the decode loop, round for round, on texts that the loop made."""

from collections.abc import Sequence
from typing import NamedTuple

from mtp_research.config.schema import EngineConfig
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy.fields import MATCHING_POLICY
from mtp_research.training.losses.losses import UnrollSpec
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.walk.acceptance import replay_walk, response_ranges
from mtp_research.training.walk.replay import held_out_drafts

Prompts = Sequence[tuple[int, ...]]
ENGINE = EngineConfig(max_num_requests=64, max_num_batched_tokens=1024, max_model_len=512)


class WalkedTexts(NamedTuple):
    """Greedy texts, and what both the loop and the walk found on them."""

    texts: list[tuple[int, ...]]
    num_rounds: int
    num_accepted: int


def greedy_records(
    target: Target,
    heads: MTPHeads | None,
    prompts: Prompts,
    *,
    policy: str = "training",
    num_drafts: int,
    num_new: int,
    stop: tuple[int, ...] = (),
    engine: EngineConfig = ENGINE,
) -> list[RequestRecord]:
    """Records of greedy decoding, in the order of the prompts."""
    spec = SpecSettings(policy=policy, num_speculative_tokens=num_drafts)
    decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
    sampling = SamplingParams(max_new_tokens=num_new, stop_token_ids=stop)
    records = list(decoder.generate(prompts, sampling=sampling))
    return sorted(records, key=lambda record: int(record.request_id))


def assert_walk_is_loop(
    heads: MTPHeads,
    prompts: Prompts,
    *,
    unroll: str,
    num_depths: int,
    num_new: int = 48,
    engine: EngineConfig = ENGINE,
) -> WalkedTexts:
    """Decode the prompts greedily; the walk over the texts must accept the same in each round."""
    records = greedy_records(
        heads.target,
        heads,
        prompts,
        policy=MATCHING_POLICY[unroll],
        num_drafts=num_depths,
        num_new=num_new,
        engine=engine,
    )
    texts = [record.output_token_ids for record in records]
    documents = [
        EncodedDocument(
            doc_id=str(index),
            domain="lab",
            token_ids=prompt + text,
            loss_mask=(False,) * len(prompt) + (True,) * len(text),
        )
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    packed = pack_first_fit(documents, seq_len=max(len(d.token_ids) for d in documents) + 60)
    source = heads.spec.hidden_source
    rows = TrainingRows(packed, target=heads.target, hidden_source=source, keep_hidden=False)
    drafts = held_out_drafts(
        heads,
        rows,
        spec=UnrollSpec(num_depths, unroll),
        row_batches=[[index] for index in range(len(rows))],
    )
    num_rounds = num_accepted = 0
    for index, record in enumerate(records):
        ((start, stop),) = response_ranges(documents[index].loss_mask, num_depths=num_depths)
        walk = replay_walk(drafts[index].is_hit, start=start, stop=stop)
        assert record.num_accepted_per_round[: walk.num_rounds] == walk.accepted_per_round
        num_rounds += walk.num_rounds
        num_accepted += sum(walk.accepted_per_round)
    return WalkedTexts(texts, num_rounds, num_accepted)
