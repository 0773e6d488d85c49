"""Hidden-state policies as data, and the row plan that every draft pass follows.

After a verify step each request has a *frontier* row p: the newest row whose target hidden state is
known. Drafting runs K passes. Pass m (`draft_step`) runs one MTP module over some rows; a row is a
slot q, a token and a hidden vector. Policies differ only in which rows those are and where token
and hidden vector come from. This file says so with a few fields, and turns the fields into index
tensors. The decode loop, the auditor and the trace command execute the same plan, and the trainer's
unrolls take their token offsets and module order from here.

    row q of pass m reads   text[q + 1 + m]  (chain policies)   or   text[q + 1]  (EAGLE policies)
    and the hidden vector   H_q | output of pass m-1 at row q | H_{q+m} | g_i, output of pass i-1

Letters: R requests, T rows of a pass, K drafts per step, N MTP modules, p frontier row, f first
fresh row, m draft step.
Source: DeepSeek-V3 (arXiv:2412.19437) for the chain, EAGLE (arXiv:2401.15077) for recycling; row
rules are our derivation.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

ModuleSchedule = Literal["cycle", "first", "last"]
MODULE_SCHEDULES: tuple[ModuleSchedule, ...] = ("cycle", "first", "last")


class HiddenKind(IntEnum):
    """Where a row's hidden vector comes from."""

    TARGET = 0  # the target's hidden state; `hidden_index` is its absolute position
    CHAIN = 1  # output of the previous pass; `hidden_index` is the row index in that pass
    DRAFT = 2  # output of an earlier pass at its sampled row; `hidden_index` is i of g_i, 1-based


@dataclass(frozen=True)
class HiddenPolicy:
    """One hidden-state procedure.

    Attributes:
        name: config name.
        rows: base rows of a pass. `anchored`: the K+1 rows ending at the frontier, so that every
            row whose token may have been a rejected draft is rerun. `fresh`: the newly verified
            rows only. `window`: the K rows ending at the frontier.
        shift_tokens: row q of pass m consumes text[q+1+m] (True) or text[q+1] (False).
        hidden: hidden vector of base rows in passes m >= 1. `chain`: output of pass m-1 at the same
            row. `target`: H_q. `shifted_target`: H_{q+m}, or g_{q+m-p} where that row is not
            verified yet.
        draft_rows: rows above the frontier, fed with the module's own output. `none`;
            `since_last_pass`: all that this module has not written in this round; `newest`: only
            the last one.
        every_module: passes m >= 1 have base rows too (False: only pass 0 has).
        clean: after every round each slot <= p holds what a recompute over the committed text would
            put there.
        seen_in: engines that behave like this.
    """

    name: str
    rows: Literal["anchored", "fresh", "window"]
    shift_tokens: bool
    hidden: Literal["chain", "target", "shifted_target"]
    draft_rows: Literal["none", "since_last_pass", "newest"]
    every_module: bool
    clean: bool
    seen_in: str

    def num_kv_layers(self, num_speculative_tokens: int, num_mtp_modules: int) -> int:
        """KV layers: one per depth where each depth sees its own history, else one per module."""
        if self.shift_tokens:
            return num_speculative_tokens
        return min(num_mtp_modules, max(num_speculative_tokens, 1))

    def kv_layer(self, draft_step: int, module_idx: int) -> int:
        """KV layer (0-based among the draft layers) that pass `draft_step` writes."""
        return draft_step if self.shift_tokens else module_idx


# fmt: off
# name, rows, shift_tokens, hidden, draft_rows, every_module, clean, seen_in
POLICIES: dict[str, HiddenPolicy] = {
    policy.name: policy
    for policy in (
        HiddenPolicy("eagle", "fresh", False, "target", "since_last_pass", True, True,
                     "vLLM, SGLang, TensorRT-LLM, llama.cpp"),
        HiddenPolicy("training", "anchored", True, "chain", "none", True, True,
                     "vLLM model runner v2, transformers"),
        HiddenPolicy("eagle_norefresh", "fresh", False, "target", "newest", False, False,
                     "vLLM's first Step-3.5 path"),
        HiddenPolicy("training_norefresh", "fresh", True, "chain", "none", True, False,
                     "SGLang for Step-3.5"),
        HiddenPolicy("window", "window", True, "shifted_target", "none", True, False,
                     "TensorRT-LLM's multi-module worker"),
        HiddenPolicy("target_roll", "fresh", True, "target", "none", True, False,
                     "SGLang for MiMo-V2"),
    )
}
# fmt: on

# The decode policy that shows a head the inputs it was trained on.
MATCHING_POLICY: dict[str, str] = {
    "chain": "training",
    "mixed": "training",
    "ttt": "eagle",
    "shared_context": "eagle",
    "independent": "target_roll",
}


