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

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling_params import Matcher, SamplingParams
from mtp_research.kernels.losses.logit_rows import BITS_PER_WORD, mask_logits
from mtp_research.runtime.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    import xgrammar

_MOST_THREADS = 8  # of one compiler's masks
_MAX_ERROR = 300  # characters of an exception's text that are kept
# Writes the mask of each matcher into the row `[*, W]` at its place.
FillMany: TypeAlias = Callable[[Sequence[Matcher], Tensor, Sequence[int]], None]


@runtime_checkable
class ForVocabulary(Protocol):
    """A grammar that knows the vocabulary it was compiled for."""

    @property
    def vocab_size(self) -> int:
        """Logits of the models that it fits."""
        ...


@runtime_checkable
class FillsMany(Protocol):
    """A matcher whose library makes the masks of several matchers in one call, on threads say."""

    @property
    def fill_many(self) -> FillMany:
        """The call; matchers with an equal one are handed to it together. Hashable."""
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
    StepMasks(num_speculative_tokens=0, vocab_size=vocab_size).make([matcher], [()])
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

    From then on it says that it is terminated and is asked nothing more. Each question has its own
    guard: they are asked for every draft of every step, and one guard of functions for all of them
    takes longer than many answers.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher
        # looked up once: to ask a protocol whether it fits takes microseconds
        self.fill_many = matcher.fill_many if isinstance(matcher, FillsMany) else None
        self.error: str | None = None

    @property
    def is_terminated(self) -> bool:
        """Whether the output has ended, or the matcher failed."""
        if self.error is not None:
            return True
        try:
            return bool(self.matcher.is_terminated)
        except Exception as error:  # not our code, here and below
            self.error = _said(error)
            return True

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        """See `Matcher`."""
        if self.error is not None:
            return
        try:
            self.matcher.fill_bitmask(bitmask, row=row)
        except Exception as error:
            self.error = _said(error)

    def accept_token(self, token_id: int) -> bool:
        """See `Matcher`; False after a failure."""
        if self.error is not None:
            return False
        try:
            return bool(self.matcher.accept_token(token_id))
        except Exception as error:
            self.error = _said(error)
            return False

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""
        if self.error is not None:
            return
        try:
            self.matcher.rollback(num_tokens)
        except Exception as error:
            self.error = _said(error)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Move on by emitted tokens; one that the grammar forbids is a failure."""
        for token_id in token_ids:
            if not self.accept_token(token_id):
                self.error = self.error or f"the output holds {token_id} against its grammar"
                return


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_ERROR]}"


class StepMasks:
    """Makes the masks of one step after another, in the same memory of the host.

    The masks of a step are read while it runs. Those of the next one need its tokens, so that the
    host has waited for it by then.
    """

    def __init__(
        self, *, num_speculative_tokens: int, vocab_size: int, pin_memory: bool = False
    ) -> None:
        self._num_drafts, self._vocab_size = num_speculative_tokens, vocab_size
        self._pin_memory = pin_memory
        self._masks = torch.empty(0, dtype=torch.int32)  # [R, K+1, W], of the largest batch so far
        self._written: set[int] = set()  # rows `[R (K+1)]` that a matcher wrote for the last step

    def make(
        self, matchers: Sequence[GuardedMatcher | None], drafts: Sequence[Sequence[int]]
    ) -> Tensor:
        """Masks of a step; the matchers are as before when this returns.

        Returns:
            `[R, K+1, W]` int32 on the host; all ones where nothing is forbidden or used. They hold
            until the next call.
        """
        if len(self._masks) < len(matchers):
            shape = bitmask_shape(
                len(matchers),
                num_speculative_tokens=self._num_drafts,
                vocab_size=self._vocab_size,
            )
            self._masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._pin_memory)
            self._written = set()
        rows = self._masks.flatten(0, 1)
        written = _fill_rows(
            rows,
            matchers,
            drafts,
            num_rows=self._num_drafts + 1,
            vocab_size=self._vocab_size,
        )
        if stale := self._written - written:
            rows.numpy()[list(stale)] = -1  # PyTorch takes six times as long
        self._written = written
        return self._masks[: len(matchers)]


def _fill_rows(
    rows: Tensor,
    matchers: Sequence[GuardedMatcher | None],
    drafts: Sequence[Sequence[int]],
    *,
    num_rows: int,
    vocab_size: int,
) -> set[int]:
    """Write masks `[R (K+1), W]`, of a request until a draft is forbidden or ends its output.

    All requests go from draft to draft together, for matchers that share the work.

    Returns:
        The rows that were written.
    """
    num_accepted = [0] * len(matchers)
    written: set[int] = set()
    active = [(index, one) for index, one in enumerate(matchers) if one is not None]
    asked = active
    for step in range(num_rows):
        asked = [(index, one) for index, one in asked if not one.is_terminated]
        places = [index * num_rows + step for index, _ in asked]
        _fill_together(rows, [one for _, one in asked], places)
        written.update(places)
        following = []
        for index, one in asked:
            if step == len(drafts[index]):
                continue
            token_id = drafts[index][step]
            if 0 <= token_id < vocab_size and one.accept_token(token_id):
                num_accepted[index] += 1
                following.append((index, one))
        asked = following
    for index, one in active:
        one.rollback(num_accepted[index])
    return written


def _fill_together(rows: Tensor, matchers: list[GuardedMatcher], places: list[int]) -> None:
    """Write one mask of each matcher, into `rows[place]`."""
    sharing: dict[FillMany, list[tuple[GuardedMatcher, int]]] = {}
    for one, place in zip(matchers, places, strict=True):
        if one.fill_many is None:
            one.fill_bitmask(rows, row=place)
        else:
            sharing.setdefault(one.fill_many, []).append((one, place))
    for fill_many, members in sharing.items():
        try:
            fill_many([one.matcher for one, _ in members], rows, [place for _, place in members])
        except Exception:  # one of them: asked alone it says so, and the others have their masks
            for one, place in members:
                one.fill_bitmask(rows, row=place)


def bitmask_shape(
    num_requests: int, *, num_speculative_tokens: int, vocab_size: int
) -> tuple[int, int, int]:
    """R, K + 1 and W."""
    return num_requests, num_speculative_tokens + 1, -(-vocab_size // BITS_PER_WORD)


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Logits `[R, J, V]` with -inf at tokens whose bit is 0; NaN stays NaN.

    Of the masks `[R, K+1, W]` a step that verifies fewer drafts than K takes the first J.
    """
    return mask_logits(logits, bitmask)


