"""Layers of which ranks have parts: what is cut, and what they do with inputs and outputs.

transformers cuts a target and reads a rank's part of its files, by the plan of the target's class.
Here the parts become plain tensors, and the library's wrappers, which training needs, give way to
hooks on the library's own modules. So whatever knows these modules goes on knowing them: our
attention sizes pages by `out_features`, expert layers run their kernels, and layers are merged,
compiled and captured as whole ones are. Blocks of MTP modules are cut here, by the same plan.

    style of a module                what is done
    colwise, packed_colwise          nothing: outputs are this rank's heads or inner numbers
    rowwise, all_reduce              outputs are added up over ranks
    rowwise_split_input              and of whole inputs this rank's part is taken
    colwise_gather_output            outputs are gathered
    moe_tp_experts                   outputs are added up; pairs whose expert is elsewhere get the
                                     number behind the last expert, which no code computes. Where
                                     shared experts are split too, their sum is added up once
    ep_router, grouped_gemm, mla_kv_a_proj, replicated_with_grad_allreduce
                                     nothing: experts are numbered by `moe_tp_experts`, and the
                                     others concern gradients
    moe_identity_expert              inputs are divided by the number of ranks, for the sum behind

Beside the layers, `lm_head` and the embedding are split by rows: logits are those of a rank's
tokens, and embeddings are added up of whoever has the token. One tied to the other stays tied.

Ranks that share experts alone (`RankParts.exchange`) exchange rows around `moe_tp_experts` and add
up nothing else; `lm_head` and the embedding are whole.

Letters: V vocabulary, D hidden, T rows, n ranks, E experts of a rank.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mtp_research.models.rank_parts import RankParts, gather_ranks, sum_over_ranks
from mtp_research.runtime.errors import ConfigError

BY_EXPERT = "grouped_gemm"
EXPERT_STYLES = {"ep_router", BY_EXPERT, "moe_tp_experts"}  # of a plan that deals experts alone
_BY_COLUMN = ("colwise", "packed_colwise", "colwise_gather_output")
_BY_ROW = ("rowwise", "rowwise_split_input")
_UNTOUCHED = ("ep_router", BY_EXPERT, "mla_kv_a_proj", "replicated_with_grad_allreduce")
_SUMMED = (*_BY_ROW, "all_reduce", "moe_tp_experts")
_KNOWN = {*_BY_COLUMN, *_SUMMED, *_UNTOUCHED, "moe_identity_expert"}
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(?:\*|\d+)\.(.+)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layer_plan(model: PreTrainedModel) -> dict[str, str]:
    """The plan of a decoder layer, by the names that `RankParts.plan` has."""
    found = ((_IN_LAYER.search(name), style) for name, style in model.tp_plan.items())
    plan = {match[1]: style for match, style in found if match is not None}
    if unknown := set(plan.values()) - _KNOWN:
        raise ConfigError(
            f"model.tp_plan knows the styles {sorted(_KNOWN)}, the plan of {type(model).__name__} "
            f"has {sorted(unknown)}; set model.tp_plan=none."
        )
    return plan


def run_on_parts(model: PreTrainedModel, parts: RankParts) -> None:
    """Let a model that transformers has cut and loaded run on this rank's parts, in place."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for own, part in list(module.named_parameters(recurse=False)):
            if isinstance(part.data, DTensor):
                _replace(module, own, part.data.to_local().contiguous())
        if match := _IN_LAYER.search(name):
            if _style_of(match[1], parts.plan):
                vars(module).pop("forward", None)
                module._backward_hooks.clear()
            _run_as_part(module, match[1], parts)
    if parts.exchange is None:
        _split_vocabulary(model, parts)


def split_sizes(model: PreTrainedModel, parts: RankParts) -> None:
    """Give a model on the meta device the sizes of a rank's part of it, in place."""
    for layer in cast(nn.ModuleList, model.base_model.layers):
        cut_block(layer, parts)
    if parts.exchange is None:
        _split_vocabulary(model, parts)


def num_sums(model: nn.Module) -> int:
    """How often the modules in `model` add up what ranks computed, embeddings not counted."""
    return sum(_add_up in module._forward_hooks.values() for module in model.modules())


def cut_block(block: nn.Module, parts: RankParts) -> None:
    """Cut a whole layer or block of an MTP module, which then runs on this rank's parts, in place.

    It may be on `meta`.
    """
    for name, whole in list(block.named_parameters()):
        owner, _, own = name.rpartition(".")
        style = _style_of(name, parts.plan) or _style_of(owner, parts.plan)
        part = _part_of(whole.data, style, parts)
        if part is not whole.data:
            _replace(block.get_submodule(owner), own, part.clone())
    for name, module in block.named_modules():
        _run_as_part(module, name, parts)


def _style_of(name: str, plan: Mapping[str, str]) -> str:
    return plan.get(_NUMBER.sub("*", name), "")


