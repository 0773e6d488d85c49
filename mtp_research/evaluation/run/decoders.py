"""The decoder of a condition, from its configuration. Letter: K drafts per step.

From the configuration to the decoder's own setting types; nothing here imports torch.

The types check ranges and each other, so building them is the check that `preflight` makes before a
model is loaded.

Which code runs attention and KV writes: Triton's kernels or the reference, and why.

Letters: none.

What a results file says about the heads it was decoded with, so that a report needs no folder.

Letter: N MTP modules.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from mtp_research.config.grid import expand
from mtp_research.config.schema import EngineConfig, EvalConfig, SamplingConfig, SpecConfig
from mtp_research.decode.arguments import resolve_policy
from mtp_research.decode.build import Heads, build_drafter
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import (
    BatchTableLength,
    ConfidenceLength,
    DraftLength,
    ExpectedGainLength,
    FixedLength,
)
from mtp_research.decode.draft.mtp_drafter import DraftSampling
from mtp_research.decode.pool_size import PoolNeeds, pool_needs
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.verify.verify import LengthSchedule, VerifyOptions, check_options
from mtp_research.evaluation.run.conditions import Condition, conditions_of
from mtp_research.heads.draft_vocabulary import RANKING_FILE, most_frequent
from mtp_research.heads.record import RECORD_FILE, read_head_record
from mtp_research.kernels import checks
from mtp_research.models.loading.placement import resolve_device
from mtp_research.models.target import Target
from mtp_research.policy.plan import ModuleSchedule
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from mtp_research.runtime.files import sha256_of


def check_settings(config: EvalConfig) -> None:
    """Build every setting of every cell of the grid and throw it away.

    Raises:
        ConfigError: a value is out of range, or would be ignored.
    """
    conditions_of(config)
    for cell in expand(config).cells:
        _check_cell(cell)


def _check_cell(config: EvalConfig) -> None:
    num_drafts = config.spec.num_speculative_tokens
    options, length = verify_options(config.spec), draft_length(config.spec)
    sampling_params(config.sampling, seed=0, stop_token_ids=(0,))
    if num_drafts > 0:
        check_options(config.spec.verify, options, num_speculative_tokens=num_drafts)
    is_headless = config.spec.head in (None, "oracle")
    if config.spec.draft_vocabulary_size is not None and is_headless and num_drafts > 0:
        raise ConfigError(
            "spec.draft_vocabulary_size must be null for spec.head="
            f"{config.spec.head or 'null'}, got {config.spec.draft_vocabulary_size}; "
            "set spec.draft_vocabulary_size=null."
        )
    if length is not None and is_headless:
        raise ConfigError(
            f"spec.draft_length must be fixed for spec.head={config.spec.head or 'null'}, "
            f"got {config.spec.draft_length}; set spec.draft_length=fixed."
        )


def verify_options(spec: SpecConfig) -> VerifyOptions:
    """Settings of the lossy rules.

    Raises:
        ConfigError: a value is out of range.
    """
    thinking = spec.relaxed_thinking_token_ids
    if thinking is not None and len(thinking) != 2:
        raise ConfigError(
            "spec.relaxed_thinking_token_ids must hold the begin and the end token, got "
            f"{thinking}; set spec.relaxed_thinking_token_ids=[BEGIN,END]."
        )
    return VerifyOptions(
        relaxed_top_n=spec.relaxed_top_n,
        relaxed_delta=spec.relaxed_delta,
        relaxed_thinking_token_ids=None if thinking is None else (thinking[0], thinking[1]),
        typical_epsilon=spec.typical_epsilon,
        typical_delta=spec.typical_delta,
        synthetic_rates=tuple(spec.synthetic_rates),
        synthetic_length=spec.synthetic_length,
        synthetic_schedule=cast(LengthSchedule, spec.synthetic_schedule),  # checked
    )


def draft_length(spec: SpecConfig) -> DraftLength | None:
    """The rule for the number of drafts; None makes always K.

    Raises:
        ConfigError: a value is out of range, or the rule does not read it.
    """
    readers = {
        "draft_p_min": ("confidence", spec.draft_p_min != SpecConfig.draft_p_min),
        "draft_table": ("batch_table", bool(spec.draft_table)),
        "draft_cost_ratio": ("expected_gain", spec.draft_cost_ratio is not None),
    }
    for name, (rule, is_set) in readers.items():
        if is_set and spec.draft_length != rule:
            raise ConfigError(
                f"spec.{name} must be left alone for spec.draft_length={spec.draft_length}; "
                f"set spec.draft_length={rule}."
            )
    if spec.draft_length == "confidence":
        return ConfidenceLength(spec.draft_p_min)
    if spec.draft_length == "batch_table":
        return BatchTableLength(tuple(sorted(spec.draft_table.items())))
    if spec.draft_length == "expected_gain":
        return ExpectedGainLength(spec.draft_cost_ratio)
    assert spec.draft_length == "fixed", f"validation let through {spec.draft_length}"
    return None


def sampling_params(
    sampling: SamplingConfig, *, seed: int, stop_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Parameters of one request; `stop_token_ids` are the target's, used unless `ignore_eos`.

    Raises:
        ConfigError: a value is out of range.
    """
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=() if sampling.ignore_eos else stop_token_ids,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        dry_multiplier=sampling.dry_multiplier,
        dry_base=sampling.dry_base,
        dry_allowed_length=sampling.dry_allowed_length,
    )


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


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse Triton kernels on a CPU, unless Triton's own interpreter is on.

    Args:
        backend: `engine.backend`.
        device: of the target.

    Raises:
        EnvironmentFault: `backend` is `triton` and cannot run.
    """
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and device.type != "cuda" and not is_interpreted:
        raise EnvironmentFault(
            f"engine.backend=triton needs a CUDA GPU, the target is on {device}; "
            "set engine.backend=auto, or TRITON_INTERPRET=1 to run Triton's interpreter."
        )


def reference_note(engine: EngineConfig, device: str) -> str | None:
    """One line for people who may think that kernels run; None where they do.

    Args:
        engine: its backend decides.
        device: `model.device`.

    Raises:
        EnvironmentFault: `device` is `cuda` and no GPU can be used.
    """
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


_SPEC_FACTS = ("unroll", "num_mtp_modules", "hidden_source", "recycle_norm")


def head_facts(head: str | None) -> dict[str, object] | None:
    """Name, spec and hash of trained heads; None where there are none to describe.

    Args:
        head: `spec.head`: a folder of trained heads, `oracle`, a native checkpoint, or None.

    Returns:
        `name`, `unroll`, `num_mtp_modules` (N), `hidden_source`, `recycle_norm`, and the sha256 of
        the weights. Only the name for native heads, which carry no record.
    """
    if head is None or head == "oracle":
        return None
    folder = Path(head)
    if not (folder / RECORD_FILE).is_file():
        return {"name": folder.name}
    spec = read_head_record(folder)["spec"]
    weights = folder / "model.safetensors"
    digest = sha256_of(weights) if weights.is_file() else None
    facts: dict[str, object] = {"name": folder.name, "sha256": digest}
    return facts | {name: spec.get(name) for name in _SPEC_FACTS}


def ranking_sha256(head: str | None) -> str | None:
    """sha256 of the token ranking that a reduced draft vocabulary is cut from; None without one.

    Args:
        head: as for `head_facts`.
    """
    path = None if head is None else Path(head) / RANKING_FILE
    return sha256_of(path) if path is not None and path.is_file() else None
