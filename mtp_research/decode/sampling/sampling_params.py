"""How one request is sampled and when it stops: the fields that a user sets.

Logits are processed in this order: repetition, frequency and presence penalty, DRY, bias, masks
(allowed ids, bad words, stop ids before `min_tokens`, grammar), temperature, top-k, top-p, min-p.
Temperature and what follows it stand as in transformers. vLLM puts masks and bias before the
penalties, so that its penalty divides a biased logit, and min-p before top-k and top-p.

Letters: V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from mtp_research.runtime.errors import ConfigError

if TYPE_CHECKING:  # values of this module are read where torch is not wanted
    from mtp_research.decode.sampling.grammar import Grammar

LogprobsKind = Literal["raw", "processed"]
MAX_PENALTY = 2.0  # of frequency and presence, as in the OpenAI interface
MAX_DRY_MATCH = 32  # longer repetitions count as this long: 1.75 ** 30 already ends all doubt


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it stops.

    Attributes:
        temperature: 0 is greedy, otherwise > 0.
        top_k: keep the k most probable tokens, 0 keeps all.
        top_p: keep the smallest set with at least this probability, in (0, 1].
        min_p: keep tokens at least this probable relative to the best one, in [0, 1]; 0 keeps all.
        seed: noise seed of this request; equal seeds give equal noise whatever the batch.
        max_new_tokens: most tokens to emit, >= 0.
        stop_token_ids: tokens that end the request; the stop token itself is emitted.
        min_tokens: no stop token before this many are emitted, in 0..max_new_tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens of the prompt
            or the output, > 0; 1 is off.
        frequency_penalty: subtracted per occurrence in the output, in [-2, 2].
        presence_penalty: subtracted once if the token is in the output, in [-2, 2].
        dry_multiplier: a token that would extend a repetition of n tokens loses
            `dry_multiplier * dry_base ** (n - dry_allowed_length)`; >= 0, 0 is off.
        dry_base: see `dry_multiplier`, >= 1.
        dry_allowed_length: shorter repetitions are free, in 1..`MAX_DRY_MATCH`.
        dry_breaker_token_ids: no repetition reaches across these, and none of them is penalised.
        logit_bias: (token id, finite amount added to its logit) pairs, each id once.
        allowed_token_ids: only these may be emitted, at least one; None allows all.
        bad_words: token sequences that may not complete, in prompt or output; each at least one
            token.
        grammar: what the output must follow, see `grammar`; None is off.
        logprobs: report every emitted token's log-probability and those of this many best tokens,
            >= 0; None is off.
        logprobs_kind: of the target's own distribution (`raw`), or of the one that tokens are
            chosen from (`processed`; at temperature 0 the processed logits at temperature 1).

    Raises:
        ConfigError: names the field, the range and the value.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breaker_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: "Grammar | None" = None
    logprobs: int | None = None
    logprobs_kind: LogprobsKind = "raw"

    def __post_init__(self) -> None:
        """Check ranges and the fields that need each other."""
        try:
            hash(self)
        except TypeError as error:
            raise ConfigError(
                f"sampling must hold tuples wherever it holds sequences, got an {error}; "
                "convert it with tuple()."
            ) from error
        checks = (*self._range_checks(), *self._processor_checks())
        for name, holds, expected in checks:
            if not holds:
                raise ConfigError(
                    f"sampling.{name} must be {expected}, got {getattr(self, name)}; "
                    f"set sampling.{name}."
                )

    def __hash__(self) -> int:
        """Computed once: fields may hold a vocabulary's worth of ids, and every step looks up."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    def _range_checks(self) -> tuple[tuple[str, bool, str], ...]:
        return (
            ("temperature", 0.0 <= self.temperature < math.inf, "finite and >= 0"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("max_new_tokens", self.max_new_tokens >= 0, ">= 0"),
            (
                "min_tokens",
                0 <= self.min_tokens <= self.max_new_tokens,
                f"in 0..max_new_tokens={self.max_new_tokens}",
            ),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, ">= 0 or None"),
            (
                "logprobs_kind",
                self.logprobs_kind in ("processed", "raw"),
                "one of ['processed', 'raw']",
            ),
        )

    def _processor_checks(self) -> tuple[tuple[str, bool, str], ...]:
        biased = [token_id for token_id, _ in self.logit_bias]
        bounded = f"in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]"
        return (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and > 0"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, bounded),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, bounded),
            ("dry_multiplier", 0 <= self.dry_multiplier < math.inf, "finite and >= 0"),
            ("dry_base", 1 <= self.dry_base < math.inf, "finite and >= 1"),
            (
                "dry_allowed_length",
                1 <= self.dry_allowed_length <= MAX_DRY_MATCH,
                f"in 1..{MAX_DRY_MATCH}",
            ),
            (
                "logit_bias",
                len(set(biased)) == len(biased)
                and all(math.isfinite(amount) for _, amount in self.logit_bias),
                "(token id, finite amount) pairs, each id once",
            ),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None or len(self.allowed_token_ids) > 0,
                "at least one id, or None to allow all",
            ),
            ("bad_words", all(self.bad_words), "sequences of at least one token id"),
            (
                "stop_token_ids",
                self.grammar is None or len(self.stop_token_ids) > 0,
                "at least one id where sampling.grammar is set (a grammar ends with a stop token)",
            ),
        )

    @property
    def uses_processors(self) -> bool:
        """Whether logits must be processed before the temperature, the grammar aside."""
        return bool(
            self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.dry_multiplier
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or (self.min_tokens and self.stop_token_ids)
        )


def check_sampling(params: SamplingParams, *, vocab_size: int, deferred: bool) -> None:
    """Refuse what a decoder cannot do for a request.

    Args:
        params: parameters of the request.
        vocab_size: V of the target.
        deferred: the host commits a step late.

    Raises:
        ConfigError: a token id outside the vocabulary, more log-probabilities than tokens, or a
            grammar with deferred output.
    """
    named = {
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "dry_breaker_token_ids": params.dry_breaker_token_ids,
        "bad_words": [token_id for word in params.bad_words for token_id in word],
        # A stop token that cannot occur does no harm, but it cannot be masked either.
        "stop_token_ids": params.stop_token_ids if params.min_tokens else (),
    }
    for name, token_ids in named.items():
        outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
        if outside:
            raise ConfigError(
                f"sampling.{name} must hold token ids in [0, {vocab_size}), got {outside[:5]}; "
                "check the tokenizer."
            )
    if params.logprobs is not None and params.logprobs > vocab_size:
        raise ConfigError(
            f"sampling.logprobs must be at most the {vocab_size} tokens of the vocabulary, "
            f"got {params.logprobs}; lower it."
        )
    if params.grammar is not None and deferred:
        raise ConfigError(
            "sampling.grammar needs every token on the host before the next step, which "
            "engine.deferred_output=true gives up; set engine.deferred_output=false."
        )
