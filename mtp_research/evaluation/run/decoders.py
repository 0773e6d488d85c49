"""The decoder of a condition, from its configuration, and what a results file says of its parts.

The decoder's setting types check ranges and each other, so building them is the check that
`preflight` makes before a model is loaded. Letters: K drafts per step, N MTP modules.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from mtp_research.config.schema import EngineConfig, SpecConfig
from mtp_research.decode.build import build_drafter
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.drafter import DraftSampling, Heads
from mtp_research.decode.pool_size import PoolNeeds, pool_needs
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.settings_check import draft_length
from mtp_research.heads.draft_vocabulary import RANKING_FILE, most_frequent
from mtp_research.heads.record import RECORD_FILE, conventions_phrase, read_head_record
from mtp_research.kernels import checks
from mtp_research.models.loading.placement import resolve_device
from mtp_research.models.loading.source import source_facts
from mtp_research.models.target import Target
from mtp_research.policy.fields import ModuleSchedule
from mtp_research.runtime.errors import EnvironmentFault
from mtp_research.runtime.files import sha256_of


def spec_settings(
    spec: SpecConfig,
    *,
    policy: str,
    num_speculative_tokens: int,
    draft_token_ids: Sequence[int] | None = None,
) -> SpecSettings:
    """What a decoder of this configuration speculates; nothing but `verify` counts for K = 0."""
    length = draft_length(spec)
    if num_speculative_tokens == 0:
        return SpecSettings(num_speculative_tokens=0, verify=spec.verify)
    return SpecSettings(
        num_speculative_tokens=num_speculative_tokens,
        policy=policy,
        verify=spec.verify,
        verify_options=spec,
        draft_sampling=cast(DraftSampling, spec.draft_sampling),  # checked
        module_schedule=cast(ModuleSchedule | None, spec.module_schedule),  # checked
        draft_length=length,
        draft_token_ids=draft_token_ids,
    )


def build_decoder(
    condition: Condition, target: Target, heads: Heads, *, num_blocks: int | None = None
) -> SpecDecoder:
    """A fresh decoder; `heads`, of `spec.head`, are not read for K = 0.

    `num_blocks` of the pool were planned for it, with what stays free beside it; None plans here.
    """
    spec, engine = condition.config.spec, condition.config.engine
    if num_blocks is not None:
        engine = replace(engine, num_blocks=num_blocks, memory_fraction=1.0)
    num_drafts, token_ids = condition.num_speculative_tokens, None
    if num_drafts and spec.head is not None and spec.draft_vocabulary_size is not None:
        token_ids = most_frequent(spec.head, num_tokens=spec.draft_vocabulary_size, target=target)
    settings = spec_settings(
        spec,
        policy=condition.policy or "training",
        num_speculative_tokens=num_drafts,
        draft_token_ids=token_ids,
    )
    return SpecDecoder(target, heads if num_drafts else None, spec=settings, engine=engine)


def needs_of(condition: Condition, target: Target, heads: Heads) -> PoolNeeds:
    """What the decoder of a condition would want of its pool, without building it."""
    engine, num_drafts = condition.config.engine, condition.num_speculative_tokens
    heads = heads if num_drafts else None
    spec = SpecSettings(num_speculative_tokens=num_drafts, policy=condition.policy or "training")
    drafter, _ = build_drafter(target, heads, spec=spec, engine=replace(engine, audit=False))
    limit = engine.max_model_len or target.config.max_position_embeddings
    return pool_needs(target, drafter, plan=spec.plan(heads), engine=engine, max_model_len=limit)


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse Triton kernels on a CPU, unless Triton's own interpreter is on."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device.type != "cuda" and not is_interpreted:
        raise EnvironmentFault(
            f"engine.backend=triton needs a CUDA GPU, the target is on {device}; "
            "set engine.backend=auto, or TRITON_INTERPRET=1 to run Triton's interpreter."
        )


def reference_note(engine: EngineConfig, device: str) -> str | None:
    """One line for people who may think that kernels run; None where they do."""
    if engine.backend == "triton":
        return None  # runs, or is refused by `check_backend`
    reasons = []
    if engine.backend == "reference":
        reasons.append("engine.backend=reference")
    if resolve_device(device).type != "cuda":
        is_visible = torch.cuda.is_available()
        reasons.append("model.device=cpu" if is_visible else "no CUDA GPU is visible")
    if checks.triton is None:
        reasons.append("the triton package is not installed")
    if not reasons:
        return None
    return (
        "note: attention and KV writes run in plain PyTorch (the reference path), because "
        f"{' and '.join(reasons)}; times are not those of the kernels."
    )


_SPEC_FACTS = ("unroll", "num_mtp_modules", "module_schedule", "hidden_source", "recycle_norm")


def head_facts(head: str | None) -> dict[str, object] | None:
    """Name, spec (`unroll`, ...), conventions and sha256 of the weights of `spec.head`.

    Only the name for native heads, which carry no record; None for `oracle` and no heads.
    """
    if head is None or head == "oracle":
        return None
    folder = Path(head)
    if not (folder / RECORD_FILE).is_file():
        return {"name": folder.name, **source_facts(head)}
    spec = read_head_record(folder)["spec"]
    weights = folder / "model.safetensors"
    digest = sha256_of(weights) if weights.is_file() else None
    facts: dict[str, object] = {
        "name": folder.name,
        "sha256": digest,
        "conventions": conventions_phrase(spec),
    }
    return facts | {name: spec.get(name) for name in _SPEC_FACTS}


def ranking_sha256(head: str | None) -> str | None:
    """sha256 of the token ranking that a reduced draft vocabulary is cut from; None without one."""
    path = None if head is None else Path(head) / RANKING_FILE
    return sha256_of(path) if path is not None and path.is_file() else None
