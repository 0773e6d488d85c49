"""Grammars compiled by xgrammar, behind the protocol of `grammar`; needs the extra `grammar`.

    compiler = XGrammarCompiler(vocabulary, stop_token_ids=(1, 5))
    sampling = SamplingParams(grammar=compiler.json_schema(schema), stop_token_ids=(1, 5))

Letters: V vocabulary.
Source: xgrammar (Dong et al., arXiv:2411.15100), package `xgrammar`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mtp_research.decode.grammar import Matcher
from mtp_research.errors import EnvironmentFault

if TYPE_CHECKING:  # decoding must not need it
    import xgrammar


@dataclass(frozen=True, eq=False)  # a grammar is itself: compiled ones have no hash
class XGrammar:
    """A compiled grammar; made by `XGrammarCompiler`."""

    compiled: "xgrammar.CompiledGrammar"

    def start(self, *, stop_token_ids: tuple[int, ...]) -> Matcher:
        """See `grammar.Grammar.start`."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self.compiled, override_stop_tokens=list(stop_token_ids))
        return _XGrammarMatcher(matcher)


@dataclass(frozen=True)
class _XGrammarMatcher:
    """See `grammar.Matcher`."""

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
