"""From the configuration to the decoder's own setting types; nothing here imports torch.

The types check ranges and each other, so building them is the check that `preflight` makes before a
model is loaded.
"""

from typing import cast

from mtp_research.config import EvalConfig, SamplingConfig, SpecConfig
from mtp_research.decode.draft_length import (
    BatchTableLength,
    ConfidenceLength,
    DraftLength,
    ExpectedGainLength,
)
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.verify_options import LengthSchedule, VerifyOptions, check_options
from mtp_research.errors import ConfigError
from mtp_research.evaluation.conditions import conditions_of
from mtp_research.grid import expand


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
