"""The row plan that every draft pass follows, made from the fields of a hidden-state policy.

After a verify step each request has a *frontier* row p: the newest row whose target hidden state is
known. Drafting runs K passes. Pass m (`draft_step`) runs one MTP module over some rows; a row is a
slot q, a token and a hidden vector. Policies differ only in which rows those are and where token
and hidden vector come from; `fields` says so with a few fields, which are turned into index
tensors here. The decode loop, the auditor and the trace command execute the same plan.

    row q of pass m reads   text[q + 1 + m]  (chain policies)   or   text[q + 1]  (EAGLE policies)
    and the hidden vector   H_q | output of pass m-1 at row q | H_{q+m} | g_i, output of pass i-1

Letters: R requests, T rows of a pass, K drafts per step, N MTP modules, p frontier row, f first
fresh row, m draft step.
Source: DeepSeek-V3 (arXiv:2412.19437) for the chain, EAGLE (arXiv:2401.15077) for recycling; row
rules are our derivation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.policy.fields import HiddenPolicy, ModuleSchedule, module_index, token_offset


class HiddenKind(IntEnum):
    """Where a row's hidden vector comes from."""

    TARGET = 0  # the target's hidden state; `hidden_index` is its absolute position
    CHAIN = 1  # output of the previous pass; `hidden_index` is the row index in that pass
    DRAFT = 2  # output of an earlier pass at its sampled row; `hidden_index` is i of g_i, 1-based


class StepState(NamedTuple):
    """What a step left behind for the draft passes, one entry per request, all `[R]`."""

    first_fresh: Tensor  # int64, f: first row whose target hidden state this step computed
    frontier: Tensor  # int64, p: last row of the committed text whose target hidden state is known
    num_known_tokens: Tensor  # int64, committed tokens (or of the prompt), bonus included
    oldest_hidden: Tensor  # int64, first position whose target hidden state is still at hand
    drafting: Tensor  # bool, it has a sampled token and wants drafts; False inside a chunked prompt
    prefilling: Tensor  # bool, the fresh rows are prompt rows rather than verified drafts


class RowLayout(NamedTuple):
    """How the rows of a pass are packed."""

    counts: Tensor  # `[R]` int64, rows of each request
    query_start_loc: Tensor  # `[R + 1]` int32
    request_index: Tensor  # `[T]` int64
    max_query_len: int  # most rows of one request
    rows_each: int | None = None  # of every request; None where they differ

    @property
    def last_rows(self) -> Tensor:
        """`[R]` int64 index of each request's last row: the row that is sampled."""
        return self.query_start_loc[1:].long() - 1

    def last_of(self, values: Tensor) -> Tensor:
        """`values` `[T, ...]` of each request's last row, `[R, ...]`; of no rows, some other's."""
        if self.rows_each:
            return values.unflatten(0, (-1, self.rows_each))[:, -1].contiguous()
        return values[self.last_rows.clamp(min=0)]

    def spread(self, values: Tensor) -> Tensor:
        """`values` `[R]` of each row's request, `[T]`."""
        return values if self.rows_each == 1 else values[self.request_index]

    def positions(self, first_row: Tensor) -> Tensor:
        """Position `[T]` of every row, counted from the first one `[R]` of its request."""
        if self.rows_each == 1:
            return first_row
        row = torch.arange(len(self.request_index), device=first_row.device)
        start = first_row - self.query_start_loc[:-1].long()
        return row + self.spread(start)

    def of_any_rows(self) -> "RowLayout":
        """The same for code that must serve any numbers of rows: it is told nothing of these."""
        return self._replace(max_query_len=0, rows_each=None)


class PassPlan(NamedTuple):
    """Rows of one draft pass, packed request by request in rising position."""

    # Code that serves several passes has these three of the first of them.
    draft_step: int  # m
    module_idx: int  # module to run
    kv_layer: int  # draft KV layer to write and read, 0-based
    layout: RowLayout  # of the rows
    position: Tensor  # `[T]` int64, slot and rotary position; negative only for static padding
    token_position: Tensor  # `[T]` int64, of the token the row consumes; drafts follow the text
    hidden_kind: Tensor  # `[T]` int64 of `HiddenKind`
    hidden_index: Tensor  # `[T]` int64, see `HiddenKind`
    writes: Tensor  # `[T]` bool; False for padding rows and for rows whose inputs are not known yet
    seq_lens: Tensor  # `[R]` int32, KV length including this pass's rows
    has_base: bool = True  # some rows may be up to the frontier


