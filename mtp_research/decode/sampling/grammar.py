"""Structured output: a grammar says which tokens may follow, a mask takes the others away.

Every draft position gets its own mask, because a draft moves the grammar on: row j sees the output
so far and drafts d_1..d_j. A draft that the grammar forbids has no weight in its row's masked
logits, so that every verification rule rejects it; the rows after it are never used. The matcher is
wound back after the masks are made and moves on only by emitted tokens.

The masks are made on the host from the tokens and drafts of the step before, and verification is
the first to read them. So the host launches the target pass of a step, then learns what the step
before has decided, makes the masks while the target runs, and launches the rest. No mask is older
than its drafts; deferred output and captured steps stay, as two graphs in the place of one.

Letters: R requests, K drafts per step, V vocabulary, W = ceil(V / 32) words of a mask.

    compiler = XGrammarCompiler(vocabulary, stop_token_ids=(1, 5))  # needs the extra `grammar`
    sampling = SamplingParams(grammar=compiler.json_schema(schema), stop_token_ids=(1, 5))

Source: xgrammar (Dong et al., arXiv:2411.15100), whose bit layout and protocol these are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling_params import Matcher, SamplingParams
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    import xgrammar

BITS_PER_WORD = 32
_MAX_ERROR = 300  # characters of an exception's text that are kept
Answer = TypeVar("Answer")


@runtime_checkable
class ForVocabulary(Protocol):
    """A grammar that knows the vocabulary it was compiled for."""

    @property
    def vocab_size(self) -> int:
        """Logits of the models that it fits."""
        ...


def start_matcher(sampling: SamplingParams, *, vocab_size: int) -> "GuardedMatcher | None":
    """The matcher of a request, asked once for a mask; None without a grammar.

    Raises:
        ConfigError: the grammar is another vocabulary's, or raises.
    """
    grammar = sampling.grammar
    if grammar is None:
        return None
    if isinstance(grammar, ForVocabulary) and grammar.vocab_size != vocab_size:
        raise ConfigError(
            f"sampling.grammar must be compiled for the {vocab_size} logits of the target, got one "
            f"for {grammar.vocab_size}; set XGrammarCompiler(vocab_size={vocab_size})."
        )
    try:
        matcher = GuardedMatcher(grammar.start(stop_token_ids=sampling.stop_token_ids))
    except Exception as error:  # not our code: whatever it raises is the request's own fault
        raise _cannot_start(_said(error)) from error
    step_bitmask([matcher], [()], num_speculative_tokens=0, vocab_size=vocab_size)
    if matcher.error is not None:
        raise _cannot_start(matcher.error)
    return matcher


def _cannot_start(error: str) -> ConfigError:
    return ConfigError(
        f"sampling.grammar must start and give a mask, got {error}; "
        "compile it for this target's vocabulary and stop tokens."
    )


class GuardedMatcher:
    """A matcher whose first exception is kept, to end its own request and no other.

    From then on it says that it is terminated and is asked nothing more.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        self.error: str | None = None

    @property
    def is_terminated(self) -> bool:
        """Whether the output has ended, or the matcher failed."""
        return self._ask(lambda: bool(self.matcher.is_terminated), otherwise=True)

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        """See `Matcher`."""
        self._ask(lambda: self.matcher.fill_bitmask(bitmask, row=row), otherwise=None)

    def accept_token(self, token_id: int) -> bool:
        """See `Matcher`; False after a failure."""
        return self._ask(lambda: bool(self.matcher.accept_token(token_id)), otherwise=False)

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""
        self._ask(lambda: self.matcher.rollback(num_tokens), otherwise=None)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Move on by emitted tokens; one that the grammar forbids is a failure."""
        for token_id in token_ids:
            if not self.accept_token(token_id):
                self.error = self.error or f"the output holds {token_id} against its grammar"
                return

    def _ask(self, question: Callable[[], Answer], *, otherwise: Answer) -> Answer:
        if self.error is not None:
            return otherwise
        try:
            return question()
        except Exception as error:  # not our code
            self.error = _said(error)
            return otherwise


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR]}"


def step_bitmask(
    matchers: Sequence[Matcher | None],
    drafts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    vocab_size: int,
) -> Tensor:
    """Masks of a step; the matchers are as before when this returns.

    Returns:
        `[R, K+1, W]` int32 on the host; all ones where nothing is forbidden or used.
    """
    shape = bitmask_shape(
        len(matchers), num_speculative_tokens=num_speculative_tokens, vocab_size=vocab_size
    )
    bitmask = torch.full(shape, -1, dtype=torch.int32)
    for rows, matcher, tokens in zip(bitmask, matchers, drafts, strict=True):
        if matcher is not None:
            _fill_rows(matcher, rows, tokens, vocab_size=vocab_size)
    return bitmask


def bitmask_shape(
    num_requests: int, *, num_speculative_tokens: int, vocab_size: int
) -> tuple[int, int, int]:
    """R, K + 1 and W."""
    return num_requests, num_speculative_tokens + 1, -(-vocab_size // BITS_PER_WORD)


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Logits `[R, J, V]` with -inf at tokens whose bit is 0; NaN stays NaN.

    Of the masks `[R, K+1, W]` a step that verifies fewer drafts than K takes the first J.
    """
    bitmask = bitmask[:, : logits.shape[1]]
    bit = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[..., None] >> bit) & 1  # [R, J, W, 32]
    allowed = allowed.flatten(-2)[..., : logits.shape[-1]].bool()
    return logits + torch.where(allowed, 0.0, -torch.inf)


