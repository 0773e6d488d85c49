"""What is speculated and how: the one value that a decoder is built with, checked and resolved.

    SpecSettings(policy="training", num_speculative_tokens=3)

Names stand for objects of the tables `POLICIES` and `RULES`; an object of one's own may take the
place of a name. Letters: K drafts per step, N MTP modules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtp_research.config.ranges import check_values
from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.config.training_schema import MAX_SPECULATIVE_TOKENS
from mtp_research.decode.draft.draft_length import DraftLength, FixedLength
from mtp_research.decode.draft.drafter import DRAFT_SAMPLINGS, DraftSampling, Heads
from mtp_research.decode.sampling.sampling_params import SamplingParams, check_sampling
from mtp_research.decode.verify.verify_options import check_options, with_rates
from mtp_research.decode.verify.verify_rules import RULES, Rule
from mtp_research.heads.record import decoded_schedule
from mtp_research.heads.stack import HeadSpec, MTPHeads
from mtp_research.policy.fields import MODULE_SCHEDULES, POLICIES, HiddenPolicy, ModuleSchedule
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ArgumentTypeError, ConfigError


@dataclass(frozen=True)
class SpecSettings:
    """Settings of speculative decoding.

    Attributes:
        num_speculative_tokens: K, 0..64; 0 is plain decoding through the same loop.
        policy: key of `POLICIES`, or any `HiddenPolicy`.
        verify: key of `verify_rules.RULES`, or any `Rule`; `standard` rejection sampling equals
            greedy at temperature 0.
        verify_options: settings of the lossy rules.
        draft_sampling: `greedy`, `processed` or `sample`, see `drafter.choose_drafts`.
        module_schedule: which module runs which draft step; None: as the heads were trained.
        draft_length: makes fewer than K drafts where more do not pay.
        draft_token_ids: the tokens that may be drafted, see `heads.draft_vocabulary`; None for all.

    Raises:
        ConfigError: a value is out of range, or the rule would ignore it.
    """

    num_speculative_tokens: int = 3
    policy: str | HiddenPolicy = "training"
    verify: str | Rule = "standard"
    verify_options: VerifyOptions = field(default_factory=VerifyOptions)
    draft_sampling: DraftSampling = "greedy"
    module_schedule: ModuleSchedule | None = None
    draft_length: DraftLength = field(default_factory=FixedLength)
    draft_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name, kind, table in (("policy", HiddenPolicy, POLICIES), ("verify", Rule, RULES)):
            value = getattr(self, name)
            if isinstance(value, kind):
                continue
            _check_choice(name, value, table)
            if not isinstance(table[value], kind):
                raise ConfigError(
                    f"{name}={value!r} must be the name of a {kind.__name__}, got that of a "
                    f"{type(table[value]).__name__}; put a {kind.__name__} in the table."
                )
        _check_choice("draft_sampling", self.draft_sampling, DRAFT_SAMPLINGS)
        if self.module_schedule is not None:
            _check_choice("module_schedule", self.module_schedule, MODULE_SCHEDULES)
        require_type("verify_options", self.verify_options, VerifyOptions)
        _check_length_rule(self.draft_length)
        number = self.num_speculative_tokens
        if type(number) is not int or not 0 <= number <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be an integer in 0..{MAX_SPECULATIVE_TOKENS}, got "
                f"{number!r}; set num_speculative_tokens (command line: spec.k)."
            )
        # A rule outside the table may have a function that is called like a built-in one.
        if self.num_speculative_tokens > 0 and self.rule in RULES.values():
            check_options(
                rule_name(self.rule),
                self.verify_options,
                num_speculative_tokens=self.num_speculative_tokens,
            )

    @property
    def rule(self) -> Rule:
        """The verification rule; without drafts all only sample."""
        if self.num_speculative_tokens == 0:
            return RULES["standard"]
        return RULES[self.verify] if isinstance(self.verify, str) else self.verify

    @property
    def step_options(self) -> VerifyOptions:
        """`verify_options` as steps read them: rates in the place of a profile or a length."""
        return with_rates(self.verify_options, num_speculative_tokens=self.num_speculative_tokens)

    def plan(self, heads: Heads) -> DraftPlan:
        """What a decoder with these heads drafts; ConfigError for an order they do not know."""
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        spec = heads.spec if isinstance(heads, MTPHeads) else HeadSpec(num_mtp_modules=1)
        schedule = decoded_schedule(self.module_schedule, recorded=spec.module_schedule)
        return DraftPlan(policy, self.num_speculative_tokens, spec.num_mtp_modules, schedule)


def _check_length_rule(rule: object) -> None:
    if isinstance(rule, type) or not isinstance(rule, DraftLength):
        raise ArgumentTypeError(
            "draft_length must be a rule of mtp_research.decode.draft.draft_length, such as "
            f"ExpectedGainLength(), got {rule!r} of type {type(rule).__name__}; pass one, or an "
            "object with keeps, limits and num_drafts (command line: spec.draft_length)."
        )


def require_type(name: str, value: object, expected: type, *, call: str | None = None) -> None:
    """Raise `ArgumentTypeError` where an argument is of another class than `call` makes."""
    if not isinstance(value, expected):
        raise ArgumentTypeError(
            f"{name} must be of type {expected.__name__}, got one of type {type(value).__name__}; "
            f"pass {call or expected.__name__}(...)."
        )


def check_heads(heads: Heads, *, spec: SpecSettings, engine: EngineConfig) -> None:
    """Refuse heads that do not fit the settings, and engine settings out of range."""
    require_type("spec", spec, SpecSettings)
    require_type("engine", engine, EngineConfig)
    if not isinstance(heads, str | MTPHeads | None):
        require_type("heads", heads, MTPHeads, call="load_heads")
    check_values(engine, section="engine")
    if isinstance(heads, str) and heads not in ("null", "oracle"):
        raise ConfigError(
            f"heads must be 'null', 'oracle' or what load_heads gave, got {heads!r}; pass "
            f"load_heads({heads!r}, target), if that is their folder (command line: spec.head)."
        )
    if spec.num_speculative_tokens > 0 and heads is None:
        raise ConfigError(
            f"num_speculative_tokens={spec.num_speculative_tokens} needs heads, got None; pass "
            "load_heads(...), 'null' or 'oracle' as heads, or set num_speculative_tokens=0 "
            "(command line: spec.head and spec.k)."
        )
    if isinstance(heads, str) and not isinstance(spec.draft_length, FixedLength):
        raise ConfigError(
            f"draft_length must be FixedLength for heads={heads!r}, which have no passes to leave "
            f"out, got {type(spec.draft_length).__name__}; set draft_length=FixedLength() (command "
            "line: spec.draft_length=fixed)."
        )
    if spec.draft_token_ids is not None and not isinstance(heads, MTPHeads):
        raise ConfigError(
            f"draft_token_ids needs MTP heads, got heads={heads!r}; set draft_token_ids=None "
            "(command line: spec.draft_vocabulary_size=null)."
        )


def check_request(
    prompt_token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    rule: Rule,
    vocab_size: int,
) -> None:
    """Refuse a prompt or sampling parameters that a decoder cannot follow."""
    if not isinstance(sampling, SamplingParams):
        raise ConfigError(
            f"sampling must be SamplingParams or None, got {type(sampling).__name__}; set "
            "sampling=SamplingParams(...); for other ones of each prompt call "
            "add_request(prompt, sampling=...) and step()."
        )
    outside = [token for token in prompt_token_ids if not 0 <= token < vocab_size]
    if outside:
        raise ConfigError(
            f"prompt token ids must be in [0, {vocab_size}), got {outside[:5]}; "
            "check the tokenizer."
        )
    check_sampling(sampling, vocab_size=vocab_size)
    if sampling.temperature > 0 and not rule.samples:
        raise ConfigError(
            f"temperature must be 0 for verify={rule_name(rule)!r}, got {sampling.temperature}; "
            'set SpecSettings(verify="standard") (command line: spec.verify=standard).'
        )


def check_positions(
    position_ids: Tensor | Sequence[Sequence[int]],
    *,
    num_axes: int,
    num_prompt_tokens: int,
    max_model_len: int,
    engine: EngineConfig,
) -> tuple[tuple[int, ...], ...]:
    """Positions of a prompt by axis, or a refusal of what a decoder cannot follow."""
    if num_axes == 1:
        raise ConfigError(
            "position_ids needs a target whose rotary positions have several axes, got a family "
            "with one; leave position_ids out."
        )
    if engine.prefix_caching:
        raise ConfigError(
            "position_ids needs engine.prefix_caching=false, got true: cached blocks are found by "
            "their tokens alone; set engine.prefix_caching=false."
        )
    try:
        given = torch.as_tensor(position_ids)
    except (TypeError, ValueError, RuntimeError) as fault:  # lists of several lengths, no numbers
        raise ConfigError(f"position_ids must be a table of integers: {fault}.") from None
    shape = (num_axes, num_prompt_tokens)
    if tuple(given.shape) != shape or given.is_floating_point() or given.dtype is torch.bool:
        raise ConfigError(
            f"position_ids must be integers [axes, prompt tokens] = {list(shape)}, got "
            f"{list(given.shape)} of {given.dtype}; give one row per axis."
        )
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= max_model_len:
        raise ConfigError(
            f"position_ids must be in [0, {max_model_len}), got {low}..{high}; "
            "give positions of the prompt or raise engine.max_model_len."
        )
    return tuple(map(tuple, given.tolist()))


def rule_name(rule: Rule) -> str:
    """The key of a rule in the table, the function's name of any other."""
    names = (name for name, known in RULES.items() if known == rule)
    return next(names, getattr(rule.function, "__name__", repr(rule.function)))


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(
            f"{name} must be one of {sorted(choices)}, got {value!r}; set {name} (command line: "
            f"spec.{name})."
        )
