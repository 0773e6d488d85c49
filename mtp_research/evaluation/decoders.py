"""The decoder of a condition, from its configuration. Letter: K drafts per step."""

from dataclasses import replace
from typing import cast

from mtp_research.decode.arguments import resolve_policy
from mtp_research.decode.build import Heads, build_drafter
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft_choice import DraftSampling
from mtp_research.decode.draft_length import FixedLength
from mtp_research.decode.memory import PoolNeeds, pool_needs
from mtp_research.evaluation.conditions import Condition
from mtp_research.evaluation.settings import draft_length, verify_options
from mtp_research.heads.draft_vocabulary import most_frequent
from mtp_research.models.target import Target
from mtp_research.policy import ModuleSchedule


def build_decoder(
    condition: Condition, target: Target, heads: Heads, *, num_blocks: int | None = None
) -> SpecDecoder:
    """A fresh decoder.

    Args:
        condition: one column of the table.
        target: the frozen model.
        heads: of `spec.head`; not read for K = 0.
        num_blocks: of the pool, planned for it, with what stays free beside it; None plans here.

    Raises:
        ConfigError: a setting does not fit the target or the heads.
        IntegrityError: the heads' token ranking is damaged.
    """
    spec, engine = condition.config.spec, condition.config.engine
    if num_blocks is not None:
        engine = replace(engine, num_blocks=num_blocks, memory_fraction=1.0)
    if condition.num_speculative_tokens == 0:
        return SpecDecoder(target, num_speculative_tokens=0, engine=engine, verify=spec.verify)
    token_ids = None
    if spec.head is not None and spec.draft_vocabulary_size is not None:
        token_ids = most_frequent(spec.head, num_tokens=spec.draft_vocabulary_size, target=target)
    return SpecDecoder(
        target,
        heads,
        policy=condition.policy or "training",
        num_speculative_tokens=condition.num_speculative_tokens,
        engine=engine,
        verify=spec.verify,
        verify_options=verify_options(spec),
        draft_sampling=cast(DraftSampling, spec.draft_sampling),  # checked
        module_schedule=cast(ModuleSchedule, spec.module_schedule),  # checked
        draft_length=draft_length(spec),
        draft_token_ids=token_ids,
    )


def needs_of(condition: Condition, target: Target, heads: Heads) -> PoolNeeds:
    """What the decoder of a condition would want of its pool, without building it.

    Args:
        condition: one column of the table.
        target: the frozen model.
        heads: of `spec.head`; not read for K = 0.
    """
    engine, num_drafts = condition.config.engine, condition.num_speculative_tokens
    drafter, _ = build_drafter(
        target,
        heads if num_drafts else None,
        policy=resolve_policy(condition.policy or "training"),
        num_speculative_tokens=num_drafts,
        engine=replace(engine, audit=False),
        draft_sampling="greedy",
        schedule="cycle",
        length=FixedLength(),
        draft_token_ids=None,
    )
    return pool_needs(
        target,
        drafter,
        engine=engine,
        max_model_len=engine.max_model_len or target.config.max_position_embeddings,
        num_speculative_tokens=num_drafts,
    )
