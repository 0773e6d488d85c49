"""The parts of a decoder, built from its settings: who drafts, who watches, state, scheduler."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.draft.draft_length import ExpectedGainLength
from mtp_research.decode.draft.drafter import Drafter, Heads, MTPDrafter, NullDrafter, OracleDrafter
from mtp_research.decode.pool_size import (
    NUM_SPARE_BLOCKS,
    free_for_pool,
    plan_num_blocks,
    pool_layers,
    pool_needs,
)
from mtp_research.decode.schedule.blocks import BlockManager, PrefixCache
from mtp_research.decode.schedule.scheduler import Scheduler
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.decode.step import DeviceStep
from mtp_research.heads.stack import MTPHeads
from mtp_research.kernels import checks
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.models.attention.paged import require_exact_length
from mtp_research.models.experts import EXPERTS_NAME, expert_implementations
from mtp_research.models.family import LayerGeometry
from mtp_research.models.fp8_layers import holds_fp8
from mtp_research.models.recurrent import RecurrentStates
from mtp_research.models.rewrites.cpu_layers import fuse_norms, join_experts, order_weights
from mtp_research.models.target import Target
from mtp_research.policy.audit import Auditor
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError

if TYPE_CHECKING:
    from mtp_research.models.rewrites.invariant import InvariantProducts


class LoopState(NamedTuple):
    """The state of a loop beside its requests."""

    cache: KVCache
    slot_state: SlotState
    scheduler: Scheduler


def build_drafter(
    target: Target, heads: Heads, *, spec: SpecSettings, engine: EngineConfig
) -> tuple[Drafter | None, Auditor | None]:
    """Drafter of `heads`, and its auditor where the engine asks for one; see `SpecDecoder`."""
    plan, backend = spec.plan(heads), kernel_backend(engine)
    if isinstance(heads, MTPHeads):
        heads.split()
    if spec.num_speculative_tokens == 0 or heads is None:
        return None, None
    if heads == "null":
        return NullDrafter(plan), None
    if heads == "oracle":
        return OracleDrafter(target, plan, backend=backend), None
    auditor = Auditor(plan, num_requests_per_watched=engine.audit_every) if engine.audit else None
    vocabulary = None
    if spec.draft_token_ids is not None:
        from mtp_research.heads.draft_vocabulary import restrict_vocabulary

        vocabulary = restrict_vocabulary(heads, spec.draft_token_ids)
    drafter = MTPDrafter(
        heads=heads,
        plan=plan,
        first_kv_layer=len(target.kv_layers),
        draft_sampling=spec.draft_sampling,
        backend=backend,
        auditor=auditor,
        length=spec.draft_length,
        vocabulary=vocabulary,
    )
    return drafter, auditor


def build_state(
    target: Target,
    drafter: Drafter | None,
    *,
    plan: DraftPlan,
    engine: EngineConfig,
    max_model_len: int,
) -> LoopState:
    """Allocate the page pool and the slots' state, and set up the scheduler."""
    require_exact_length(max_model_len, limit=target.max_exact_tokens)
    layers = pool_layers(target, drafter)
    require_kernel_support(layers, dtype=target.dtype, device=target.device, engine=engine)
    needs = pool_needs(target, drafter, plan=plan, engine=engine, max_model_len=max_model_len)
    num_blocks = plan_num_blocks(
        needs,
        asked=None if engine.num_blocks is None else engine.num_blocks + NUM_SPARE_BLOCKS,
        free=free_for_pool(target),
        memory_fraction=engine.memory_fraction,
    )
    recurrent = None
    if target.has_recurrent_state:
        recurrent = RecurrentStates(
            target.mixers,
            num_slots=engine.max_num_requests,
            num_speculative_tokens=plan.num_speculative_tokens,
        )
    cache = KVCache(
        layers,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        dtype=target.dtype,
        device=target.device,
        recurrent=recurrent,
    )
    slot_state = SlotState(
        engine.max_num_requests,
        max_model_len=max_model_len,
        plan=plan,
        hidden_size=target.config.hidden_size,
        vocab_size=target.config.vocab_size,
        keep_draft_probs=isinstance(drafter, MTPDrafter) and drafter.draft_sampling == "sample",
        dtype=target.dtype,
        device=target.device,
    )
    scheduler = Scheduler(
        BlockManager(
            num_blocks - NUM_SPARE_BLOCKS,
            block_size=engine.block_size,
            prefix_cache=_build_prefix_cache(target, drafter, engine=engine),
        ),
        plan,
        engine=engine,
        max_model_len=max_model_len,
        num_extra_slots=drafter.num_extra_slots if drafter is not None else 0,
    )
    return LoopState(cache, slot_state, scheduler)


def _build_prefix_cache(
    target: Target, drafter: Drafter | None, *, engine: EngineConfig
) -> PrefixCache | None:
    if not engine.prefix_caching:
        return None
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.prefix_caching must be false for a target with recurrent layers, whose states "
            "are not kept by block; set engine.prefix_caching=false."
        )
    if not isinstance(drafter, MTPDrafter):
        return PrefixCache(block_size=engine.block_size)
    policy = drafter.plan.policy
    if not policy.clean:
        raise ConfigError(
            f"engine.prefix_caching must be false for spec.policy={policy.name}, whose "
            "draft KV depends on the history of each request; set engine.prefix_caching=false."
        )
    return PrefixCache(block_size=engine.block_size, plan=drafter.plan, watcher=drafter.auditor)