def equal_rows(num_rows: int, like: Tensor) -> RowLayout:
    """`num_rows` rows for every request; nothing is read on the host."""
    requests = torch.arange(len(like) + 1, device=like.device)
    return RowLayout(
        counts=torch.full_like(like, num_rows),
        query_start_loc=(requests * num_rows).int(),
        request_index=requests[:-1].repeat_interleave(num_rows),
        max_query_len=num_rows,
        rows_each=num_rows,
    )


class BaseRows(NamedTuple):
    """Base rows of every request, padding included, as far as the host can bound them."""

    counts: Tensor  # `[R]` int64
    total: int  # their sum
    longest: int  # their maximum


def bounded_rows(base: BaseRows, num_draft: int) -> RowLayout:
    """`base` rows and `num_draft` more for every request; nothing is read on the host."""
    counts = base.counts + num_draft
    ends = torch.cumsum(counts, dim=0)
    rows = torch.arange(base.total + num_draft * len(counts), device=counts.device)
    return RowLayout(
        counts=counts,
        query_start_loc=torch.nn.functional.pad(ends, (1, 0)).int(),
        request_index=torch.searchsorted(ends, rows, right=True),
        max_query_len=base.longest + num_draft,
    )


def ragged_rows(counts: Tensor) -> RowLayout:
    """Rows by `counts` `[R]`, which the host has to read."""
    query_start_loc = torch.nn.functional.pad(torch.cumsum(counts, dim=0), (1, 0)).int()
    requests = torch.arange(len(counts), device=counts.device)
    num_rows, max_query_len = (int(counts.sum()), int(counts.max())) if len(counts) else (0, 0)
    request_index = torch.repeat_interleave(requests, counts, output_size=num_rows)
    return RowLayout(counts, query_start_loc, request_index, max_query_len)


class PassNumbers(NamedTuple):
    """Which pass of how many; tensors in code that serves several passes and K."""

    draft_step: int | Tensor  # m
    num_drafts: int | Tensor  # K


