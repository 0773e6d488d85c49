"""The parts of a decoder, built from its settings: drafter, auditor, page pool, ring, scheduler.

Letters: K drafts per step.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import nn

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.draft.draft_length import DraftLength
from mtp_research.decode.draft.drafter import Drafter, NullDrafter, OracleDrafter
from mtp_research.decode.draft.mtp_drafter import DraftSampling, MTPDrafter
from mtp_research.decode.graphs.capture import captured_sizes, require_capturable
from mtp_research.decode.graphs.decode_graphs import StepGraphs
from mtp_research.decode.kernel_support import kernel_backend, require_kernel_support
from mtp_research.decode.pool_size import (
    NUM_SPARE_BLOCKS,
    blocks_per_request,
    free_bytes,
    plan_num_blocks,
    pool_layers,
    pool_needs,
)
from mtp_research.decode.schedule.blocks import BlockManager, PrefixCache
from mtp_research.decode.schedule.scheduler import Scheduler
from mtp_research.decode.slot_state import HiddenRing, KVCache
from mtp_research.decode.step import DeviceStep
from mtp_research.heads.draft_vocabulary import restrict_vocabulary
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.paged import require_exact_length
from mtp_research.models.loading.placement import num_ranks
from mtp_research.models.recurrent import RecurrentStates
from mtp_research.models.rewrites.products import merge_projections
from mtp_research.models.rewrites.rotary import leave_rotary_to_attention
from mtp_research.models.target import Target
from mtp_research.policy.audit import Auditor
from mtp_research.policy.plan import HiddenPolicy, ModuleSchedule
from mtp_research.runtime.errors import ConfigError

Heads = MTPHeads | Literal["null", "oracle"] | None


class DraftParts(NamedTuple):
    """Who drafts and who watches; both None without drafts."""

    drafter: Drafter | None
    auditor: Auditor | None


class LoopState(NamedTuple):
    """The state of a loop beside its requests."""

    cache: KVCache
    ring: HiddenRing
    scheduler: Scheduler


def build_drafter(
    target: Target,
    heads: Heads,
    *,
    policy: HiddenPolicy,
    num_speculative_tokens: int,
    engine: EngineConfig,
    draft_sampling: DraftSampling,
    schedule: ModuleSchedule,
    length: DraftLength,
    draft_token_ids: Sequence[int] | None,
) -> DraftParts:
    """Drafter of `heads`, and its auditor where the engine asks for one; see `SpecDecoder`."""
    if num_speculative_tokens == 0 or heads is None:
        return DraftParts(None, None)
    if heads == "null":
        return DraftParts(NullDrafter(num_speculative_tokens), None)
    if heads == "oracle":
        oracle = OracleDrafter(target, num_speculative_tokens, backend=kernel_backend(engine))
        return DraftParts(oracle, None)
    drafter = MTPDrafter(
        heads=heads,
        policy=policy,
        num_speculative_tokens=num_speculative_tokens,
        first_kv_layer=len(target.kv_layers),
        schedule=schedule,
        draft_sampling=draft_sampling,
        backend=kernel_backend(engine),
        length=length,
        vocabulary=None if draft_token_ids is None else restrict_vocabulary(heads, draft_token_ids),
    )
    if not engine.audit:
        return DraftParts(drafter, None)
    auditor = Auditor(
        policy,
        num_speculative_tokens,
        drafter.num_kv_layers,
        num_requests_per_watched=engine.audit_every,
    )
    return DraftParts(replace(drafter, auditor=auditor), auditor)


def build_state(
    target: Target,
    drafter: Drafter | None,
    *,
    engine: EngineConfig,
    max_model_len: int,
    num_speculative_tokens: int,
    keep_draft_probs: bool,
) -> LoopState:
    """Allocate the page pool and the ring, and set up the scheduler.

    Raises:
        ConfigError: the target is not what the kernels or the pool can hold.
    """
    require_exact_length(max_model_len, limit=target.max_exact_tokens)
    layers = pool_layers(target, drafter)
    require_kernel_support(layers, dtype=target.dtype, device=target.device, engine=engine)
    needs = pool_needs(
        target,
        drafter,
        engine=engine,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
    )
    num_blocks = plan_num_blocks(
        needs,
        asked=None if engine.num_blocks is None else engine.num_blocks + NUM_SPARE_BLOCKS,
        free=free_bytes(target.device),
        memory_fraction=engine.memory_fraction,
    )
    recurrent = None
    if target.has_recurrent_state:
        recurrent = RecurrentStates(
            target.mixers,
            num_slots=engine.max_num_requests,
            num_speculative_tokens=num_speculative_tokens,
        )
    cache = KVCache(
        layers,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        dtype=target.dtype,
        device=target.device,
        recurrent=recurrent,
    )
    ring = HiddenRing(
        engine.max_num_requests,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        keep_draft_probs=keep_draft_probs,
        dtype=target.dtype,
        device=target.device,
    )
    scheduler = Scheduler(
        BlockManager(
            num_blocks - NUM_SPARE_BLOCKS,
            block_size=engine.block_size,
            prefix_cache=_build_prefix_cache(target, drafter, engine=engine),
        ),
        num_slots=engine.max_num_requests,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_prefill_chunk=engine.max_prefill_chunk,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        num_extra_slots=drafter.num_extra_slots if drafter is not None else 0,
        steps_per_priority=engine.steps_per_priority,
        deferred=engine.deferred_output,
    )
    return LoopState(cache, ring, scheduler)


def build_graphs(
    step: DeviceStep, *, engine: EngineConfig, max_model_len: int
) -> StepGraphs | None:
    """Captured steps, where the engine asks for them.

    Raises:
        ConfigError: a target or settings that a captured step cannot follow.
        EnvironmentFault: there is no GPU.
    """
    if not engine.cuda_graphs:
        return None
    require_capturable(step, engine=engine)
    # What an oracle or nobody drafts is not planned on the device.
    has_modules = step.drafter is None or isinstance(step.drafter, MTPDrafter)
    captures_mixed = engine.capture_mixed and has_modules
    if engine.compile:
        models: list[nn.Module] = [step.target.model]
        if isinstance(step.drafter, MTPDrafter):
            models.append(step.drafter.heads)
        for model in models:
            merge_projections(model, few_rows_kernel=engine.few_rows_kernel)
            rotates = engine.rotary_in_attention and num_ranks() == 1  # not tried with parts
            leave_rotary_to_attention(step.target, model, enabled=rotates)
    return StepGraphs(
        step,
        batch_sizes=captured_sizes(engine.max_num_requests, wanted=engine.graph_batch_sizes),
        num_table_blocks=blocks_per_request(
            step.drafter,
            engine=engine,
            max_model_len=max_model_len,
            num_speculative_tokens=step.num_speculative_tokens,
        ),
        block_size=engine.block_size,
        compile_step=engine.compile,
        overlap_launches=engine.overlap_launches,
        max_mixed_rows=engine.max_num_batched_tokens if captures_mixed else 0,
    )


def _build_prefix_cache(
    target: Target, drafter: Drafter | None, *, engine: EngineConfig
) -> PrefixCache | None:
    """The prefix cache that the engine asks for.

    Raises:
        ConfigError: blocks of this target or policy cannot be shared.
    """
    if not engine.prefix_caching:
        return None
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.prefix_caching must be false for a target with recurrent layers, whose states "
            "are not kept by block; set engine.prefix_caching=false."
        )
    if not isinstance(drafter, MTPDrafter):
        return PrefixCache(block_size=engine.block_size, num_following_tokens=0)
    if not drafter.policy.clean:
        raise ConfigError(
            f"engine.prefix_caching must be false for spec.policy={drafter.policy.name}, whose "
            "draft KV depends on the history of each request; set engine.prefix_caching=false."
        )
    return PrefixCache(
        block_size=engine.block_size,
        num_following_tokens=drafter.num_speculative_tokens,
        watcher=drafter.auditor,
    )
