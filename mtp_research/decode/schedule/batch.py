"""What the device is told of a schedule: texts of admitted requests, then the rows of the step.

Prompt chunks and verification are the same rows: a request contributes rows
`[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`, a prompt chunk or the bonus
token and its drafts. Nothing here waits for the device. Captured steps build the same inputs from
tensors at fixed addresses; their block tables are kept on the device by slot, so that a step
uploads the few new entries only.

Letters: R requests, T packed rows, M blocks per table, K drafts per step.
Source: metadata names as in vLLM's `CommonAttentionMetadata`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from mtp_research.decode.schedule.request import Request, Scheduled
from mtp_research.decode.slot_state import KVCache, SlotState, Tenant, to_device
from mtp_research.kernels.latent.expanded_attention import Prompts, Span
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.recurrent import RecurrentContext, with_states
from mtp_research.policy.plan import BaseRows, RowLayout, bounded_rows, equal_rows


class PartCompiler(Protocol):
    """Compiles parts of a captured step, each once for all that is like it."""

    @property
    def numbers(self) -> Sequence[Tensor]:
        """0..K on the device, int64: code with a pass's number in it would serve that one."""
        ...

    @property
    def serves_uneven_rows(self) -> bool:
        """Whether code of a pass also serves requests that have different numbers of rows."""
        ...

    def equal_rows(self, num_rows: int, like: Tensor) -> RowLayout:
        """`plan.equal_rows`, made once and not by the step."""
        ...

    def compiled(self, part: Callable, *, longest: int = 0) -> Callable:
        """`part` compiled, for any number of rows and requests of its tensors.

        `longest` is the most rows of a request where they differ; 0: all have as many.
        """
        ...


