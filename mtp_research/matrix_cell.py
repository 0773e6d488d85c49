"""One cell of the policy matrix: a decode loop's rounds against the replay walk over its own text.

Used by `policy_matrix`, which decodes. Letters: N MTP modules, K drafts per step, k = K depths.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.decode.stats import RequestRecord
from mtp_research.errors import NumericFault
from mtp_research.heads.stack import MTPHeads
from mtp_research.policy import MATCHING_POLICY, POLICIES
from mtp_research.training.acceptance import (
    bootstrap_error,
    pooled_length,
    replay_walk,
    response_ranges,
)
from mtp_research.training.objective import UnrollSpec
from mtp_research.training.replay import held_out_drafts
from mtp_research.training.rows import TrainingRows
from mtp_research.training.stale_walk import stale_walk

# The unroll that computes what a policy drafts from; with one module it is `ttt` as well.
WALK_UNROLL = {"training": "chain", "eagle": "shared_context", "target_roll": "independent"}


class Cell(NamedTuple):
    """Heads of one unroll under one policy.

    Attributes:
        unroll: what the heads were trained with.
        num_mtp_modules: N.
        policy: what they were decoded with.
        is_match: the policy shows them what they were trained on.
        acceptance_length: micro, of the loop's rounds whose K tokens are all known; each of them
            was found equal to the walk's.
        standard_error: bootstrap over prompts.
        clean_length: if the rows of rejected drafts were rerun; what a policy that leaves them
            behind pays is the difference.
        num_rounds: of the loop.
    """

    unroll: str
    num_mtp_modules: int
    policy: str
    is_match: bool
    acceptance_length: float
    standard_error: float
    clean_length: float
    num_rounds: int


def measure_cell(
    heads: MTPHeads,
    records: Sequence[RequestRecord],
    *,
    prompts: Sequence[tuple[int, ...]],
    policy: str,
    num_drafts: int,
) -> Cell:
    """Compare the loop's rounds with the walk over its own text.

    Raises:
        NumericFault: a round that must be equal is not.
    """
    unroll = heads.spec.unroll
    assert unroll is not None, "heads trained here know their unroll"
    documents = _documents(records, prompts=prompts)
    walks = _walks(heads, documents, policy=policy, num_drafts=num_drafts)
    loop, num_rounds, clean, num_clean = [], [], [], []
    for index, (record, walk) in enumerate(zip(records, walks, strict=True)):
        rounds = record.num_accepted_per_round[: len(walk.exact)]
        if rounds != walk.exact:
            raise NumericFault(
                f"policy matrix: {unroll} N={heads.spec.num_mtp_modules} under {policy}, prompt "
                f"{index}: the loop accepted {rounds}, the walk {walk.exact}; they are equal in "
                "float32, set model.dtype=float32."
            )
        loop.append(sum(rounds))
        num_rounds.append(len(rounds))
        clean.append(sum(walk.clean))
        num_clean.append(len(walk.clean))
    return Cell(
        unroll=unroll,
        num_mtp_modules=heads.spec.num_mtp_modules,
        policy=policy,
        is_match=MATCHING_POLICY[unroll] == policy,
        acceptance_length=pooled_length(loop, num_rounds),
        standard_error=bootstrap_error(loop, num_rounds),
        clean_length=pooled_length(clean, num_clean),
        num_rounds=sum(num_rounds),
    )


class _Walks(NamedTuple):
    """Accepted drafts of each round of one text.

    Attributes:
        exact: of the policy as it is.
        clean: as if the rows of rejected drafts were rerun; the same for a clean policy.
    """

    exact: tuple[int, ...]
    clean: tuple[int, ...]


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
    """Walks over every text, one text a row."""
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
        row_batches=[[index] for index in range(len(rows))],
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
        found.append(_Walks(exact, clean))
    return found
