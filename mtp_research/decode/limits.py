"""What fits: texts and budgets that are refused, and where emitted tokens are cut.

Sizes are in tokens unless a name says blocks.
"""

from typing import NamedTuple

from mtp_research.decode.request import FinishReason, Request
from mtp_research.errors import ConfigError


class Cut(NamedTuple):
    """The part of a step's tokens that stays, and why the request ends, if it does."""

    kept: list[int]
    reason: FinishReason | None


def text_limit(request: Request, *, max_model_len: int) -> int:
    """Text length at which a request ends at the latest, its prompt included."""
    return min(len(request.prompt_token_ids) + request.sampling.max_new_tokens, max_model_len)


def check_arrival(
    request: Request, *, max_model_len: int, num_needed: int, num_blocks: int
) -> None:
    """Refuse a new request that could not run even if it were alone.

    Args:
        request: the new one.
        max_model_len: longest text.
        num_needed: blocks of its longest possible text.
        num_blocks: blocks of the pool.

    Raises:
        ConfigError: see `check_prompt` and `check_room`.
    """
    check_prompt(request, max_model_len=max_model_len)
    check_room(request, num_needed=num_needed, num_blocks=num_blocks)


def check_prompt(request: Request, *, max_model_len: int) -> None:
    """Refuse a prompt that leaves nothing to decode from, or no room for a token.

    Raises:
        ConfigError: the prompt is empty, or fills the context.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise ConfigError(
            f"request {request.request_id}: the prompt must hold at least one token, got none."
        )
    if num_prompt >= max_model_len:
        raise ConfigError(
            f"request {request.request_id}: the prompt must be shorter than "
            f"engine.max_model_len={max_model_len}, got {num_prompt} tokens; "
            "shorten it or raise engine.max_model_len."
        )


def check_budget(max_num_batched_tokens: int, *, num_rows: int) -> None:
    """Refuse a row budget with which a full batch could not decode.

    Args:
        max_num_batched_tokens: rows of a step.
        num_rows: rows of a full batch that decodes, `max_num_requests * (K + 1)`.

    Raises:
        ConfigError: the budget is too small.
    """
    if max_num_batched_tokens < num_rows:
        raise ConfigError(
            f"engine.max_num_batched_tokens must be >= max_num_requests * (K + 1) = {num_rows}, "
            f"got {max_num_batched_tokens}; raise it."
        )


def check_room(request: Request, *, num_needed: int, num_blocks: int) -> None:
    """Refuse a text that would not fit even if the request were alone.

    Args:
        request: the new one.
        num_needed: blocks of its longest possible text.
        num_blocks: blocks of the pool.

    Raises:
        ConfigError: the pool is too small.
    """
    if num_needed > num_blocks:
        raise ConfigError(
            f"request {request.request_id} can never fit: it needs {num_needed} blocks, the pool "
            f"has {num_blocks}; raise engine.num_blocks or lower sampling.max_new_tokens."
        )


def cut_emitted(request: Request, emitted: list[int], *, max_model_len: int) -> Cut:
    """Cut a step's tokens behind a stop token, or at the limit; what comes first decides."""
    room = text_limit(request, max_model_len=max_model_len) - len(request.token_ids)
    kept = emitted[:room]
    if stop_token_ids := request.sampling.stop_token_ids:
        for index, token_id in enumerate(kept):
            if token_id in stop_token_ids:
                return Cut(kept[: index + 1], FinishReason.STOP)
    return Cut(kept, FinishReason.LENGTH if len(emitted) >= room else None)