class StepState(NamedTuple):
    """What a step left behind for the draft passes, one entry per request, all `[R]`.

    Attributes:
        first_fresh: int64, f: first row whose target hidden state this step computed.
        frontier: int64, p: last row of the committed text whose target hidden state is known.
        num_known_tokens: int64, tokens of the text that are committed (or belong to the prompt),
            bonus included.
        oldest_hidden: int64, first position whose target hidden state is still at hand (ring or
            this step).
        drafting: bool, the request has a sampled token and wants drafts; False inside a chunked
            prompt.
        prefilling: bool, the fresh rows are prompt rows rather than verified drafts.
    """

    first_fresh: Tensor
    frontier: Tensor
    num_known_tokens: Tensor
    oldest_hidden: Tensor
    drafting: Tensor
    prefilling: Tensor


class PassPlan(NamedTuple):
    """Rows of one draft pass, packed request by request in rising position.

    Attributes:
        draft_step: m.
        module_idx: module to run.
        kv_layer: draft KV layer to write and read, 0-based.
        request_index: `[T]` int64.
        position: `[T]` int64, slot and rotary position of the row (negative only for padding rows
            of the static form).
        token_position: `[T]` int64, absolute index of the token the row consumes; drafts follow the
            committed text.
        hidden_kind: `[T]` int64 of `HiddenKind`.
        hidden_index: `[T]` int64, see `HiddenKind`.
        writes: `[T]` bool; False for padding rows and for rows whose inputs are not known yet.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, KV length including this pass's rows.
        max_query_len: most rows of one request.
    """

    draft_step: int
    module_idx: int
    kv_layer: int
    request_index: Tensor
    position: Tensor
    token_position: Tensor
    hidden_kind: Tensor
    hidden_index: Tensor
    writes: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int

    @property
    def last_rows(self) -> Tensor:
        """`[R]` int64 index of each request's last row: the row that is sampled."""
        return self.query_start_loc[1:].long() - 1


def module_index(schedule: ModuleSchedule, draft_step: int, num_mtp_modules: int) -> int:
    """Module that runs pass `draft_step` (training depth `draft_step + 1`)."""
    if schedule == "first":
        return 0
    if schedule == "last":
        return min(draft_step, num_mtp_modules - 1)
    return draft_step % num_mtp_modules


def token_offset(policy: HiddenPolicy, draft_step: int) -> int:
    """Distance from a base row to the token it consumes."""
    return 1 + draft_step if policy.shift_tokens else 1


def plan_pass(
    policy: HiddenPolicy,
    state: StepState,
    *,
    draft_step: int,
    num_speculative_tokens: int,
    num_mtp_modules: int,
    schedule: ModuleSchedule = "cycle",
    static: bool = False,
) -> PassPlan:
    """Rows of pass `draft_step`.

    Args:
        policy: the procedure.
        state: where each request stands.
        draft_step: m, 0..K-1.
        num_speculative_tokens: K.
        num_mtp_modules: N.
        schedule: which module runs which pass.
        static: give every request the same number of base rows (K+1, or K for `window`), padding
            with rows that write nothing; for captured graphs. Only valid when every request is
            decoding.

    Returns:
        The plan. In the ragged form only rows that the policy asks for are present.
    """
    module_idx = module_index(schedule, draft_step, num_mtp_modules)
    previous = [
        step
        for step in range(draft_step)
        if module_index(schedule, step, num_mtp_modules) == module_idx
    ]
    recycles = policy.draft_rows != "none"
    has_base = draft_step == 0 or (policy.every_module and not (recycles and previous))
    if policy.draft_rows == "newest" or not recycles:
        first_draft = draft_step
    else:
        first_draft = previous[-1] + 1 if previous else 1

    frontier = state.frontier
    start = _first_base_row(policy, state, num_speculative_tokens)
    num_base_static = num_speculative_tokens + (policy.rows != "window")
    padded_start = frontier - num_base_static + 1 if static else start
    num_base = frontier - padded_start + 1 if has_base else torch.zeros_like(frontier)
    num_draft = torch.zeros_like(frontier)
    if recycles:
        num_draft = state.drafting.long() * max(draft_step - max(first_draft, 1) + 1, 0)
    counts = num_base + num_draft
    first_row = padded_start if has_base else frontier + max(first_draft, 1)

    query_start_loc = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    query_start_loc[1:] = torch.cumsum(counts, dim=0)
    num_rows, max_query_len = _row_totals(counts)
    requests = torch.arange(len(counts), device=counts.device)
    request_index = torch.repeat_interleave(requests, counts, output_size=num_rows)
    offset = torch.arange(num_rows, device=counts.device) - query_start_loc[request_index].long()
    position = first_row[request_index] + offset
    token_position = position + token_offset(policy, draft_step)
    kind, index, hidden_known = _hidden_source(policy, state, draft_step, request_index, position)

    drafting = state.drafting[request_index]
    num_known = state.num_known_tokens[request_index] + drafting.long() * draft_step
    is_base_padding = (position <= frontier[request_index]) & (position < start[request_index])
    return PassPlan(
        draft_step=draft_step,
        module_idx=module_idx,
        kv_layer=policy.kv_layer(draft_step, module_idx),
        request_index=request_index,
        position=position,
        token_position=token_position,
        hidden_kind=kind,
        hidden_index=index,
        writes=(token_position < num_known) & hidden_known & ~is_base_padding,
        query_start_loc=query_start_loc,
        seq_lens=(first_row + counts).int(),
        max_query_len=max_query_len,
    )