@dataclass(frozen=True, eq=False)  # a grammar is itself: compiled ones have no hash
class XGrammar:
    """A compiled grammar; made by `XGrammarCompiler`."""

    compiled: "xgrammar.CompiledGrammar"
    fill_many: FillMany  # of all grammars of the compiler

    @property
    def vocab_size(self) -> int:
        """Logits of the models that it fits."""
        return self.compiled.tokenizer_info.vocab_size

    def start(self, *, stop_token_ids: tuple[int, ...]) -> Matcher:
        """A matcher at the start of an output."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=list(stop_token_ids))
        return _XGrammarMatcher(matcher, self.fill_many)


@dataclass(frozen=True)
class _XGrammarMatcher:
    """A `Matcher` over one of xgrammar's."""

    matcher: "xgrammar.GrammarMatcher"
    fill_many: FillMany

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


def _fill_by_threads() -> FillMany:
    """`FillMany` of xgrammar's matchers.

    On half of the machine's threads as by its own default, but not on all of a large machine. Of
    151,936 random tokens a mask took 1.5 us, or 190 in the middle of a JSON string (one thread).
    """
    import xgrammar

    batch = xgrammar.BatchGrammarMatcher(
        max_threads=max(1, min((os.cpu_count() or 1) // 2, _MOST_THREADS))
    )

    def fill_many(matchers: Sequence[Matcher], bitmask: Tensor, places: Sequence[int]) -> None:
        own = [cast(_XGrammarMatcher, one).matcher for one in matchers]
        batch.batch_fill_next_token_bitmask(own, bitmask, list(places))

    return fill_many


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
        self._fill_many = _fill_by_threads()

    def regex(self, pattern: str) -> XGrammar:
        """Outputs that match a regular expression as a whole."""
        return XGrammar(self._compiler.compile_regex(pattern), self._fill_many)

    def json_schema(self, schema: str) -> XGrammar:
        """JSON documents of a schema, given as JSON text."""
        return XGrammar(self._compiler.compile_json_schema(schema), self._fill_many)

    def ebnf(self, grammar: str) -> XGrammar:
        """Outputs of a grammar in xgrammar's EBNF, start rule `root`."""
        return XGrammar(self._compiler.compile_grammar(grammar), self._fill_many)
