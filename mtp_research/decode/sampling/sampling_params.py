"""How one request is sampled and when it stops: the fields that a user sets.

Logits are processed in this order: repetition, frequency and presence penalty, DRY, bias, masks
(allowed ids, bad words, stop ids before `min_tokens`, grammar), temperature, top-k, top-p, min-p.
Temperature and what follows it stand as in transformers. vLLM puts masks and bias before the
penalties, so that its penalty divides a biased logit, and min-p before top-k and top-p.

Letters: V vocabulary.
"""

import functools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, FrozenInstanceError, dataclass, field, fields, replace
from types import NoneType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args, runtime_checkable

from mtp_research.config.ranges import check_values, legal_values, within
from mtp_research.config.schema import SamplingOptions
from mtp_research.decode.sampling.arguments import real_number, token_ids, whole_number
from mtp_research.runtime.errors import ConfigError

if TYPE_CHECKING:  # values of this module are read where torch is not wanted
    from torch import Tensor

LogprobsKind = Literal["raw", "processed"]
MAX_DRY_MATCH = 32  # longer repetitions count as this long: 1.75 ** 30 already ends all doubt
_NUM_SEED_BITS = 63


class Matcher(Protocol):
    """State of one request's output in its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether a stop token has ended the output."""
        ...

    def fill_bitmask(self, bitmask: "Tensor", *, row: int) -> None:
        """Write the tokens that may come next into `bitmask[row]`, int32 `[*, W]`, in place.

        Bit b of word w stands for token 32 w + b. May only be asked before termination. Every word
        must be written: the row holds the mask of an older step.
        """

    def accept_token(self, token_id: int) -> bool:
        """Move on by one token; False, and nothing changes, if it may not come next."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""


@runtime_checkable
class Grammar(Protocol):
    """A compiled grammar, shared by requests and never changed by them; hashable."""

    def start(self, *, stop_token_ids: tuple[int, ...]) -> Matcher:
        """A matcher at the start of an output that ends with one of these tokens."""
        ...


class TokenLogprobs(NamedTuple):
    """One emitted token.

    Attributes:
        logprob: natural logarithm of its probability, -inf if it had none (lossy rules).
        top: (token id, logprob) of the best tokens, best first; as many as the request asked for,
            or as have any probability.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass
class SamplingParams(SamplingOptions):
    """How one request is sampled and when it stops; cannot be changed.

    `SamplingOptions` holds the settings that the command line has too, with their ranges. A
    repetition of n tokens makes the token that would extend it lose
    `dry_multiplier * dry_base ** (n - dry_allowed_length)`.

    Attributes:
        seed: noise seed of this request; equal seeds give equal noise whatever the batch. None
            draws a fresh one for each request, which its `sampling.seed` then tells.
        stop_token_ids: tokens that end the request; the stop token itself is emitted.
        dry_breaker_token_ids: no repetition reaches across these, and none of them is penalised.
        logit_bias: (token id, finite amount added to its logit) pairs, each id once, or a mapping
            of token id to amount, which is kept as pairs.
        allowed_token_ids: only these may be emitted, at least one; None allows all.
        bad_words: token sequences that may not complete, in prompt or output; each at least one
            token.
        grammar: what the output must follow, see `decode.sampling.grammar`; None is off.
        logprobs: report every emitted token's log-probability and those of this many best tokens,
            >= 0; None is off.
        logprobs_kind: of the target's own distribution (`raw`), or of the one that tokens are
            chosen from (`processed`; at temperature 0 the processed logits at temperature 1).

    Raises:
        ConfigError: names the field, the range and the value.
    """

    seed: int | None = 0
    stop_token_ids: tuple[int, ...] = ()
    dry_breaker_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = within(None, 0, 1 << 30)
    logprobs_kind: LogprobsKind = field(default="raw", metadata={"choices": ("processed", "raw")})
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Read the fields, check ranges and the fields that need each other, close the value."""
        for item in fields(self):
            if item.init:
                setattr(self, item.name, _read(item, getattr(self, item.name)))
        try:
            value = hash(tuple(vars(self).values()))
        except TypeError as error:
            raise ConfigError(
                f"sampling.grammar must be hashable, got an {error}; give its class a __hash__."
            ) from error
        check_values(self, section="sampling")
        for name, holds, expected in self._checks():
            if not holds:
                raise ConfigError(
                    f"sampling.{name} must be {expected}, got {getattr(self, name)}; "
                    f"set sampling.{name}."
                )
        self._hash = value

    def __setattr__(self, name: str, value: object) -> None:
        if "_hash" in vars(self):
            raise FrozenInstanceError(f"cannot assign to {name!r}; use dataclasses.replace.")
        super().__setattr__(name, value)

    def __hash__(self) -> int:
        """Computed once: fields may hold a vocabulary's worth of ids, and every step looks up."""
        return self._hash

    @classmethod
    def of(
        cls, options: SamplingOptions, *, seed: int = 0, stop_token_ids: tuple[int, ...] = ()
    ) -> "SamplingParams":
        """Parameters of a request with the settings of the command line."""
        shared = {name: getattr(options, name) for name in SamplingOptions.__dataclass_fields__}
        return cls(**shared, seed=seed, stop_token_ids=stop_token_ids)

    def with_seed(self) -> "SamplingParams":
        """These parameters; with a fresh seed where there is none."""
        if self.seed is not None:
            return self
        return replace(self, seed=secrets.randbits(_NUM_SEED_BITS))

    def _checks(self) -> tuple[tuple[str, bool, str], ...]:
        biased = [token_id for token_id, _ in self.logit_bias]
        is_finite = all(math.isfinite(amount) for _, amount in self.logit_bias)
        return (
            (
                "min_tokens",
                self.min_tokens <= self.max_new_tokens,
                f"in 0..max_new_tokens={self.max_new_tokens}",
            ),
            (
                "logit_bias",
                len(set(biased)) == len(biased) and is_finite,
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

    @functools.cached_property
    def is_plain_greedy(self) -> bool:
        """Whether the best tokens of the target's own logits are all that is asked for."""
        is_bare = self.grammar is None and self.logprobs is None
        return self.temperature == 0 and is_bare and not self.uses_processors

    @functools.cached_property
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


def _read(item: "Field[object]", value: object) -> object:
    """A field's value in plain types; what it may be apart from its type is checked later."""
    key = f"sampling.{item.name}"
    if value is None and NoneType in get_args(item.type):
        return None
    if (read := _READERS.get(item.name)) is not None:
        return read(value, key)
    if item.type is float:
        return real_number(value, key=key, expected=legal_values(item))
    if item.type is int or int in get_args(item.type):
        return whole_number(value, key=key, expected=legal_values(item))
    return value


def _read_bias(value: object, key: str) -> tuple[tuple[int, float], ...]:
    members = tuple(value.items()) if isinstance(value, Mapping) else _members(value, key)
    try:
        pairs = [(token_id, amount) for token_id, amount in members]
    except (TypeError, ValueError):
        raise ConfigError(
            f"{key} must be (token id, finite amount) pairs, got a {type(value).__name__} of "
            "something else; set sampling.logit_bias=((token_id, amount), ...)."
        ) from None
    return tuple(
        (whole_number(token_id, key=f"a token id of {key}"), real_number(amount, key=key))
        for token_id, amount in pairs
    )


def _read_words(value: object, key: str) -> tuple[tuple[int, ...], ...]:
    return tuple(token_ids(word, key=f"each of {key}") for word in _members(value, key))


def _members(value: object, key: str) -> Iterable:
    if isinstance(value, list | tuple):
        return value
    raise ConfigError(f"{key} must be a tuple, got {type(value).__name__}; convert it.")


def _read_grammar(value: object, key: str) -> object:
    if isinstance(value, Grammar):
        return value
    raise ConfigError(
        f"{key} must be a compiled grammar with a method start(), got {type(value).__name__}; "
        "see decode.sampling.grammar."
    )


def _read_kind(value: object, key: str) -> object:
    if isinstance(value, str):
        return value
    raise ConfigError(f"{key} must be processed | raw, got {type(value).__name__}; set {key}=raw.")


def _read_ids(value: object, key: str) -> tuple[int, ...]:
    return token_ids(value, key=key)


_READERS: dict[str, Callable[[object, str], object]] = {
    "stop_token_ids": _read_ids,
    "dry_breaker_token_ids": _read_ids,
    "allowed_token_ids": _read_ids,
    "logit_bias": _read_bias,
    "bad_words": _read_words,
    "grammar": _read_grammar,
    "logprobs_kind": _read_kind,
}


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Refuse what a decoder cannot do for a request."""
    named = {
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids or (),
        "dry_breaker_token_ids": params.dry_breaker_token_ids,
        "bad_words": [token_id for word in params.bad_words for token_id in word],
        # A stop token that cannot occur does no harm, but it cannot be masked either.
        "stop_token_ids": params.stop_token_ids if params.min_tokens else (),
    }
    for name, ids in named.items():
        outside = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
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
