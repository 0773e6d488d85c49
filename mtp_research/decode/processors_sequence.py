"""Processors that compare the end of a text with token sequences: bad words and DRY.

Letters: R requests, J rows a request, L length of the text table, V vocabulary, W bad words of a
request, P longest bad word without its last token.
Source: DRY is Weidmann's sampler as in text-generation-webui; bad words are transformers'.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.sampling_params import MAX_DRY_MATCH
from mtp_research.decode.transfer import to_device

_ANY = -1  # matches every token; fills short bad words on the left
_NONE = -2  # no token: before the start of a text
_MAX_DRY_PENALTY = 1e30  # a repetition never makes a token impossible where all others are


class DryTensors(NamedTuple):
    """DRY settings of a batch; see `SamplingParams`.

    Attributes:
        multiplier: `[R]` float32, 0 is off.
        base: `[R]` float32.
        allowed_length: `[R]` float32.
        is_breaker: `[R, V]` bool.
    """

    multiplier: Tensor
    base: Tensor
    allowed_length: Tensor
    is_breaker: Tensor


class BadWordTensors(NamedTuple):
    """Bad words of a batch.

    Attributes:
        prefix: `[R, W, P]` int64, each word without its last token, filled up with `_ANY`.
        last: `[R, W]` int64, its last token; 0 where the request has fewer words.
        is_word: `[R, W]` bool.
    """

    prefix: Tensor
    last: Tensor
    is_word: Tensor


def bad_word_tensors(
    words: list[tuple[tuple[int, ...], ...]], *, device: torch.device
) -> BadWordTensors | None:
    """Pad the bad words of a batch; None where there are none."""
    num_words = max(len(row) for row in words)
    if num_words == 0:
        return None
    width = max(len(word) for row in words for word in row) - 1
    padding = [(_ANY,) * width + (0, 0)]
    rows = [
        [(*(_ANY,) * (width + 1 - len(word)), *word, 1) for word in row]
        + padding * (num_words - len(row))
        for row in words
    ]
    table = to_device(rows, dtype=torch.int64, device=device)  # [R, W, P + 2]
    return BadWordTensors(table[..., :-2], table[..., -2], table[..., -1].bool())


def apply_bad_words(
    logits: Tensor, words: BadWordTensors, *, text: Tensor, num_tokens: Tensor
) -> Tensor:
    """Forbid the last token of every bad word whose other tokens end the row's text."""
    width = words.prefix.shape[-1]
    position = num_tokens[..., None] - width + torch.arange(width, device=text.device)
    ending = text.gather(1, position.clamp(0, text.shape[1] - 1).flatten(1)).view(position.shape)
    ending = torch.where(position >= 0, ending, _NONE)[:, :, None]  # [R, J, 1, P]
    prefix = words.prefix[:, None]  # [R, 1, W, P]
    completes = ((ending == prefix) | (prefix == _ANY)).all(dim=-1) & words.is_word[:, None]
    penalty = torch.where(completes, -torch.inf, 0.0).to(logits.dtype)  # [R, J, W]
    last = words.last[:, None].expand(penalty.shape)
    return logits + torch.zeros_like(logits).scatter_add_(-1, last, penalty)


def apply_dry(logits: Tensor, dry: DryTensors, *, text: Tensor, num_tokens: Tensor) -> Tensor:
    """Lower tokens that would go on with what followed an earlier copy of the text's end."""
    lengths = repetition_lengths(text, dry.is_breaker.gather(1, text), num_tokens=num_tokens)
    longest = torch.zeros(logits.shape, dtype=lengths.dtype, device=logits.device)
    token_ids = text[:, None].expand(lengths.shape)
    longest = longest.scatter_reduce(-1, token_ids, lengths, reduce="amax")  # [R, J, V]
    multiplier, base, allowed = (row[:, None, None] for row in dry[:3])
    penalty = (multiplier * base ** (longest - allowed)).clamp(max=_MAX_DRY_PENALTY)
    is_long = (longest >= allowed) & (multiplier > 0)
    return logits - torch.where(is_long, penalty, 0.0)


def repetition_lengths(text: Tensor, is_breaker: Tensor, *, num_tokens: Tensor) -> Tensor:
    """How many tokens before each position equal the end of the row's text.

    Args:
        text: `[R, L]` int64.
        is_breaker: `[R, L]` bool, tokens that end a comparison and are never penalised.
        num_tokens: `[R, J]` int64, length of each row's text.

    Returns:
        `[R, J, L]` float32, at most `MAX_DRY_MATCH`; 0 behind the row's text.

    Example:
        text A B C A B, 5 tokens: A B before position 2 equals the end, so C, which followed it,
        has length 2; every other token has length 0.
    """
    num_columns = text.shape[1]
    column = torch.arange(num_columns, device=text.device)
    matches = (column < num_tokens[..., None]) & ~is_breaker[:, None]  # [R, J, L]
    lengths = torch.zeros(matches.shape, device=text.device)
    for distance in range(1, min(MAX_DRY_MATCH, num_columns) + 1):
        end = (num_tokens - distance).clamp(0, num_columns - 1)  # [R, J]
        is_usable = (num_tokens >= distance) & ~is_breaker.gather(1, end)
        before = torch.nn.functional.pad(text[:, : num_columns - distance], (distance, 0), value=-1)
        same = before[:, None] == text.gather(1, end)[..., None]
        matches = matches & same & is_usable[..., None]
        lengths = lengths + matches
    return lengths
