"""Run MTP modules over every anchor of a training batch: one function for all unrolls.

Anchor t, depth d = 1..k. Row (t, d) consumes x_{t+d} and predicts x_{t+d+1}. What it reads
besides the token follows from the decode policy that matches the unroll
(`policy.MATCHING_POLICY`), so that a head is trained on what it is decoded with:

    unroll          source at d >= 2   keys of row (t, d)                                 position
    chain           row (t, d-1)       rows (s, d) for s <= t                             t
    mixed           drawn per token    rows (s, d) for s <= t                             t
    independent     target's H_t       rows (s, d) for s <= t                             t
    ttt             row (t, d-1)       its module's rows (H_s, x_{s+1}) for s <= t, then  t + d - 1
    shared_context                     the draft rows (t, 2..d)

`ttt` is the case of one module; with several, each module runs the context rows itself, which is
`shared_context`. The two are one code path. `mixed` draws the source of each token uniformly from
{H_t, row (t, 1) .. row (t, d-1)}: a chain that also learns from cleaner inputs; it is measured as
the chain that it is decoded as.

In the attention of `ttt` all anchors share the context rows and each owns its draft rows: the mask
is causal over the context and diagonal over every earlier draft pass. Building it would cost
S x kS; the diagonal parts are scalar products instead, and the two are merged through their
log-sum-exp (`context_rows`).

Letters: B batch rows, S row length, D hidden.
Source: chain DeepSeek-V3 (arXiv:2412.19437); training-time test EAGLE-3 (arXiv:2503.01840).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.attention import AttentionCall, DenseContext
from mtp_research.models.attention.context_rows import attend_rows
from mtp_research.policy.fields import (
    MATCHING_POLICY,
    POLICIES,
    HiddenPolicy,
    ModuleSchedule,
    module_index,
    token_offset,
)
from mtp_research.runtime.errors import ConfigError

UNROLLS = tuple(sorted(MATCHING_POLICY))
# Unrolls that measure with another one, because what they add to it is noise for training.
MEASURED_UNROLL = {"mixed": "chain"}


class DepthOutput(NamedTuple):
    """Rows (t, d) of one depth."""

    post_norm: Tensor  # `[B, S, D]` after the module's own norm; logits = lm_head(post_norm)
    valid: Tensor  # `[B, S]` bool, t and t + d lie in one document; other rows hold no meaning


class RowInputs(NamedTuple):
    """What all depths of a batch share."""

    input_ids: Tensor  # `[B, S]` int64, packed documents
    hidden: Tensor  # `[B, S, D]` target hidden states, already `heads.source(...)`
    position_ids: Tensor  # `[B, S]` int64, counted from 0 in each document
    document_index: Tensor  # `[B, S]` int, document of each token, -1 for padding
    # where the same documents end in the flattened batch, for the GPU's attention without a mask;
    # see `DenseContext`
    cu_seqlens: Tensor | None = None


def unroll(
    heads: MTPHeads,
    inputs: RowInputs,
    *,
    num_depths: int,
    kind: str,
    schedule: ModuleSchedule = "cycle",
) -> list[DepthOutput]:
    """Outputs of depths 1..k over every anchor.

    Worked example, `chain`, row `ABCD|XY` (two documents): depth 2 runs rows
    (A: C, h1_A) (B: D, h1_B) and the rows at C, D, X, Y are not valid, because x_{t+2} lies outside
    their document. They consume token 0 in place of a neighbour's token.

    Args:
        heads: the modules that run.
        inputs: packed rows and the target's hidden states.
        num_depths: k >= 1.
        kind: one of `UNROLLS`.
        schedule: which module runs which depth.

    Returns:
        k outputs, depth 1 first.

    Raises:
        ConfigError: unknown unroll, no depth, or `ttt` with several modules.
    """
    _check(heads, num_depths=num_depths, kind=kind)
    policy = POLICIES[MATCHING_POLICY[kind]]
    modules = [
        module_index(schedule, depth, heads.spec.num_mtp_modules) for depth in range(num_depths)
    ]
    if policy.draft_rows != "none":
        outputs = _unroll_draft_rows(heads, inputs, policy=policy, modules=modules)
    else:
        is_drawn = kind == "mixed"
        outputs = _unroll_streams(heads, inputs, policy=policy, modules=modules, is_drawn=is_drawn)
    return [
        DepthOutput(output, same_document(inputs.document_index, offset=depth))
        for depth, output in enumerate(outputs, start=1)
    ]


def shift_left(values: Tensor, *, offset: int, fill: int) -> Tensor:
    """`[B, S]` values of position t + offset at t; `fill` beyond the row, which never wraps."""
    shifted = torch.full_like(values, fill)
    if offset < values.shape[1]:
        shifted[:, : values.shape[1] - offset] = values[:, offset:]
    return shifted


def same_document(document_index: Tensor, *, offset: int) -> Tensor:
    """`[B, S]` bool, True where t and t + offset are tokens of the same document."""
    later = shift_left(document_index, offset=offset, fill=-1)
    return (document_index >= 0) & (document_index == later)


def _check(heads: MTPHeads, *, num_depths: int, kind: str) -> None:
    if kind not in UNROLLS:
        raise ConfigError(f"objective.unroll must be one of {list(UNROLLS)}, got {kind!r}.")
    if num_depths < 1:
        raise ConfigError(
            f"objective.num_depths must be >= 1, got {num_depths}; set it to 1 or more."
        )
    if kind == "ttt" and heads.spec.num_mtp_modules > 1:
        raise ConfigError(
            f"objective.unroll=ttt needs head.num_mtp_modules=1, got {heads.spec.num_mtp_modules}; "
            "set objective.unroll=shared_context to train several modules for the eagle policy."
        )


def _consumed(inputs: RowInputs, *, offset: int) -> Tensor:
    """`[B, S]` token x_{t+offset}; 0 where it is another document's, so that nothing leaks."""
    tokens = shift_left(inputs.input_ids, offset=offset, fill=0)
    return torch.where(same_document(inputs.document_index, offset=offset), tokens, 0)