class StepRows(NamedTuple):
    """How the rows of a step lie, and what each request does in it.

    The flags are three tensors: code compiled where two names mean one tensor would serve no other.
    """

    slots: Tensor  # `[R]` int64
    layout: RowLayout  # of the rows
    first_row: Tensor  # `[R]` int64, position of a prompt's first row; else not looked at
    prefilling: Tensor  # `[R]` bool, the three as in `StepInputs`
    ends_at_newest_token: Tensor  # `[R]` bool
    ends_recompute: Tensor  # `[R]` bool

    @classmethod
    def decoding(cls, slots: Tensor, *, num_drafts: int) -> "StepRows":
        """Rows of the requests in `slots` `[R]`, each with `num_drafts` drafts."""
        yes = torch.ones_like(slots, dtype=torch.bool)
        layout, first_row = equal_rows(num_drafts + 1, slots), torch.zeros_like(slots)
        return cls(slots, layout, first_row, ~yes, yes, ~yes)

    @classmethod
    def of_facts(cls, facts: Iterable[Tensor], *, total: int, longest: int) -> "StepRows":
        """Rows of six facts `[R]` (`facts_of`): T is `total`, of a request at most `longest`."""
        slots, first_row, num_rows, *flags = facts
        layout = bounded_rows(BaseRows(num_rows, total=total, longest=longest), 0)
        return cls(slots, layout, first_row, *(flag.bool() for flag in flags))


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step."""

    input_ids: Tensor  # `[T]` int64
    positions: Tensor  # `[T]` int64
    request_index: Tensor  # `[T]` int64, row of the batch each token belongs to
    query_start_loc: Tensor  # `[R + 1]` int32
    seq_lens: Tensor  # `[R]` int32, KV length including this step's rows
    block_table: Tensor  # `[R, M]` int32, padded with 0 (never read beyond `seq_lens`)
    slots: Tensor  # `[R]` int64, request slots of the slot state
    first_position: Tensor  # `[R]` int64, of each request's first row (`num_computed_tokens`)
    num_rows: Tensor  # `[R]` int64, `num_scheduled_tokens`
    row_counts: tuple[int, ...]  # the same on the host; empty where a graph may not depend on it
    num_tokens: Tensor  # `[R]` int64, accepted tokens before the step (L)
    num_drafts: Tensor  # `[R]` int64, drafts among the rows
    # `[R, K]` int64, -1 padded; `[R, n]` where a decoding step verifies n drafts of every request
    draft_token_ids: Tensor
    ends_at_newest_token: Tensor  # `[R]` bool, a token is sampled
    ends_recompute: Tensor  # `[R]` bool, after a preemption: drafts follow, the next token is known
    prefilling: Tensor  # `[R]` bool, the rows are prompt rows
    max_query_len: int  # most rows of one request
    block_size: int  # tokens a page
    static: bool  # every request decodes with as many rows, so that all shapes follow from R
    # `prefilling` on the host, where drafting must not wait for the shapes of its passes; else None
    is_prefill: tuple[bool, ...] | None = None
    # bounds of the draft passes' base rows, in a captured step with prompt rows
    base_rows: BaseRows | None = None
    # of the last requests, where the host knows all rows of a step with prompt rows
    prompts: Prompts | None = None
    # `[axes, T]` rotary positions where some request's differ by axis; None: `positions`
    axis_positions: Tensor | None = None
    row_slots: Tensor | None = None  # `[T]` int64, page slots of the rows, where they are known
    compiler: PartCompiler | None = None  # of a captured step whose parts are compiled

    @classmethod
    def of_rows(
        cls,
        rows: StepRows,
        block_table: Tensor,
        *,
        slot_state: SlotState,
        block_size: int,
        num_drafts: int | None,
    ) -> "StepInputs":
        """Inputs of a step, made on the device.

        `num_drafts` bounds what a request verifies; None: K, in code that serves every K.
        """
        slots, layout, first_row, prefilling, ends_at_newest_token, ends_recompute = rows
        num_tokens = slot_state.num_tokens[slots]
        # A decoding request starts at its newest token, wherever the device has moved that to.
        first_position = torch.where(prefilling, first_row, num_tokens - 1)
        drafts_each = torch.where(prefilling, 0, layout.counts - 1)
        drafts = slot_state.read_drafts(slots, num_drafts=drafts_each)[:, :num_drafts]
        request_index, positions = layout.request_index, layout.positions(first_position)
        inputs = cls(
            input_ids=slot_state.read_inputs(slots, request_index, positions, drafts),
            positions=positions,
            request_index=request_index,
            query_start_loc=layout.query_start_loc,
            seq_lens=(first_position + layout.counts).int(),
            block_table=block_table,
            slots=slots,
            first_position=first_position,
            num_rows=layout.counts,
            row_counts=(),
            num_tokens=num_tokens,
            num_drafts=drafts_each,
            draft_token_ids=drafts,
            ends_at_newest_token=ends_at_newest_token,
            ends_recompute=ends_recompute,
            prefilling=prefilling,
            max_query_len=layout.max_query_len,
            block_size=block_size,
            static=layout.rows_each is not None,
        )
        return replace(inputs, row_slots=inputs.slot_mapping(request_index, positions))

    @classmethod
    def decoding(
        cls,
        slots: Tensor,
        block_table: Tensor,
        *,
        slot_state: SlotState,
        block_size: int,
        num_drafts: int,
    ) -> "StepInputs":
        """Inputs of a step in which every request verifies the first `num_drafts` of its drafts."""
        inputs = cls.of_rows(
            StepRows.decoding(slots, num_drafts=num_drafts),
            block_table,
            slot_state=slot_state,
            block_size=block_size,
            num_drafts=num_drafts,
        )
        return replace(inputs, row_counts=(num_drafts + 1,) * len(slots))

    def require_requests(self, *others: Tensor) -> None:
        """Say that these tensors and ours `[R, ...]` are of one R, which compiled code cannot know.

        Where it does not, it loops over each R by itself.
        """
        own = (self.block_table, self.seq_lens, self.num_tokens, self.num_drafts, self.num_rows)
        flags = (self.ends_at_newest_token, self.ends_recompute, self.prefilling)
        known = (*own, *flags, self.first_position, *others)
        assert all(len(one) == len(self.slots) for one in known), "tensors of other requests"
        assert len(self.query_start_loc) == len(self.slots) + 1, "rows of other requests"

    def of_draft_rows(self) -> "StepInputs":
        """These inputs for a pass of draft rows alone, where every request has as many rows."""
        return replace(self, static=True, base_rows=None)

    def of_compiled_pass(self) -> "StepInputs | None":
        """These inputs as a compiled pass takes them; None where the pass is not compiled.

        Code that serves uneven rows takes all rows for even ones; its layers are told otherwise.
        """
        if self.compiler is None:
            return None
        if self.compiler.serves_uneven_rows and self.prompts is None:
            return replace(self, static=True, base_rows=None, max_query_len=0, compiler=None)
        return self if self.static else None

    def slot_mapping(
        self, request_index: Tensor, positions: Tensor, *, writes: Tensor | None = None
    ) -> Tensor:
        """Page slots `[T]` of rows given by request and position; -1 where `writes` is False."""
        safe = positions.clamp(min=0)
        block = self.block_table[
            request_index, (safe // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        ]
        slot = block.long() * self.block_size + safe % self.block_size
        return slot if writes is None else torch.where(writes, slot, -1)

    def target_context(self, cache: KVCache, *, backend: str) -> PagedContext | RecurrentContext:
        """Context of the target forward pass: pages, and states where layers are recurrent."""
        slots = self.row_slots
        if slots is None:
            slots = self.slot_mapping(self.request_index, self.positions)
        paged = PagedContext(
            pool=cache,
            slot_mapping=slots,
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            has_equal_rows=self.static,
            backend=backend,
            prompts=self.prompts,
        )
        return with_states(
            paged,
            states=cache.recurrent,
            slots=self.slots,
            first_position=self.first_position,
            num_rows=self.row_counts,
        )

    def logits_indices(self) -> Tensor:
        """`[R, K+1]` rows whose logits decide tokens: the last accepted token's, then the drafts'.

        Requests with fewer drafts repeat their last row; the padding drafts there are never
        accepted. Requests inside their prompt get their last row, and nothing is sampled from it.
        """
        last = self.query_start_loc[1:].long() - 1
        column = torch.arange(self.draft_token_ids.shape[1] + 1, device=last.device)
        return torch.minimum((last - self.num_drafts)[:, None] + column, last[:, None])


def start_texts(admitted: Sequence[Request], *, slot_state: SlotState) -> None:
    """Write the texts of admitted requests, and their positions, into their slots."""
    if not admitted:
        return
    device = slot_state.text.device
    tenants = [Tenant(cast(int, r.slot), r.token_ids, r.num_cached_tokens) for r in admitted]
    slot_state.start(tenants)
    for tenant, request in zip(tenants, admitted, strict=True):
        given = request.axis_positions
        slot_state.start_positions(
            tenant.slot,
            None if given is None else to_device(list(given), dtype=torch.int64, device=device),
        )


def build_inputs(
    scheduled: list[Scheduled], *, slot_state: SlotState, block_size: int, deferred: bool
) -> StepInputs:
    """Lay out the rows of a schedule; the slot state already holds texts, lengths and drafts."""
    inputs = _rows_of(scheduled, slot_state=slot_state, block_size=block_size, deferred=deferred)
    if not have_axis_positions(scheduled):
        return inputs
    slots = inputs.slots[inputs.request_index]
    return replace(inputs, axis_positions=slot_state.read_positions(slots, inputs.positions))


def have_axis_positions(scheduled: Iterable[Scheduled]) -> bool:
    """Whether the rotary positions of some request differ by axis."""
    return any(entry.request.axis_positions is not None for entry in scheduled)


def _rows_of(
    scheduled: list[Scheduled], *, slot_state: SlotState, block_size: int, deferred: bool
) -> StepInputs:
    device = slot_state.text.device
    requests = [entry.request for entry in scheduled]
    block_table = _block_table(requests, device=device)
    is_prefill = tuple(entry.is_prefill for entry in scheduled)
    if deferred and not any(is_prefill):
        slots = to_device([r.slot for r in requests], dtype=torch.int64, device=device)
        return StepInputs.decoding(
            slots,
            block_table,
            slot_state=slot_state,
            block_size=block_size,
            num_drafts=scheduled[0].num_scheduled_tokens - 1,
        )
    counts = [entry.num_scheduled_tokens for entry in scheduled]
    facts = to_device(facts_of(scheduled), dtype=torch.int64, device=device)
    inputs = StepInputs.of_rows(
        StepRows.of_facts(facts, total=sum(counts), longest=max(counts)),
        block_table,
        slot_state=slot_state,
        block_size=block_size,
        num_drafts=slot_state.draft_token_ids.shape[1],
    )
    return replace(
        inputs,
        row_counts=tuple(counts),
        is_prefill=is_prefill if deferred else None,
        prompts=prompts_of(scheduled),
    )


def facts_of(entries: Sequence[Scheduled]) -> list[list[int]]:
    """What the device must be told of entries: slots, first rows, rows, and three flags."""
    return [
        [cast(int, entry.request.slot) for entry in entries],
        [entry.first_position for entry in entries],
        [entry.num_scheduled_tokens for entry in entries],
        [entry.is_prefill for entry in entries],
        [entry.ends_at_newest_token for entry in entries],
        [entry.ends_recompute for entry in entries],
    ]


def prompts_of(entries: Sequence[Scheduled]) -> Prompts | None:
    """The entries with prompt rows at the end of a step; None where the last one has none.

    An entry with prompt rows before one that decodes (both admitted in this step, after a
    preemption) counts among the others.
    """
    num_others = len(entries)
    while num_others and entries[num_others - 1].is_prefill:
        num_others -= 1
    if num_others == len(entries):
        return None
    counts = [entry.num_scheduled_tokens for entry in entries[:num_others]]
    spans = (Span(e.first_position, e.num_scheduled_tokens) for e in entries[num_others:])
    return Prompts(tuple(spans), sum(counts), max(counts, default=0), num_launched=sum(counts))


def _block_table(requests: list[Request], *, device: torch.device) -> Tensor:
    """`[R, M]` int32 for the longest of these requests, padded with 0."""
    width = max(len(request.block_ids) for request in requests)
    tables = [request.block_ids + [0] * (width - len(request.block_ids)) for request in requests]
    return to_device(tables, dtype=torch.int32, device=device)


class BlockTables:
    """Block tables of all slots; what a request does not own is the spare block."""

    def __init__(
        self, num_slots: int, *, num_table_blocks: int, spare_block: int, device: torch.device
    ) -> None:
        self.width, self._spare_block = num_table_blocks, spare_block
        self._tables = torch.full(
            (num_slots + 1, num_table_blocks), spare_block, dtype=torch.int32, device=device
        )
        # Per slot, the list that was uploaded and how much of it. A list only grows while a request
        # runs, and `BlockManager.free` replaces it: the same list means the same tenant.
        self._uploaded: list[tuple[list[int], int]] = [([], 0)] * num_slots

    def update(self, requests: Iterable[Request]) -> bool:
        """Upload what is new in the tables of running requests; whether there was anything."""
        cells: list[int] = []
        blocks: list[int] = []
        uploaded, width = self._uploaded, self.width
        for request in requests:
            slot, table = request.slot, request.block_ids
            assert slot is not None, f"{request.request_id} has no slot"
            last, known = uploaded[slot]
            is_tenant = last is table
            if is_tenant and known == len(table):
                continue
            assert known <= len(table) or not is_tenant, f"{request.request_id} lost blocks"
            assert len(table) <= width, f"{request.request_id} has more than {width} blocks"
            if not is_tenant:  # a new tenant: nothing of the former one's may stay
                cells += range(slot * width, (slot + 1) * width)
                blocks += table
                blocks += [self._spare_block] * (width - len(table))
            else:
                cells += range(slot * width + known, slot * width + len(table))
                blocks += table[known:]
            uploaded[slot] = table, len(table)
        if not cells:
            return False
        where, values = to_device(
            [cells, blocks], dtype=torch.int64, device=self._tables.device
        ).unbind()
        self._tables.view(-1).index_copy_(0, where, values.int())
        return True

    def read(self, slots: Tensor, *, out: Tensor | None = None) -> Tensor:
        """The tables of `slots` `[R]` int64, `[R, M]` int32; in `out`, if it is given."""
        return torch.index_select(self._tables, 0, slots, out=out)