def _fill_rows(matcher: Matcher, rows: Tensor, drafts: Sequence[int], *, vocab_size: int) -> None:
    """Write the masks `[K+1, W]` of one request until a draft is forbidden or ends the output."""
    num_accepted = 0
    for row, token_id in enumerate([*drafts, None]):
        if matcher.is_terminated:
            break
        matcher.fill_bitmask(rows, row=row)
        if token_id is None or not 0 <= token_id < vocab_size:
            break
        if not matcher.accept_token(token_id):
            break
        num_accepted += 1
    matcher.rollback(num_accepted)


@dataclass(frozen=True, eq=False)  # a grammar is itself: compiled ones have no hash
class XGrammar:
    """A compiled grammar; made by `XGrammarCompiler`."""

    compiled: "xgrammar.CompiledGrammar"

    @property
    def vocab_size(self) -> int:
        """Logits of the models that it fits."""
        return self.compiled.tokenizer_info.vocab_size

    def start(self, *, stop_token_ids: tuple[int, ...]) -> Matcher:
        """A matcher at the start of an output."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=list(stop_token_ids))
        return _XGrammarMatcher(matcher)


@dataclass(frozen=True)
class _XGrammarMatcher:
    """A `Matcher` over one of xgrammar's."""

    matcher: "xgrammar.GrammarMatcher"

    @property
    def is_terminated(self) -> bool:
        return self.matcher.is_terminated()

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        self.matcher.fill_next_token_bitmask(bitmask, row)

    def accept_token(self, token_id: int) -> bool:
        return self.matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self.matcher.rollback(num_tokens)


class XGrammarCompiler:
    """Compiles grammars for one vocabulary.

    Args:
        vocabulary: bytes that each token id stands for, at most V; special tokens are empty.
        stop_token_ids: tokens that may end an output.
        vocab_size: V where the model has more logits than the tokenizer has tokens; default
            `len(vocabulary)`.

    Raises:
        EnvironmentFault: the package is not installed.
    """

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        *,
        stop_token_ids: tuple[int, ...],
        vocab_size: int | None = None,
    ) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise EnvironmentFault(
                "structured output needs the package xgrammar, which is not installed; "
                "pip install 'mtp-research[grammar]'."
            ) from error
        info = xgrammar.TokenizerInfo(
            list(vocabulary),
            vocab_type=xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=list(stop_token_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def regex(self, pattern: str) -> XGrammar:
        """Outputs that match a regular expression as a whole."""
        return XGrammar(self._compiler.compile_regex(pattern))

    def json_schema(self, schema: str) -> XGrammar:
        """JSON documents of a schema, given as JSON text."""
        return XGrammar(self._compiler.compile_json_schema(schema))

    def ebnf(self, grammar: str) -> XGrammar:
        """Outputs of a grammar in xgrammar's EBNF, start rule `root`."""
        return XGrammar(self._compiler.compile_grammar(grammar))
