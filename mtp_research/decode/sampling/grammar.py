"""Structured output: a grammar says which tokens may follow, a mask takes the others away.

Every draft position gets its own mask, because a draft moves the grammar on: row j sees the output
so far and drafts d_1..d_j. A draft that the grammar forbids has no weight in its row's masked
logits, so that every verification rule rejects it; the rows after it are never used. The matcher is
wound back after the masks are made and moves on only by emitted tokens.

The masks are made on the host, before the step runs: a request with a grammar needs its tokens and
drafts there. So a step that decides a token of such a request is committed before the next one is
prepared, deferred output or not, and it is not replayed as a graph.

Letters: R requests, K drafts per step, V vocabulary, W = ceil(V / 32) words of a mask.

    compiler = XGrammarCompiler(vocabulary, stop_token_ids=(1, 5))  # needs the extra `grammar`
    sampling = SamplingParams(grammar=compiler.json_schema(schema), stop_token_ids=(1, 5))

Source: xgrammar (Dong et al., arXiv:2411.15100), whose bit layout and protocol these are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling_params import Matcher
from mtp_research.runtime.errors import EnvironmentFault

if TYPE_CHECKING:
    import xgrammar

BITS_PER_WORD = 32


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
    num_words = -(-vocab_size // BITS_PER_WORD)
    shape = (len(matchers), num_speculative_tokens + 1, num_words)
    bitmask = torch.full(shape, -1, dtype=torch.int32)
    for rows, matcher, tokens in zip(bitmask, matchers, drafts, strict=True):
        if matcher is not None:
            _fill_rows(matcher, rows, tokens, vocab_size=vocab_size)
    return bitmask


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Logits `[R, K+1, V]` with -inf at tokens whose bit is 0; NaN stays NaN."""
    bit = torch.arange(BITS_PER_WORD, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[..., None] >> bit) & 1  # [R, K+1, W, 32]
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
