"""Structured output: a grammar says which tokens may follow, a mask takes the others away.

Every draft position gets its own mask, because a draft moves the grammar on: row j sees the output
so far and drafts d_1..d_j. A draft that the grammar forbids has no weight in its row's masked
logits, so that every verification rule rejects it; the rows after it are never used. The matcher is
wound back after the masks are made and moves on only by emitted tokens.

The masks are made on the host, before the step runs: a request with a grammar needs its tokens and
drafts there, so it cannot be decoded with the host one step late.

Letters: R requests, K drafts per step, V vocabulary, W = ceil(V / 32) words of a mask.
Source: bit layout and protocol as in xgrammar (see `xgrammar_adapter`), whose masks fit unchanged.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

BITS_PER_WORD = 32


class Matcher(Protocol):
    """State of one request's output in its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether a stop token has ended the output."""
        ...

    def fill_bitmask(self, bitmask: Tensor, *, row: int) -> None:
        """Write the tokens that may come next into `bitmask[row]`, int32 `[*, W]`, in place.

        Bit b of word w stands for token 32 w + b. May only be asked before termination.
        """
        ...

    def accept_token(self, token_id: int) -> bool:
        """Move on by one token; False, and nothing changes, if it may not come next."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by requests and never changed by them; hashable."""

    def start(self, *, stop_token_ids: tuple[int, ...]) -> Matcher:
        """A matcher at the start of an output that ends with one of these tokens."""
        ...


def step_bitmask(
    matchers: Sequence[Matcher | None],
    drafts: Sequence[Sequence[int]],
    *,
    num_speculative_tokens: int,
    vocab_size: int,
) -> Tensor:
    """Masks of a step; the matchers are as before when this returns.

    Args:
        matchers: one a request, None where it has no grammar.
        drafts: each request's drafts, at most K; ids outside the vocabulary are rejected drafts.
        num_speculative_tokens: K.
        vocab_size: V.

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
