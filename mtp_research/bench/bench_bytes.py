"""Bytes that a decode step has to read: the limit that its time is compared with.

Weights are read once per pass that uses them, experts as often as they are unique in a step (which
is counted, because the routing of random weights is not uniform), keys and values once per pass.

Letters: K drafts per step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.heads.stack import MTPHeads


@dataclass(frozen=True)
class StepBytes:
    """Bytes read by one step.

    Attributes:
        target_weights: without the embedding table, with lm_head.
        draft_weights: of all K module passes, each with lm_head or the drafted rows of it.
        keys_values: of the target pass and the module passes.
        unique_experts: mean unique experts per expert layer of the target alone; None without.
    """

    target_weights: int
    draft_weights: int
    keys_values: int
    unique_experts: float | None

    @property
    def total(self) -> int:
        """All of them."""
        return self.target_weights + self.draft_weights + self.keys_values


def num_text_tokens(decoder: SpecDecoder) -> int:
    """Tokens of all running requests, prompts included."""
    return sum(request.num_tokens for request in decoder.live_requests)


def measure_bytes(decoder: SpecDecoder, heads: MTPHeads | None, *, num_tokens: float) -> StepBytes:
    """Bytes of a decoding step of the running requests; runs one step to see the routing.

    The step happens behind the host's back: the decoder is of no use afterwards.

    Args:
        decoder: in the middle of decoding, all requests past their prompts.
        heads: its modules; None without drafts.
        num_tokens: of all texts, the mean over the steps that the bytes are compared with.
    """
    model, num_drafts = decoder.target.model, decoder.num_speculative_tokens
    used = _experts_used(decoder, heads)
    embedding = cast(Tensor, decoder.target.embed_tokens.weight)
    target = _read_bytes(model, used) - embedding.nbytes
    if decoder.target.lm_head_weight is embedding:
        target += decoder.target.lm_head_weight.nbytes
    drafts = 0
    if heads is not None:
        per_module = _read_bytes(heads, used) // heads.spec.num_mtp_modules
        drafts = num_drafts * (per_module + decoder.draft_head.nbytes)
    num_target = decoder.target.config.num_hidden_layers
    per_token = sum(decoder.bytes_per_token(layer) for layer in range(num_target))
    if heads is not None:
        per_token += num_drafts * decoder.bytes_per_token(num_target)
    own = set(model.modules())
    counts = [found.count for module, found in used.items() if module in own]
    return StepBytes(
        target_weights=target,
        draft_weights=drafts,
        keys_values=round(num_tokens * per_token),
        unique_experts=sum(counts) / len(counts) if counts else None,
    )


class _Used(NamedTuple):
    """Experts of a stack that are used, a mean over the stack's passes in a step."""

    count: float
    share: float


def _read_bytes(model: nn.Module, used: dict[nn.Module, _Used]) -> int:
    """Bytes of the parameters, those of expert stacks times the share of experts in use."""
    shares = {id(p): part.share for module, part in used.items() for p in module.parameters()}
    return sum(int(p.nbytes * shares.get(id(p), 1.0)) for p in model.parameters())


def _experts_used(decoder: SpecDecoder, heads: MTPHeads | None) -> dict[nn.Module, _Used]:
    """What one step uses, by stack of experts."""
    modules = [*decoder.target.model.modules()]
    if heads is not None:
        modules += [*heads.modules()]
    stacks = [module for module in modules if _expert_weights(module)]
    counts: dict[nn.Module, list[int]] = {stack: [] for stack in stacks}
    handles = [stack.register_forward_pre_hook(_note_experts(counts[stack])) for stack in stacks]
    if handles:
        decoder.rehearse()
    for handle in handles:
        handle.remove()
    used = {}
    for stack, passes in counts.items():
        if passes:  # a stack that no pass ran counts as read whole
            count = sum(passes) / len(passes)
            used[stack] = _Used(count, count / _expert_weights(stack)[0].shape[0])
    return used


def _expert_weights(module: nn.Module) -> list[nn.Parameter]:
    """Weights of all experts in one tensor `[E, out, in]` each; none of any other module."""
    return [p for p in module.parameters(recurse=False) if p.dim() == 3]


def _note_experts(passes: list[int]) -> Callable:
    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        passes.append(len(torch.unique(inputs[1])))

    return note