@dataclass(frozen=True)
class DraftPlan:
    """What every step drafts; all parts of a decoder take K, N and the policy from."""

    policy: HiddenPolicy  # the procedure
    num_speculative_tokens: int  # K; 0 drafts nothing
    num_mtp_modules: int  # N; 1 where no module drafts
    schedule: ModuleSchedule = "cycle"  # which module runs which pass

    @property
    def num_kv_layers(self) -> int:
        """Draft KV layers: one per depth where each depth sees its own history, else per module."""
        return self.policy.num_kv_layers(self.num_speculative_tokens, self.num_mtp_modules)

    @property
    def num_rows_per_step(self) -> int:
        """Module rows that a captured step computes per request: a decoding step, static form."""
        frontier = torch.tensor([10 * (self.num_speculative_tokens + 1)])
        state = StepState(
            first_fresh=frontier - self.num_speculative_tokens,
            frontier=frontier,
            num_known_tokens=frontier + 2,
            oldest_hidden=torch.zeros_like(frontier),
            drafting=torch.ones(1, dtype=torch.bool),
            prefilling=torch.zeros(1, dtype=torch.bool),
        )
        steps = range(self.num_speculative_tokens)
        return sum(len(self.pass_plan(state, step, static=True).position) for step in steps)

    def num_slots_needed(self, num_tokens: int, num_steps_in_flight: int = 0) -> int:
        """Positions a request must own before a step that starts with `num_tokens` known tokens.

        The verify step writes target rows up to `num_tokens - 1 + K`. If all drafts are accepted
        the text grows by K+1, and EAGLE draft rows then reach `num_tokens + 2K - 2`; chain policies
        stay below. With the host `num_steps_in_flight` steps late, the length it knows may be that
        many times K+1 behind.
        """
        drafted = self.num_speculative_tokens
        return num_tokens + num_steps_in_flight * (drafted + 1) + max(drafted, 2 * drafted - 1)

    def max_base_rows(self, row_counts: Sequence[int], *, is_prefill: Sequence[int]) -> list[int]:
        """Most base rows of each request in a pass, from what the host knows of its step."""
        # A chunk reruns at most the K rows before it; a decoding request has the static form's.
        rerun = 0 if self.policy.rows == "fresh" else self.num_speculative_tokens
        return [
            count + rerun if prefill else self._num_static_base
            for count, prefill in zip(row_counts, is_prefill, strict=True)
        ]

    def most_rows(self, row_counts: Sequence[int], *, is_prefill: Sequence[bool]) -> int:
        """Most rows of a step's target pass, or of any of its draft passes, of these requests."""
        base = sum(self.max_base_rows(row_counts, is_prefill=is_prefill))
        above = max(self.num_speculative_tokens - 1, 0)  # draft rows of a request in a pass
        return max(sum(row_counts), base + above * len(row_counts))

    def pass_plan(
        self,
        state: StepState,
        draft_step: int,
        *,
        static: bool = False,
        num_fresh: int | None = None,
        base_rows: BaseRows | None = None,
        makes_draft: bool = True,
        numbers: PassNumbers | None = None,
        layout: RowLayout | None = None,
    ) -> PassPlan:
        """Rows of pass `draft_step`; in the ragged form only those that the policy asks for.

        Args:
            state: where each request stands.
            draft_step: m, 0..K-1.
            static: give every request the same number of base rows (K+1, or K for `window`),
                padding with rows that write nothing; for captured graphs. Only valid when every
                request is decoding.
            num_fresh: fresh rows of every request, in the static form; None for K+1.
            base_rows: bounds of the base rows (`max_base_rows`), padded in the same way; for
                batches with prompt rows whose plan must not wait for the device.
            makes_draft: the pass is sampled. Otherwise it has no rows above the frontier: the next
                round would rewrite them unread. Base rows stay, see `decode.draft.draft_length`.
            numbers: of a pass whose rows are laid out as those of `draft_step` (see `like`), in a
                plan of this or another K, for code that serves both; None for `draft_step` itself.
            layout: of the pass's rows, where it is at hand; only with `static`. Requests may then
                have different numbers of base rows, each as many as the policy asks for or more.
        """
        policy, module_idx = self.policy, self.module_idx(draft_step)
        now, num_drafts = numbers or (draft_step, self.num_speculative_tokens)
        first_draft, has_base = self._draft_rows(draft_step)
        frontier = state.frontier
        start = self._first_base_row(state, num_drafts)
        num_draft = self.num_draft_rows(draft_step, makes_draft=makes_draft)
        if layout is None:
            if base_rows is not None and has_base:
                layout = bounded_rows(base_rows, num_draft)
            elif static or base_rows is not None:
                num_base = self._static_base(num_fresh) if has_base else 0
                layout = equal_rows(num_base + num_draft, frontier)
            else:
                num_base = frontier - start + 1 if has_base else torch.zeros_like(frontier)
                layout = ragged_rows(num_base + state.drafting.long() * num_draft)
        if not has_base:
            first_row = frontier + now - (draft_step - (first_draft or 0))
        elif static or base_rows is not None:
            first_row = frontier - (layout.counts - num_draft) + 1
        else:
            first_row = start
        position = layout.positions(first_row)
        if policy.hidden == "chain" and draft_step > 0:
            kind, index, hidden_known = _chain_source(position)
        else:
            kind, index, hidden_known = _hidden_source(policy, state, now, layout, position)
        token_position, token_known = _token_source(policy, state, now, layout, position)
        writes = token_known & hidden_known
        if has_base:
            is_base = position <= layout.spread(frontier)
            writes &= ~(is_base & (position < layout.spread(start)))
        return PassPlan(
            draft_step=draft_step,
            module_idx=module_idx,
            kv_layer=self.kv_layer(draft_step),
            layout=layout,
            position=position,
            token_position=token_position,
            hidden_kind=kind,
            hidden_index=index,
            writes=writes,
            seq_lens=(first_row + layout.counts).int(),
            has_base=has_base,
        )

    def num_static_rows(
        self, draft_step: int, *, num_fresh: int | None = None, makes_draft: bool = True
    ) -> int:
        """Rows of each request in a pass of the static form; arguments as of `pass_plan`."""
        num_draft = self.num_draft_rows(draft_step, makes_draft=makes_draft)
        return num_draft + (self._static_base(num_fresh) if self.has_base(draft_step) else 0)

    def num_draft_rows(self, draft_step: int, *, makes_draft: bool = True) -> int:
        """Rows above the frontier of each request in a pass."""
        first_draft, _ = self._draft_rows(draft_step)
        return draft_step - first_draft + 1 if makes_draft and first_draft is not None else 0

    def _static_base(self, num_fresh: int | None) -> int:
        if num_fresh is not None and self.policy.rows == "fresh":
            return num_fresh
        return self._num_static_base

    def like(self, draft_step: int) -> int:
        """The first pass of a round that differs from pass `draft_step` in number and module alone.

        Both run over rows that are laid out in the same way, with hidden vectors from the
        same places; what follows from the number is added to indices.
        """
        forms = [self._form(step) for step in range(draft_step + 1)]
        return forms.index(forms[-1])

    def has_base(self, draft_step: int) -> bool:
        """Whether pass `draft_step` has rows up to the frontier."""
        return self._draft_rows(draft_step)[1]

    def num_outputs_read(self, draft_step: int) -> int:
        """How many of the latest passes' outputs g the rows of pass `draft_step` may read."""
        if self.policy.hidden == "shifted_target":
            return draft_step
        first_draft, _ = self._draft_rows(draft_step)
        return 0 if first_draft is None else draft_step - first_draft + 1

    def _form(self, draft_step: int) -> tuple[object, ...]:
        chains = self.policy.hidden == "chain" and draft_step > 0
        num_outputs = self.num_outputs_read(draft_step)
        return self.has_base(draft_step), num_outputs, chains

    @property
    def _num_static_base(self) -> int:
        return self.num_speculative_tokens + (self.policy.rows != "window")

    def module_idx(self, draft_step: int) -> int:
        """Module that runs pass `draft_step`."""
        return module_index(self.schedule, draft_step, self.num_mtp_modules)

    def kv_layer(self, draft_step: int) -> int:
        """KV layer, 0-based among the draft layers, that pass `draft_step` writes."""
        return self.policy.kv_layer(draft_step, self.module_idx(draft_step))

    def _draft_rows(self, draft_step: int) -> tuple[int | None, bool]:
        """First row above the frontier (1-based; None: no such rows), and whether base rows run."""
        policy = self.policy
        if policy.draft_rows == "none":
            return None, draft_step == 0 or policy.every_module
        module_idx = self.module_idx(draft_step)
        previous = [step for step in range(draft_step) if self.module_idx(step) == module_idx]
        has_base = draft_step == 0 or (policy.every_module and not previous)
        since = previous[-1] + 1 if previous else 1
        first = draft_step if policy.draft_rows == "newest" else since
        return (max(first, 1) if draft_step >= max(first, 1) else None), has_base

    def _first_base_row(self, state: StepState, num_drafts: int | Tensor) -> Tensor:
        """First base row of each request, `[R]`, not before the oldest hidden state at hand."""
        if self.policy.rows == "fresh":
            return state.first_fresh
        if self.policy.rows == "anchored":
            start = torch.minimum(state.first_fresh, state.frontier - num_drafts)
        else:
            window = state.frontier - num_drafts + 1
            # While the prompt is read in chunks the rows at a chunk's end lack later hidden
            # states; the next chunk reruns them.
            chunked = torch.minimum(window, state.first_fresh - num_drafts + 1)
            start = torch.where(state.prefilling, chunked, window)
        return torch.maximum(start, state.oldest_hidden)