def _part_of(whole: Tensor, style: str, parts: RankParts) -> Tensor:
    """This rank's part, a view; biases of row-wise layers are whole."""
    dim = -1
    if style == BY_EXPERT:
        dim = 0
    elif style in _BY_COLUMN:
        dim = max(whole.dim() - 2, 0)
    elif style not in _BY_ROW or whole.dim() == 1:
        return whole
    if style == "packed_colwise" and whole.dim() > 1:  # gate above up, each of them is cut
        pair = whole.unflatten(dim, (2, -1)).chunk(parts.num_ranks, dim=dim + 1)
        return pair[parts.rank].flatten(dim, dim + 1)
    return whole.chunk(parts.num_ranks, dim=dim)[parts.rank]


def _replace(module: nn.Module, name: str, part: Tensor) -> None:
    setattr(module, name, nn.Parameter(part, requires_grad=False))
    if isinstance(module, nn.Linear) and name == "weight":
        module.out_features, module.in_features = part.shape


def _run_as_part(module: nn.Module, name: str, parts: RankParts) -> None:
    """Hook a module that has been cut, in place; see the table above."""
    style = _style_of(name, parts.plan)
    if style in _BY_ROW and parts.rank > 0 and module.bias is not None:
        cast(Tensor, module.bias).data.zero_()  # it is added once
    if style == "rowwise_split_input":
        module.register_forward_pre_hook(_take_part(parts))
    if style == "moe_identity_expert":
        module.register_forward_pre_hook(lambda _, args: (args[0] / parts.num_ranks, *args[1:]))
    if style == "moe_tp_experts" and parts.exchange is not None:
        parts.exchange.surround(module)
    if style == "moe_tp_experts" and BY_EXPERT in parts.plan.values():
        module.register_forward_pre_hook(_number_own(module, parts))
    if style == "colwise_gather_output":
        cast(nn.Linear, module).out_features *= parts.num_ranks
        module.register_forward_hook(
            lambda _, args, output: torch.cat(gather_ranks(output, parts.num_ranks).unbind(), -1)
        )
    if parts.exchange is not None:
        return
    later, own = _summed_later(parts.plan), _NUMBER.sub("*", name)
    has_experts = "experts" in dict(module.named_children())
    if (style in _SUMMED and own not in later) or (own in later.values() and has_experts):
        module.register_forward_hook(_add_up)


def _summed_later(plan: Mapping[str, str]) -> dict[str, str]:
    """Experts and shared experts whose outputs a module around both adds, and that module."""
    found = {}
    for name in (name for name, style in plan.items() if style == "moe_tp_experts"):
        around = name.rpartition(".")[0]
        shared = [
            other
            for other, style in plan.items()
            if other.startswith(f"{around}.shared_expert") and style in _BY_ROW
        ]
        if around and shared:
            found |= dict.fromkeys([name, *shared], around)
    return found


def _add_up(_: nn.Module, args: object, output: Tensor) -> Tensor:
    sum_over_ranks(output)
    return output


def _take_part(parts: RankParts) -> Callable:
    return lambda _, args: (args[0].chunk(parts.num_ranks, dim=-1)[parts.rank], *args[1:])


def _number_own(stack: nn.Module, parts: RankParts) -> Callable:
    """Arguments of an expert layer, its experts numbered from this rank's first one.

    For example experts [3, 0] of 2 ranks with 2 experts each are [2, 0] on rank 0 and [1, 2] on
    rank 1; the weights of those that are elsewhere are 0.
    """
    weight = next(p for p in stack.parameters() if p.dim() > 2)  # [E, ...]
    count = len(weight)
    cast(Any, stack).num_experts = count

    def number(_: nn.Module, args: tuple) -> tuple:
        hidden, index, weights, *rest = args
        own = index - parts.rank * count
        is_away = (own < 0) | (own >= count)
        return hidden, own.masked_fill(is_away, count), weights.masked_fill(is_away, 0.0), *rest

    return number


def _split_vocabulary(model: PreTrainedModel, parts: RankParts) -> None:
    """Leave this rank's rows of `lm_head` and the embedding, in place."""
    embedding = cast(nn.Embedding, model.get_input_embeddings())
    lm_head = cast(nn.Linear, model.get_output_embeddings())
    is_tied = embedding.weight is lm_head.weight
    for module in (embedding, lm_head):
        vars(module).pop("forward", None)
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
        for name, part in list(module.named_parameters(recurse=False)):
            data = part.data.full_tensor() if isinstance(part.data, DTensor) else part.data
            _replace(module, name, parts.rows(data))
    if is_tied:
        embedding.weight = lm_head.weight
    num_rows = len(lm_head.weight)
    embedding.num_embeddings, embedding.padding_idx = num_rows, None
    embedding.forward = _look_up(embedding.forward, parts, num_rows)


def _look_up(plain: Callable, parts: RankParts, num_rows: int) -> Callable[[Tensor], Tensor]:
    """Embeddings `[..., D]` of tokens, of which every rank has `num_rows`."""

    def look_up(input: Tensor) -> Tensor:
        own = input - parts.rank * num_rows
        is_away = (own < 0) | (own >= num_rows)
        rows = plain(own.masked_fill(is_away, 0)).masked_fill(is_away[..., None], 0.0)
        sum_over_ranks(rows)
        return rows

    return look_up
