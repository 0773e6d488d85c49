"""Slow references of sampling: one row at a time, over plain lists, following the definitions.

Nothing here imports the vectorised code.
"""

import math
from collections.abc import Callable

import torch

from mtp_research.decode.sampling.sampling_params import MAX_DRY_MATCH, SamplingParams
from mtp_research.models.target import Target
from tests.oracle import target_logits


def processed_row(
    logits: list[float], text: list[int], num_prompt: int, params: SamplingParams
) -> list[float]:
    """Logits of the token after `text`, its first `num_prompt` tokens being the prompt."""
    output = text[num_prompt:]
    stages: tuple[Callable[[int, float], float], ...] = (
        lambda token, logit: _repetition(logit, token in text, params.repetition_penalty),
        lambda token, logit: (
            logit
            - params.frequency_penalty * output.count(token)
            - params.presence_penalty * (token in output)
        ),
        lambda token, logit: logit - _dry(token, text, params),
        lambda token, logit: logit + dict(params.logit_bias).get(token, 0.0),
        lambda token, logit: -math.inf if _is_forbidden(token, text, output, params) else logit,
    )
    values = list(logits)
    for stage in stages:
        values = [stage(token, value) for token, value in enumerate(values)]
    return values


def probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, token by token."""
    best = max(range(len(logits)), key=lambda token: (logits[token], -token))
    if params.temperature == 0:
        return [float(token == best) for token in range(len(logits))]
    weights = [math.exp((logit - logits[best]) / params.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-weights[token], token))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= params.top_p * total:
            break
        kept.append(token)
        mass += weights[token]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[best]]
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


def greedy_processed_text(target: Target, prompt: list[int], params: SamplingParams) -> list[int]:
    """Greedy decoding with processors, the whole text recomputed for every token."""
    text = list(prompt)
    for _ in range(params.max_new_tokens):
        row = target_logits(target, text)[-1].tolist()
        values = processed_row(row, text, len(prompt), params)
        text.append(int(torch.tensor(values).argmax()))
        if text[-1] in params.stop_token_ids:
            break
    return text[len(prompt) :]


def _repetition(logit: float, is_seen: bool, penalty: float) -> float:
    if not is_seen:
        return logit
    return logit / penalty if logit > 0 else logit * penalty


def _dry(token: int, text: list[int], params: SamplingParams) -> float:
    """Penalty of the longest repetition that `token` would extend."""
    if params.dry_multiplier == 0 or token in params.dry_breaker_token_ids:
        return 0.0
    longest = 0
    for position, earlier in enumerate(text):
        if earlier == token:
            longest = max(longest, _common(text[:position], text, params.dry_breaker_token_ids))
    if longest < params.dry_allowed_length:
        return 0.0
    return params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)


def _common(first: list[int], second: list[int], breakers: tuple[int, ...]) -> int:
    """Length of the common ending."""
    length = 0
    for mine, other in zip(reversed(first), reversed(second), strict=False):
        if mine != other or mine in breakers:
            break
        length += 1
    return min(length, MAX_DRY_MATCH)


def _is_forbidden(token: int, text: list[int], output: list[int], params: SamplingParams) -> bool:
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return True
    if token in params.stop_token_ids and len(output) < params.min_tokens:
        return True
    extended = (*text, token)
    return any(extended[-len(word) :] == word for word in params.bad_words)
