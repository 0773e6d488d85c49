"""What a caller hands to `SpecDecoder`, checked and resolved before anything is allocated.

Letters: K drafts per step.
"""

from collections.abc import Iterable, Sequence

from mtp_research.config.ranges import check_values
from mtp_research.config.schema import EngineConfig
from mtp_research.config.training_schema import MAX_SPECULATIVE_TOKENS
from mtp_research.decode.build import Heads
from mtp_research.decode.draft.draft_length import DraftLength
from mtp_research.decode.draft.mtp_drafter import DRAFT_SAMPLINGS
from mtp_research.decode.sampling.sampling_params import SamplingParams, check_sampling
from mtp_research.decode.verify.verify import VerifyOptions, check_options
from mtp_research.decode.verify.verify_rules import RULES, Rule
from mtp_research.heads.stack import MTPHeads
from mtp_research.policy.plan import MODULE_SCHEDULES, POLICIES, HiddenPolicy
from mtp_research.runtime.errors import ConfigError


def resolve_policy(policy: str | HiddenPolicy) -> HiddenPolicy:
    """A policy by name, or any other as it is.

    Raises:
        ConfigError: unknown name.
    """
    if isinstance(policy, HiddenPolicy):
        return policy
    _check_choice("spec.policy", policy, POLICIES)
    return POLICIES[policy]


def resolve_rule(
    verify: str | Rule, *, options: VerifyOptions, num_speculative_tokens: int
) -> Rule:
    """A verification rule by name, or any other as it is; without drafts all only sample.

    Raises:
        ConfigError: unknown name, or settings that a built-in rule would ignore.
    """
    if isinstance(verify, str):
        _check_choice("spec.verify", verify, RULES)
        verify = RULES[verify]
    if num_speculative_tokens == 0:
        return RULES["standard"]
    if verify in RULES.values():  # what another rule reads of the options is its own affair
        check_options(rule_name(verify), options, num_speculative_tokens=num_speculative_tokens)
    return verify


def rule_name(rule: Rule) -> str:
    """The key of a built-in rule, the function's name of any other."""
    names = (name for name, built_in in RULES.items() if built_in == rule)
    return next(names, rule.function.__name__)


def check_arguments(
    heads: Heads,
    *,
    num_speculative_tokens: int,
    engine: EngineConfig,
    draft_sampling: str,
    module_schedule: str,
    draft_length: DraftLength | None,
    draft_token_ids: Sequence[int] | None,
) -> None:
    """Refuse values out of range, and heads that do not fit the other arguments.

    Raises:
        ConfigError: names the key and the values it takes.
    """
    if isinstance(heads, str):
        _check_choice("spec.head", heads, ("null", "oracle"))
    _check_choice("spec.draft_sampling", draft_sampling, DRAFT_SAMPLINGS)
    _check_choice("spec.module_schedule", module_schedule, MODULE_SCHEDULES)
    check_values(engine, section="engine")
    if not 0 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise ConfigError(
            f"spec.k must be in 0..{MAX_SPECULATIVE_TOKENS}, got {num_speculative_tokens}; "
            "set spec.k."
        )
    if num_speculative_tokens > 0 and heads is None:
        raise ConfigError(
            "spec.k > 0 needs heads; pass MTP heads, 'null' or 'oracle', or set spec.k=0."
        )
    if draft_length is not None and isinstance(heads, str):
        raise ConfigError(
            f"spec.draft_length must be fixed for spec.head={heads}, which has no passes to leave "
            f"out, got {type(draft_length).__name__}; set spec.draft_length=fixed."
        )
    if draft_token_ids is not None and not isinstance(heads, MTPHeads):
        raise ConfigError(
            f"a draft vocabulary needs MTP heads, got spec.head={heads}; "
            "set spec.draft_vocabulary_size=null, or draft_token_ids=None."
        )


def check_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    rule: Rule,
    vocab_size: int,
    deferred: bool,
) -> None:
    """Refuse a prompt or sampling parameters that this decoder cannot follow.

    Raises:
        ConfigError: a token id outside the vocabulary; see `check_sampling`; a temperature that the
            rule ignores.
    """
    outside = [token for token in prompt_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(
            f"prompt token ids must be in [0, {vocab_size}), got {outside[:5]}; "
            "check the tokenizer."
        )
    check_sampling(sampling, vocab_size=vocab_size, deferred=deferred)
    if sampling.temperature > 0 and not rule.samples:
        raise ConfigError(
            f"sampling.temperature must be 0 for spec.verify={rule_name(rule)}, "
            f"got {sampling.temperature}; set spec.verify=standard."
        )


def _check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key} must be one of {sorted(choices)}, got {value!r}; set {key}.")