def _unroll_streams(
    heads: MTPHeads, inputs: RowInputs, *, policy: HiddenPolicy, modules: list[int], is_drawn: bool
) -> list[Tensor]:
    """Each depth is its own causal stream at the anchors' positions: `chain`, `independent`."""
    context = DenseContext(inputs.document_index, inputs.cu_seqlens)
    outputs, sources = [], [inputs.hidden]
    for draft_step, module_idx in enumerate(modules):
        output = heads.run_module(
            heads.mtp_modules[module_idx],
            token_ids=_consumed(inputs, offset=token_offset(policy, draft_step)),
            prev_hidden_states=draw_sources(sources) if is_drawn else sources[-1],
            position_ids=inputs.position_ids,
            context=context,
        )
        outputs.append(output.post_norm)
        if policy.hidden == "chain":
            sources.append(heads.recycled(output))
    return outputs


def draw_sources(sources: list[Tensor]) -> Tensor:
    """`[B, S, D]` each token's vector from one of the sources `[B, S, D]`, uniformly.

    Draws from the device's default generator, which the trainer seeds for every micro-batch.
    """
    if len(sources) == 1:
        return sources[0]
    shape, device = sources[0].shape[:2], sources[0].device
    chosen = torch.randint(len(sources), shape, device=device)[..., None]
    drawn = sources[0]
    for index, source in enumerate(sources[1:], start=1):
        drawn = torch.where(chosen == index, source, drawn)
    return drawn


def _unroll_draft_rows(
    heads: MTPHeads, inputs: RowInputs, *, policy: HiddenPolicy, modules: list[int]
) -> list[Tensor]:
    """Context rows from the target, draft rows above each anchor: `ttt`, `shared_context`.

    Draft row j (0-based step, j >= 1) of anchor t consumes x_{t+1+j} with the output of step j - 1
    at position t + j. A module runs its context rows when it is first used, then every draft row
    it has not run yet, as the decode loop does.
    """
    module_rows: dict[int, ModuleRows] = {}
    outputs: list[Tensor] = []
    recycled: list[Tensor] = []
    for draft_step, module_idx in enumerate(modules):
        if module_idx not in module_rows:
            module_rows[module_idx] = ModuleRows(inputs.document_index, inputs.cu_seqlens)
            output = heads.run_module(
                heads.mtp_modules[module_idx],
                token_ids=_consumed(inputs, offset=token_offset(policy, draft_step)),
                prev_hidden_states=inputs.hidden,
                position_ids=inputs.position_ids,
                context=module_rows[module_idx],
            )
        rows = module_rows[module_idx]
        for step in range(rows.num_draft_rows + 1, draft_step + 1):
            rows.begin_draft_row()
            output = heads.run_module(
                heads.mtp_modules[module_idx],
                token_ids=_consumed(inputs, offset=step + 1),
                prev_hidden_states=recycled[step - 1],
                position_ids=inputs.position_ids + step,
                context=rows,
            )
        outputs.append(output.post_norm)
        recycled.append(heads.recycled(output))
    return outputs


class ModuleRows:
    """Keys and values of one module: its context rows, and one draft row per anchor and step.

    An `AttentionContext`. Row t of the n-th draft pass sees context rows s <= t of its document and
    the draft rows 1..n of the same anchor. Arguments as in `DenseContext`.
    """

    def __init__(self, document_index: Tensor, cu_seqlens: Tensor | None = None) -> None:
        self._dense = DenseContext(document_index, cu_seqlens)
        self._context: tuple[Tensor, Tensor] | None = None
        self._drafts: list[tuple[Tensor, Tensor]] = []
        self.num_draft_rows = 0

    def begin_draft_row(self) -> None:
        """Declare that the next pass runs draft rows rather than context rows."""
        self.num_draft_rows += 1

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """See `AttentionContext.attend`."""
        query, key, value, scale, window, sinks = call
        if self.num_draft_rows == 0:
            self._context = (key, value)
            return self._dense.attend(module, call)
        assert self._context is not None, "draft rows were run before the module's context rows"
        self._drafts.append((key, value))
        assert len(self._drafts) == self.num_draft_rows, "begin_draft_row once per draft pass"
        drafts = self._drafts
        if window is not None:
            drafts = drafts[-window:]
            # A query sits `num_draft_rows` above its anchor: a narrower window of the context.
            window = max(window - self.num_draft_rows, 0)
        return attend_rows(
            [query, *self._context, *(part for row in drafts for part in row)],
            scale=scale,
            window=window,
            sinks=sinks,
            document_index=self._dense.document_index,
            cu_seqlens=self._dense.cu_seqlens,
        )