def _token_source(
    policy: HiddenPolicy,
    state: StepState,
    number: int | Tensor,
    layout: RowLayout,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """Position of the token that each row consumes, and whether it is known yet, each `[T]`."""
    shift = number if policy.shift_tokens else 0
    token_position = position + (token_offset(policy, 0) + shift)
    drafting = layout.spread(state.drafting)
    num_known = layout.spread(state.num_known_tokens) + drafting.long() * number
    is_known = token_position < num_known
    if policy.rows == "anchored":
        # The next chunk reruns these rows, but until then they lie among the keys of this pass, and
        # what an earlier owner left there may be NaN: they are written, with any known token.
        fills_in = layout.spread(state.prefilling) & ~is_known
        token_position = torch.where(fills_in, num_known - 1, token_position)
        is_known = is_known | fills_in
    return token_position, is_known


def _chain_source(position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `_hidden_source`, of rows that take the output of the previous pass at the same row."""
    kind = torch.full_like(position, HiddenKind.CHAIN.value)
    rows = torch.arange(len(position), device=position.device)
    return kind, rows, torch.ones_like(position, dtype=torch.bool)


def _hidden_source(
    policy: HiddenPolicy,
    state: StepState,
    number: int | Tensor,
    layout: RowLayout,
    position: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden kind, hidden index and whether that vector exists yet, each `[T]`."""
    above = position - layout.spread(state.frontier)  # > 0 for rows above the frontier
    shift = number if policy.hidden == "shifted_target" else 0
    from_draft = above + shift > 0
    kind = torch.where(from_draft, HiddenKind.DRAFT.value, HiddenKind.TARGET.value)
    index = torch.where(from_draft, above + shift, position + shift)
    return kind, index, ~from_draft | layout.spread(state.drafting)
