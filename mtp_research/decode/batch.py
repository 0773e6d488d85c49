"""Tensors of one step; prompt chunks and verification are the same rows.

A request contributes rows `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`: a
prompt chunk, or the bonus token and its drafts. `schedule_inputs` lays out a schedule; captured
steps build theirs from tensors at fixed addresses.

Letters: R requests, T packed rows, M blocks per table, K drafts per step.
Source: metadata names as in vLLM's `CommonAttentionMetadata`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_research.decode.kv_cache import HiddenRing, KVCache
from mtp_research.models.compiled import kept
from mtp_research.models.paged import PagedContext
from mtp_research.models.recurrent import RecurrentContext, with_states
from mtp_research.row_layout import BaseRows, bounded_rows, equal_rows


@dataclass(frozen=True)
class StepInputs:
    """Inputs of one step.

    Attributes:
        input_ids: `[T]` int64.
        positions: `[T]` int64.
        request_index: `[T]` int64, row of the batch each token belongs to.
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32, KV length including this step's rows.
        block_table: `[R, M]` int32, padded with 0 (never read beyond `seq_lens`).
        slots: `[R]` int64, request slots in the ring.
        first_position: `[R]` int64, position of each request's first row (`num_computed_tokens`).
        num_rows: `[R]` int64, `num_scheduled_tokens`.
        row_counts: the same, on the host; empty where a captured step may not depend on it.
        num_tokens: `[R]` int64, accepted tokens before the step (L).
        num_drafts: `[R]` int64, drafts among the rows.
        draft_token_ids: `[R, K]` int64, -1 padded.
        samples: `[R]` bool, the rows reach the end of the accepted text, so a token is sampled.
        resumes: `[R]` bool, the rows end a recompute after a preemption: drafts follow, but the
            next token is known.
        prefilling: `[R]` bool, the rows are prompt rows.
        max_query_len: most rows of one request.
        block_size: tokens a page.
        static: every request decodes with K+1 rows, so that all shapes follow from R.
        is_prefill: `prefilling` on the host, where drafting must not wait for the device to learn
            the shapes of its passes; else None.
        base_rows: bounds of the draft passes' base rows, in a captured step with prompt rows.
    """

    input_ids: Tensor
    positions: Tensor
    request_index: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slots: Tensor
    first_position: Tensor
    num_rows: Tensor
    row_counts: tuple[int, ...]
    num_tokens: Tensor
    num_drafts: Tensor
    draft_token_ids: Tensor
    samples: Tensor
    resumes: Tensor
    prefilling: Tensor
    max_query_len: int
    block_size: int
    static: bool
    is_prefill: tuple[bool, ...] | None = None
    base_rows: BaseRows | None = None

    @classmethod
    def mixed(
        cls,
        facts: Tensor,
        block_table: Tensor,
        *,
        ring: HiddenRing,
        total: int,
        longest: int,
        block_size: int,
        base_rows: BaseRows | None = None,
    ) -> "StepInputs":
        """Inputs of a step with prompt rows, made on the device.

        Args:
            facts: `[R, 6]` int64, see `schedule_inputs.facts_of`.
            block_table: `[R, M]` int32.
            ring: state of the request slots.
            total: T, rows of all requests.
            longest: at least the rows of any one request.
            block_size: tokens a page.
            base_rows: bounds of the draft passes' base rows, if they are known.
        """
        slots, first_position, num_rows, *flags = facts.unbind(dim=1)
        prefilling, samples, resumes = (flag.bool() for flag in flags)
        # A decoding request starts at its newest token, wherever the device has moved that to.
        num_tokens = ring.num_tokens[slots]
        first_position = torch.where(prefilling, first_position, num_tokens - 1)
        num_drafts = torch.where(prefilling, 0, num_rows - 1)
        layout = bounded_rows(BaseRows(num_rows, total=total, longest=longest), 0)
        request_index, positions = layout.request_index, layout.positions(first_position)
        drafts = ring.read_drafts(slots, num_drafts=num_drafts)
        return cls(
            input_ids=ring.read_inputs(slots, request_index, positions, drafts),
            positions=positions,
            request_index=request_index,
            query_start_loc=layout.query_start_loc,
            seq_lens=(first_position + num_rows).int(),
            block_table=block_table,
            slots=slots,
            first_position=first_position,
            num_rows=num_rows,
            row_counts=(),
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            draft_token_ids=drafts,
            samples=samples,
            resumes=resumes,
            prefilling=prefilling,
            max_query_len=longest,
            block_size=block_size,
            static=False,
            base_rows=base_rows,
        )

    @classmethod
    def decoding(
        cls, slots: Tensor, block_table: Tensor, *, ring: HiddenRing, block_size: int
    ) -> "StepInputs":
        """Inputs of a step in which every request decodes with K+1 rows, made on the device.

        Args:
            slots: `[R]` int64.
            block_table: `[R, M]` int32.
            ring: state of the request slots.
            block_size: tokens a page.
        """
        num_requests, num_drafts = len(slots), ring.draft_token_ids.shape[1]
        rows_each = num_drafts + 1
        layout = equal_rows(rows_each, slots)
        num_tokens = ring.num_tokens[slots]
        first_position = num_tokens - 1
        request_index, positions = layout.request_index, layout.positions(first_position)
        drafts = ring.draft_token_ids[slots]
        yes = torch.ones_like(slots, dtype=torch.bool)
        return cls(
            input_ids=ring.read_inputs(slots, request_index, positions, drafts),
            positions=positions,
            request_index=request_index,
            query_start_loc=layout.query_start_loc,
            seq_lens=(first_position + rows_each).int(),
            block_table=block_table,
            slots=slots,
            first_position=first_position,
            num_rows=layout.counts,
            row_counts=(rows_each,) * num_requests,
            num_tokens=num_tokens,
            num_drafts=torch.full_like(slots, num_drafts),
            draft_token_ids=drafts,
            samples=yes,
            resumes=~yes,
            prefilling=~yes,
            max_query_len=rows_each,
            block_size=block_size,
            static=True,
        )

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
        slots = self.slot_mapping(self.request_index, self.positions)
        seq_lens, query_start_loc = self.seq_lens, self.query_start_loc
        if torch.compiler.is_compiling():  # every layer reads them
            slots, seq_lens, query_start_loc = kept(slots), kept(seq_lens), kept(query_start_loc)
        paged = PagedContext(
            pool=cache,
            slot_mapping=slots,
            block_table=self.block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            max_query_len=self.max_query_len,
            backend=backend,
        )
        return with_states(
            paged,
            states=cache.recurrent,
            slots=self.slots,
            first_position=self.first_position,
            num_rows=self.row_counts,
        )

    def logits_indices(self, num_speculative_tokens: int) -> Tensor:
        """`[R, K+1]` rows whose logits decide tokens: the last accepted token's, then the drafts'.

        Requests with fewer drafts repeat their last row; the padding drafts there are never
        accepted. Requests inside their prompt get their last row, and nothing is sampled from it.
        """
        last = self.query_start_loc[1:].long() - 1
        column = torch.arange(num_speculative_tokens + 1, device=last.device)
        return torch.minimum((last - self.num_drafts)[:, None] + column, last[:, None])