def shallow_passes(step: DeviceStep, *, spec: SpecSettings, engine: EngineConfig) -> list[int]:
    """Numbers of passes, fewer than K, of steps that leave the other passes out for good.

    Steps must be captured, their draft length chosen by what they were timed to take, and passes
    must run that make no draft. Ranks have clocks of their own, and cached blocks must be complete.
    """
    rule, plan, target = spec.draft_length, step.plan, step.target
    is_timed = isinstance(rule, ExpectedGainLength) and rule.cost_ratio is None
    is_alone = target.exchange is None and target.parts is None
    if not (engine.cuda_graphs and is_timed and is_alone) or engine.prefix_caching:
        return []
    if not isinstance(step.drafter, MTPDrafter):
        return []
    last = max(m for m in range(plan.num_speculative_tokens) if plan.has_base(m))
    return list(range(last, -1, -1))


def kernel_backend(engine: EngineConfig) -> str:
    """The backend that attention kernels are called with."""
    return checks.INVARIANT if engine.deterministic else engine.backend


def build_products(
    target: Target, heads: object, *, engine: EngineConfig
) -> "InvariantProducts | None":
    """The mode that a deterministic step runs in; None for the usual arithmetic."""
    models = [target.model, *([heads] if isinstance(heads, MTPHeads) else [])]
    is_usual = engine.few_rows_kernel and not engine.deterministic
    order_weights(models, enabled=is_usual)
    fuse_norms(models, enabled=is_usual)
    join_experts(models, enabled=is_usual)
    if not engine.deterministic:
        return None
    if any(holds_fp8(model) for model in models):
        raise ConfigError(
            "engine.deterministic=true has no batch-invariant products of FP8 weights; set "
            "model.keep_fp8=false."
        )
    own = "triton" if target.device.type == "cuda" else "reference"
    if engine.backend not in ("auto", own):
        raise ConfigError(
            f"engine.deterministic=true needs engine.backend=auto or {own} on "
            f"{target.device.type}, got {engine.backend}; set engine.backend=auto."
        )
    if target.has_recurrent_state:
        raise ConfigError(
            "engine.deterministic=true does not support recurrent layers, whose scan follows the "
            f"prompt chunks, got family {target.family_name}; set engine.deterministic=false."
        )
    from mtp_research.models.rewrites.invariant import InvariantProducts

    is_compiled = engine.compile and engine.cuda_graphs
    if is_compiled:
        _require_compilable(target, models)
    return InvariantProducts([] if is_compiled else models)


def _require_compilable(target: Target, models: Sequence[nn.Module]) -> None:
    """Refuse what deterministic steps cannot be compiled for; uncompiled they know it."""
    names = set[str]().union(*map(expert_implementations, models))
    found = "ranks that share experts" if target.exchange is not None else None
    if names - {EXPERTS_NAME}:
        found = f"experts by {', '.join(sorted(names))}"
    if found is not None:
        raise ConfigError(
            "engine.deterministic=true compiles targets without experts, or with experts by "
            f"{EXPERTS_NAME} on one rank, got {found}; set engine.compile=false."
        )


def require_kernel_support(
    layers: Sequence[LayerGeometry],
    *,
    dtype: torch.dtype,
    device: torch.device,
    engine: EngineConfig,
) -> None:
    """Refuse a target whose attention the backend's kernels do not compute."""
    backend, pool = kernel_backend(engine), torch.empty(0, dtype=dtype, device=device)
    try:
        resolved = checks.resolve_backend(backend, tensor=pool, kernel=attention_kernel)
    except ValueError:
        return  # no Triton here: the entries and the kernels say so
    if resolved != "triton":
        return
    key = f"model.dtype={str(dtype).removeprefix('torch.')}"
    try:
        checks.check_kernel_dtype("the KV pool's", pool, kernel=attention_kernel)
        key = f"engine.block_size={engine.block_size}"
        checks.check_block_size(engine.block_size)
        for index, layer in enumerate(layers):
            for name, size, high in _sizes(layer):
                key = f"model.path with a size of {size} in KV layer {index}"
                checks.check_head_dim(name, size, high=high)
    except ValueError as fault:
        reason = str(fault).replace("backend='reference'", "engine.backend=reference")
        raise ConfigError(f"{key} does not fit engine.backend={engine.backend}: {reason}") from None


def _sizes(layer: LayerGeometry) -> Iterator[tuple[str, int, int]]:
    if layer.num_kv_heads == 0:
        return  # holds nothing
    if layer.kind == "latent":
        yield "L", layer.value_dim, checks.MAX_LATENT_DIM
        yield "P", layer.key_dim - layer.value_dim, checks.MAX_HEAD_DIM
        return
    yield "Dk", layer.key_dim, checks.MAX_HEAD_DIM
    yield "Dv", layer.value_dim, checks.MAX_HEAD_DIM
