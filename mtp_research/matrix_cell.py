"""One cell of the policy matrix: a decode loop's rounds against the replay walk over its own text.

Letters: N MTP modules, K drafts per step, k = K depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtp_research.config import EngineConfig
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy import POLICIES
from mtp_research.training.acceptance import replay_walk, response_ranges
from mtp_research.training.objective import UnrollSpec
from mtp_research.training.replay import held_out_drafts
from mtp_research.training.rows import TrainingRows
from mtp_research.training.stale_walk import stale_walk

# The unroll that computes what a policy drafts from; with one module it is `ttt` as well.
WALK_UNROLL = {"training": "chain", "eagle": "shared_context", "target_roll": "independent"}
_WALK_ROWS = 8


def decode_prompts(
    target: Target,
    heads: MTPHeads | None,
    prompts: Sequence[tuple[int, ...]],
    *,
    policy: str,
    num_drafts: int,
    num_new: int,
) -> list[RequestRecord]:
    """Greedy text of a fixed length, every prompt read whole in its first step."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    engine = EngineConfig(
        max_num_requests=len(prompts),
        max_num_batched_tokens=max(512, total + len(prompts) * (num_drafts + 1)),
        max_prefill_chunk=longest,
        max_model_len=longest + num_new + 1,
    )
    decoder = SpecDecoder(
        target, heads, policy=policy, num_speculative_tokens=num_drafts, engine=engine
    )
    records = decoder.generate(prompts, sampling=SamplingParams(max_new_tokens=num_new))
    return sorted(records, key=lambda record: int(record.request_id))


class CellRounds(NamedTuple):
    """Accepted drafts of each round of each prompt, rounds whose K tokens are all known.

    Attributes:
        loop: of the decode loop.
        clean: of the walk, if the rows of rejected drafts were rerun; None for a clean policy.
        differing: prompts at which loop and walk differ; none in float32.
        walks: of the walk under the policy as it is.
    """

    loop: tuple[tuple[int, ...], ...]
    clean: tuple[tuple[int, ...], ...] | None
    differing: tuple[int, ...]
    walks: tuple[tuple[int, ...], ...]


def measure_cell(
    heads: MTPHeads,
    records: Sequence[RequestRecord],
    *,
    prompts: Sequence[tuple[int, ...]],
    policy: str,
    num_drafts: int,
) -> CellRounds:
    """Compare the loop's rounds with the walk over its own text.

    Args:
        heads: as they were decoded.
        records: of the loop, one per prompt, in order.
        prompts: token ids.
        policy: what was run.
        num_drafts: K.
    """
    documents = _documents(records, prompts=prompts)
    walks = _walks(heads, documents, policy=policy, num_drafts=num_drafts)
    loop = tuple(
        _known_rounds(record.num_accepted_per_round, walk)
        for record, walk in zip(records, walks, strict=True)
    )
    return CellRounds(
        loop=loop,
        clean=None if POLICIES[policy].clean else tuple(walk.clean for walk in walks),
        differing=tuple(
            index
            for index, (rounds, walk) in enumerate(zip(loop, walks, strict=True))
            if rounds != walk.exact
        ),
        walks=tuple(walk.exact for walk in walks),
    )


class _Walks(NamedTuple):
    """Accepted drafts of each round of one text.

    Attributes:
        exact: of the policy as it is.
        clean: as if the rows of rejected drafts were rerun; the same for a clean policy.
        num_anchors: anchors whose K tokens are known.
    """

    exact: tuple[int, ...]
    clean: tuple[int, ...]
    num_anchors: int


def _known_rounds(accepted: Sequence[int], walk: _Walks) -> tuple[int, ...]:
    """The loop's rounds that start at an anchor whose K tokens are known."""
    known, anchor = [], 0
    for count in accepted:
        if anchor >= walk.num_anchors:
            break
        known.append(count)
        anchor += count + 1
    return tuple(known)


def _documents(
    records: Sequence[RequestRecord], *, prompts: Sequence[tuple[int, ...]]
) -> list[EncodedDocument]:
    """The decoded texts with their prompts."""
    return [
        EncodedDocument(
            doc_id=record.request_id,
            domain="matrix",
            token_ids=tuple(prompt) + record.output_token_ids,
            loss_mask=(False,) * len(prompt) + (True,) * len(record.output_token_ids),
        )
        for prompt, record in zip(prompts, records, strict=True)
    ]


def _walks(
    heads: MTPHeads, documents: Sequence[EncodedDocument], *, policy: str, num_drafts: int
) -> list[_Walks]:
    """Walks over every text, a few rows at a time."""
    rows = TrainingRows(
        pack_first_fit(documents, seq_len=max(len(text.token_ids) for text in documents)),
        target=heads.target,
        hidden_source=heads.spec.hidden_source,
        keep_hidden=False,
    )
    drafts = held_out_drafts(
        heads,
        rows,
        spec=UnrollSpec(num_drafts, WALK_UNROLL[policy]),
        row_batches=[
            range(start, min(start + _WALK_ROWS, len(rows)))
            for start in range(0, len(rows), _WALK_ROWS)
        ],
    )
    found = []
    for index, document in enumerate(documents):
        ((start, stop),) = response_ranges(document.loss_mask, num_depths=num_drafts)
        clean = replay_walk(drafts[index].is_hit, start=start, stop=stop).accepted_per_round
        exact = clean
        if not POLICIES[policy].clean:
            exact = stale_walk(
                heads,
                document.token_ids,
                policy=POLICIES[policy],
                start=start,
                stop=stop,
                num_depths=num_drafts,
            )
        found.append(_Walks(exact, clean, stop - start))
    return found
