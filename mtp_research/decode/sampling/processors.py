"""Logit processors: what a request changes about the target's logits before the temperature.

Repetition, frequency and presence penalty, DRY, bias and allowed ids, bad words, stop ids before
`min_tokens`, in this order; `sampling_params` says how it compares with transformers and vLLM.

All of them are pure functions of logits and text. Row j sees the committed text and drafts
d_1..d_j: the text table holds the drafts behind the committed tokens, and each row has its own
length. So nothing is kept between steps that a rejection would have to wind back, and since the
table is on the device, a captured step processes its logits without the host. Only tokens of the
text can be penalised, so penalties are worked out for its L positions, not for all V logits.

Letters: R requests, J rows a request, L length of the text table, V vocabulary, W bad words of a
request, P longest bad word without its last token.
Source: DRY is Weidmann's sampler as in text-generation-webui; bad words are transformers'.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from torch import Tensor

from mtp_research.decode.sampling.sampling_params import MAX_DRY_MATCH, SamplingParams
from mtp_research.decode.slot_state import copy_to_device, to_device

_ANY = -1  # matches every token; fills short bad words on the left
_NONE = -2  # no token: before the start of a text
_MAX_DRY_PENALTY = 1e30  # a repetition never makes a token impossible where all others are


class DryTensors(NamedTuple):
    """DRY settings of a batch; see `SamplingParams`."""

    multiplier: Tensor  # `[R]` float32, 0 is off
    base: Tensor  # `[R]` float32
    allowed_length: Tensor  # `[R]` float32
    is_breaker: Tensor  # `[R, V]` bool


class BadWordTensors(NamedTuple):
    """Bad words of a batch."""

    prefix: Tensor  # `[R, W, P]` int64, each word without its last token, filled up with `_ANY`
    last: Tensor  # `[R, W]` int64, its last token; 0 where the request has fewer words
    is_word: Tensor  # `[R, W]` bool


def bad_word_tensors(
    words: list[tuple[tuple[int, ...], ...]], *, device: torch.device
) -> BadWordTensors | None:
    """Pad the bad words of a batch, W and P to powers of two or P = 0; None where there are none.

    A captured step holds for one shape.
    """
    if not any(words):
        return None
    num_words = power_of_two(max(len(row) for row in words))
    width = max(len(word) for row in words for word in row) - 1
    width = power_of_two(width) if width else 0
    padding = [(_ANY,) * width + (0, 0)]
    rows = [
        [(*(_ANY,) * (width + 1 - len(word)), *word, 1) for word in row]
        + padding * (num_words - len(row))
        for row in words
    ]
    table = to_device(rows, dtype=torch.int64, device=device)  # [R, W, P + 2]
    return BadWordTensors(table[..., :-2], table[..., -2], table[..., -1].bool())


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def apply_bad_words(
    logits: Tensor, words: BadWordTensors, *, text: Tensor, num_tokens: Tensor
) -> None:
    """Forbid, in place, the last token of every bad word whose other tokens end the row's text."""
    width = words.prefix.shape[-1]
    position = num_tokens[..., None] - width + torch.arange(width, device=text.device)
    ending = text.gather(1, position.clamp(0, text.shape[1] - 1).flatten(1)).view(position.shape)
    ending = torch.where(position >= 0, ending, _NONE)[:, :, None]  # [R, J, 1, P]
    prefix = words.prefix[:, None]  # [R, 1, W, P]
    completes = ((ending == prefix) | (prefix == _ANY)).all(dim=-1) & words.is_word[:, None]
    penalty = torch.where(completes, -torch.inf, 0.0).to(logits.dtype)  # [R, J, W]
    logits.scatter_add_(-1, words.last[:, None].expand(penalty.shape), penalty)


