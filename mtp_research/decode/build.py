"""The parts of a decoder, built from its settings: drafter, auditor, page pool, ring, scheduler.

Letters: K drafts per step.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from mtp_research.config import EngineConfig
from mtp_research.decode.audit import Auditor
from mtp_research.decode.block_manager import BlockManager
from mtp_research.decode.draft import Drafter, MTPDrafter, NullDrafter, OracleDrafter
from mtp_research.decode.kv_cache import HiddenRing, KVCache
from mtp_research.decode.scheduler import Scheduler
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import Target
from mtp_research.policy import HiddenPolicy, ModuleSchedule, num_slots_needed

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
    sample_drafts: bool,
    schedule: ModuleSchedule,
) -> DraftParts:
    """Drafter of `heads`, and its auditor where the engine asks for one; see `SpecDecoder`."""
    if num_speculative_tokens == 0 or heads is None:
        return DraftParts(None, None)
    if heads == "null":
        return DraftParts(NullDrafter(num_speculative_tokens), None)
    if heads == "oracle":
        oracle = OracleDrafter(target, num_speculative_tokens, backend=engine.backend)
        return DraftParts(oracle, None)
    drafter = MTPDrafter(
        heads=heads,
        policy=policy,
        num_speculative_tokens=num_speculative_tokens,
        first_kv_layer=target.config.num_hidden_layers,
        schedule=schedule,
        sample_drafts=sample_drafts,
        backend=engine.backend,
    )
    if not engine.audit:
        return DraftParts(drafter, None)
    auditor = Auditor(policy, num_speculative_tokens, drafter.num_kv_layers)
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
    """Allocate the page pool and the ring, and set up the scheduler."""
    num_extra_slots = drafter.num_extra_slots if drafter is not None else 0
    num_draft_layers = drafter.num_kv_layers if drafter is not None else 0
    slots_per_request = num_slots_needed(max_model_len, num_speculative_tokens) + num_extra_slots
    blocks_per_request = -(-slots_per_request // engine.block_size)
    num_blocks = engine.num_blocks or engine.max_num_requests * blocks_per_request
    num_kv_heads, key_dim, value_dim = target.kv_geometry
    cache = KVCache(
        target.config.num_hidden_layers + num_draft_layers,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        num_kv_heads=num_kv_heads,
        head_dims=(key_dim, value_dim),
        dtype=target.dtype,
        device=target.device,
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
        BlockManager(num_blocks, block_size=engine.block_size),
        num_slots=engine.max_num_requests,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_prefill_chunk=engine.max_prefill_chunk,
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        num_extra_slots=num_extra_slots,
    )
    return LoopState(cache, ring, scheduler)