def num_rows_per_step(
    policy: HiddenPolicy,
    num_speculative_tokens: int,
    num_mtp_modules: int,
    *,
    schedule: ModuleSchedule = "cycle",
) -> int:
    """Module rows that a captured step computes per request: one decoding step, static form."""
    frontier = torch.tensor([10 * (num_speculative_tokens + 1)])
    state = StepState(
        first_fresh=frontier - num_speculative_tokens,
        frontier=frontier,
        num_known_tokens=frontier + 2,
        oldest_hidden=torch.zeros_like(frontier),
        drafting=torch.ones(1, dtype=torch.bool),
        prefilling=torch.zeros(1, dtype=torch.bool),
    )
    return sum(
        len(
            plan_pass(
                policy,
                state,
                draft_step=draft_step,
                num_speculative_tokens=num_speculative_tokens,
                num_mtp_modules=num_mtp_modules,
                schedule=schedule,
                static=True,
            ).position
        )
        for draft_step in range(num_speculative_tokens)
    )


def num_slots_needed(
    num_tokens: int, num_speculative_tokens: int, num_steps_in_flight: int = 0
) -> int:
    """Positions a request must own before a step that starts with `num_tokens` known tokens.

    The verify step writes target rows up to `num_tokens - 1 + K`. If all drafts are accepted the
    text grows by K+1, and EAGLE draft rows then reach `num_tokens + 2K - 2`; chain policies stay
    below. With the host `num_steps_in_flight` steps late, the length it knows may be that many
    times K+1 behind.
    """
    drafted = num_speculative_tokens
    return num_tokens + num_steps_in_flight * (drafted + 1) + max(drafted, 2 * drafted - 1)


def _first_base_row(policy: HiddenPolicy, state: StepState, num_speculative_tokens: int) -> Tensor:
    """First base row of each request, `[R]`, not before the oldest hidden state at hand."""
    if policy.rows == "fresh":
        return state.first_fresh
    if policy.rows == "anchored":
        start = torch.minimum(state.first_fresh, state.frontier - num_speculative_tokens)
    else:
        window = state.frontier - num_speculative_tokens + 1
        # While the prompt is read in chunks the rows at a chunk's end lack later hidden states; the
        # next chunk reruns them.
        chunked = torch.minimum(window, state.first_fresh - num_speculative_tokens + 1)
        start = torch.where(state.prefilling, chunked, window)
    return torch.maximum(start, state.oldest_hidden)


def _hidden_source(
    policy: HiddenPolicy, state: StepState, draft_step: int, request_index: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden kind, hidden index and whether that vector exists yet, each `[T]`."""
    above = position - state.frontier[request_index]  # > 0 for rows above the frontier
    if policy.hidden == "chain" and draft_step > 0:
        kind = torch.full_like(position, HiddenKind.CHAIN)
        rows = torch.arange(len(position), device=position.device)
        return kind, rows, torch.ones_like(position, dtype=torch.bool)
    shift = draft_step if policy.hidden == "shifted_target" else 0
    from_draft = above + shift > 0
    kind = torch.where(from_draft, HiddenKind.DRAFT.value, HiddenKind.TARGET.value)
    index = torch.where(from_draft, above + shift, position + shift)
    return kind, index, ~from_draft | state.drafting[request_index]


def _row_totals(counts: Tensor) -> tuple[int, int]:
    """Number of rows and the most rows of one request (reads the counts on the host)."""
    if len(counts) == 0:
        return 0, 0
    return int(counts.sum()), int(counts.max())


if __name__ == "__main__":
    # The trace runs the decode loop's auditor, which this module must not depend on.
    from mtp_research.decode.trace import main

    raise SystemExit(main())