def apply_dry(logits: Tensor, dry: DryTensors, *, text: Tensor, num_tokens: Tensor) -> None:
    """Lower, in place, tokens that would go on with what followed a copy of the text's end."""
    lengths = repetition_lengths(text, dry.is_breaker.gather(1, text), num_tokens=num_tokens)
    seen = _seen_tokens(text, num_tokens)
    longest = torch.zeros(logits.shape, dtype=lengths.dtype, device=logits.device)  # [R, J, V]
    longest = longest.scatter_reduce_(-1, seen, lengths, reduce="amax").gather(-1, seen)
    multiplier, base, allowed = (row[:, None, None] for row in dry[:3])
    penalty = (multiplier * base ** (longest - allowed)).clamp(max=_MAX_DRY_PENALTY)
    is_long = (longest >= allowed) & (multiplier > 0)
    lowered = logits.gather(-1, seen) - torch.where(is_long, penalty, 0.0)
    logits.scatter_(-1, seen, lowered)


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
    # How many tokens lie between, in the order of the text: MAX_DRY_MATCH - 1 to 0
    between = torch.arange(MAX_DRY_MATCH - 1, -1, -1, dtype=torch.int8, device=text.device)
    # The tokens before each position, a view: [R, L, MAX_DRY_MATCH]
    before = torch.nn.functional.pad(text, (MAX_DRY_MATCH, 0), value=_NONE)
    before = before.unfold(1, MAX_DRY_MATCH, 1)[:, :num_columns]
    rows = []
    for length in num_tokens.unbind(dim=1):  # one by one, to bound the memory
        end = length[:, None] - 1 - between  # [R, MAX_DRY_MATCH]
        safe = end.clamp(0, num_columns - 1)
        ends_here = (end < 0) | is_breaker.gather(1, safe)
        ending = text.gather(1, safe).masked_fill(ends_here, _ANY)  # equals no token of a text
        # As many tokens are equal as lie between the position and the nearest difference.
        unequal = torch.where(before == ending[:, None], MAX_DRY_MATCH, between)
        is_candidate = (column < length[:, None]) & ~is_breaker
        rows.append(unequal.amin(dim=-1) * is_candidate)
    return torch.stack(rows, dim=1).float()


def _seen_tokens(text: Tensor, num_tokens: Tensor) -> Tensor:
    """`[R, J, L]` the tokens before each row; behind them the first one again, which changes none.

    What is written to logits by these indices must depend on nothing but token and row: a token
    that occurs twice is written twice.
    """
    is_seen = torch.arange(text.shape[1], device=text.device) < num_tokens[..., None]
    return torch.where(is_seen, text[:, None], text[:, None, :1])


_NUM_CACHED_REQUESTS = 128  # each keeps three rows of V numbers on the device


class PenaltyTensors(NamedTuple):
    """Penalties of tokens that have occurred, each `[R]` float32; see `SamplingParams`."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class ProcessorTensors(NamedTuple):
    """Processors of a batch; each is None where no request uses it, known on the host."""

    num_prompt_tokens: Tensor  # `[R]` int64
    penalties: PenaltyTensors | None  # repetition, frequency and presence penalty
    dry: DryTensors | None  # see `processors_sequence`
    bias: Tensor | None  # `[R, V]` float32, added to every row; -inf forbids a token
    bad_words: BadWordTensors | None  # see `processors_sequence`
    min_tokens: Tensor  # `[R]` int64, output tokens before a stop token is allowed
    stop_bias: Tensor | None  # `[R, V]` float32, -inf at stop tokens, added before `min_tokens`


def processor_tensors(
    params: list[SamplingParams],
    *,
    num_prompt_tokens: list[int],
    vocab_size: int,
    device: torch.device,
) -> ProcessorTensors | None:
    """Stack the processors of a batch; None where no request uses any."""
    if not any(p.uses_processors for p in params):
        return None
    counts = to_device(
        list(zip(num_prompt_tokens, [p.min_tokens for p in params], strict=True)),
        dtype=torch.int64,
        device=device,
    )
    rows = [_request_rows(p, vocab_size=vocab_size, device=device) for p in params]
    is_biased = any(p.logit_bias or p.allowed_token_ids is not None for p in params)
    has_minimum = any(p.min_tokens for p in params)
    return ProcessorTensors(
        num_prompt_tokens=counts[:, 0],
        penalties=_penalty_tensors(params, device),
        dry=_dry_tensors(params, rows),
        bias=torch.stack([row.bias for row in rows]) if is_biased else None,
        bad_words=bad_word_tensors([p.bad_words for p in params], device=device),
        min_tokens=counts[:, 1],
        stop_bias=torch.stack([row.stop_bias for row in rows]) if has_minimum else None,
    )


def process_logits(
    logits: Tensor, processors: ProcessorTensors, *, text: Tensor, num_tokens: Tensor
) -> Tensor:
    """Apply every processor that the batch uses.

    A request that uses none of them keeps its logits to the bit, whatever its company.

    Args:
        logits: `[R, J, V]`; not changed.
        processors: one entry per request.
        text: `[R, L]` int64 in [0, V): prompt, output, drafts; what lies behind is not looked at.
        num_tokens: `[R, J]` int64, tokens of `text` before the one that the row decides, at least
            1; each row has one more than the row before it.

    Returns:
        `[R, J, V]`, float64 if the logits are and float32 otherwise. -inf where a token is
        forbidden; a row may forbid every token, which verification reports as not finite.
    """
    if torch.compiler.is_compiling():
        return _process_opaquely(logits, _parts_of(processors), text, num_tokens)
    values = logits.to(_result_dtype(logits), copy=True)  # changed in place: V numbers a row
    if processors.penalties is not None:
        _apply_penalties(values, processors, text=text, num_tokens=num_tokens)
    if processors.dry is not None:
        apply_dry(values, processors.dry, text=text, num_tokens=num_tokens)
    if processors.bias is not None:
        values += processors.bias[:, None]
    if processors.bad_words is not None:
        apply_bad_words(values, processors.bad_words, text=text, num_tokens=num_tokens)
    if processors.stop_bias is not None:
        num_output = num_tokens - processors.num_prompt_tokens[:, None]
        is_early = num_output < processors.min_tokens[:, None]
        values += torch.where(is_early[..., None], processors.stop_bias[:, None], 0.0)
    return values


# An operator, so that a compiled step rounds as one that is not: fused code would contract products
# and sums. Inductor's scatters and running sums are not leant on either, see `keep_top`.
@torch.library.custom_op("mtp_research::process_logits", mutates_args=())
def _process_opaquely(
    logits: Tensor, parts: Sequence[Tensor | None], text: Tensor, num_tokens: Tensor
) -> Tensor:
    values = process_logits(logits, _of_parts(parts), text=text, num_tokens=num_tokens)
    return values.contiguous()  # as the compiled step is told


@_process_opaquely.register_fake
def _(logits: Tensor, parts: Sequence[Tensor | None], text: Tensor, num_tokens: Tensor) -> Tensor:
    return logits.new_empty(logits.shape, dtype=_result_dtype(logits))


def _result_dtype(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32


_NESTED = {"penalties": PenaltyTensors, "dry": DryTensors, "bad_words": BadWordTensors}


def _parts_of(processors: ProcessorTensors) -> list[Tensor | None]:
    """All tensors in one list, as an operator takes them."""
    parts: list[Tensor | None] = []
    for name, value in zip(ProcessorTensors._fields, processors, strict=True):
        if name in _NESTED:
            parts += [None] * len(_NESTED[name]._fields) if value is None else list(value)
        else:
            parts.append(cast(Tensor | None, value))
    return parts


def _of_parts(parts: Sequence[Tensor | None]) -> ProcessorTensors:
    rest = iter(parts)
    values = []
    for name in ProcessorTensors._fields:
        if name in _NESTED:
            own = [next(rest) for _ in _NESTED[name]._fields]
            values.append(None if own[0] is None else _NESTED[name](*own))
        else:
            values.append(next(rest))
    return ProcessorTensors(*values)


def _apply_penalties(
    values: Tensor, processors: ProcessorTensors, *, text: Tensor, num_tokens: Tensor
) -> None:
    """Change `values` `[R, J, V]` in place."""
    assert processors.penalties is not None, "no request has a penalty"
    repetition, frequency, presence = (row[:, None, None] for row in processors.penalties)
    seen = _seen_tokens(text, num_tokens)
    counts = _output_counts(
        text,
        seen,
        num_prompt_tokens=processors.num_prompt_tokens,
        num_tokens=num_tokens,
        vocab_size=values.shape[-1],
    )
    old = values.gather(-1, seen)
    repeated = torch.where(old > 0, old / repetition, old * repetition)
    new = torch.where(repetition != 1, repeated, old)
    values.scatter_(-1, seen, new - frequency * counts - presence * (counts > 0))


def _output_counts(
    text: Tensor, seen: Tensor, *, num_prompt_tokens: Tensor, num_tokens: Tensor, vocab_size: int
) -> Tensor:
    """How often each token of `seen` `[R, J, L]` occurs in the output before its row, float32."""
    position = torch.arange(text.shape[1], device=text.device)
    is_output = (position >= num_prompt_tokens[:, None]) & (position < num_tokens[:, :1])
    committed = torch.zeros(len(text), vocab_size, device=text.device)
    committed.scatter_add_(1, text, is_output.float())
    counts = committed.gather(1, seen.flatten(1)).view(seen.shape)
    newest = text.gather(1, (num_tokens[:, 1:] - 1).clamp(max=text.shape[1] - 1))  # [R, J-1]
    for row, token_ids in enumerate(newest.unbind(dim=1), start=1):  # seen by this row and later
        counts[:, row:] += seen[:, row:] == token_ids[:, None, None]
    return counts


def _penalty_tensors(params: list[SamplingParams], device: torch.device) -> PenaltyTensors | None:
    rows = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    if all(row == (1, 0, 0) for row in rows):
        return None
    return PenaltyTensors(*to_device(rows, dtype=torch.float32, device=device).unbind(dim=1))


def _dry_tensors(params: list[SamplingParams], rows: list["_RequestRows"]) -> DryTensors | None:
    if not any(p.dry_multiplier for p in params):
        return None
    is_breaker = torch.stack([row.is_breaker for row in rows])
    facts = to_device(
        [(p.dry_multiplier, p.dry_base, p.dry_allowed_length) for p in params],
        dtype=torch.float32,
        device=is_breaker.device,
    )
    return DryTensors(*facts.unbind(dim=1), is_breaker=is_breaker)


class _RequestRows(NamedTuple):
    """What does not change while a request runs, each `[V]`; see `ProcessorTensors`."""

    bias: Tensor
    stop_bias: Tensor
    is_breaker: Tensor


@lru_cache(maxsize=_NUM_CACHED_REQUESTS)
def _request_rows(params: SamplingParams, *, vocab_size: int, device: torch.device) -> _RequestRows:
    bias = torch.zeros(vocab_size)
    if params.allowed_token_ids is not None:
        bias = torch.full((vocab_size,), -torch.inf)
        bias[list(params.allowed_token_ids)] = 0.0
    for token_id, amount in params.logit_bias:
        bias[token_id] += amount
    stop_bias = torch.zeros(vocab_size)
    stop_bias[list(params.stop_token_ids) if params.min_tokens else []] = -torch.inf
    is_breaker = torch.zeros(vocab_size, dtype=torch.bool)
    is_breaker[list(params.dry_breaker_token_ids)] = True
    return _RequestRows(*(copy_to_device(row, device) for row in (bias, stop_bias, is_breaker)))
