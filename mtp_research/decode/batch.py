"""Tensors of one step, built from the schedule; prompt chunks and verification are the same rows.

A request contributes rows `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens)`: a
prompt chunk, or the bonus token and its drafts.

Letters: R requests, T packed rows, M blocks per table, K drafts per step.
Source: metadata names as in vLLM's `CommonAttentionMetadata`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.decode.kv_cache import HiddenRing, KVCache
from mtp_research.decode.request import Request
from mtp_research.models.paged import PagedContext


class Scheduled(NamedTuple):
    """One entry of a schedule."""

    request: Request
    num_scheduled_tokens: int


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
        num_tokens: `[R]` int64, accepted tokens before the step (L).
        num_drafts: `[R]` int64, drafts among the rows.
        draft_token_ids: `[R, K]` int64, -1 padded.
        samples: `[R]` bool, the rows reach the end of the accepted text, so a token is sampled.
        resumes: `[R]` bool, the rows end a recompute after a preemption: drafts follow, but the
            next token is known.
        prefilling: `[R]` bool, the rows are prompt rows.
        max_query_len: most rows of one request.
        block_size: tokens a page.
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
    num_tokens: Tensor
    num_drafts: Tensor
    draft_token_ids: Tensor
    samples: Tensor
    resumes: Tensor
    prefilling: Tensor
    max_query_len: int
    block_size: int

    @classmethod
    def build(
        cls,
        scheduled: list[Scheduled],
        *,
        ring: HiddenRing,
        block_size: int,
        num_speculative_tokens: int,
    ) -> "StepInputs":
        """Lay out the rows of a schedule; `ring.text` already holds prompts and drafts."""
        device = ring.text.device
        requests = [entry.request for entry in scheduled]
        width = max(len(request.block_ids) for request in requests)
        tables = [
            request.block_ids + [0] * (width - len(request.block_ids)) for request in requests
        ]
        drafts = [
            request.draft_token_ids + [-1] * (num_speculative_tokens - len(request.draft_token_ids))
            for request in requests
        ]
        facts = torch.tensor(
            [
                (
                    request.slot,
                    request.num_computed_tokens,
                    count,
                    request.num_tokens,
                    max(request.num_computed_tokens + count - request.num_tokens, 0),
                    request.is_prefilling,
                    request.num_computed_tokens + count == request.num_prefill_tokens,
                )
                for request, count in scheduled
            ],
            dtype=torch.int64,
            device=device,
        )
        slots, first_position, num_rows, num_tokens, num_drafts, prefilling, ends_prefill = (
            facts.unbind(dim=1)
        )
        samples = first_position + num_rows >= num_tokens
        query_start_loc = torch.zeros(len(requests) + 1, dtype=torch.int32, device=device)
        query_start_loc[1:] = torch.cumsum(num_rows, dim=0)
        request_index = torch.repeat_interleave(
            torch.arange(len(requests), device=device), num_rows
        )
        offset = (
            torch.arange(len(request_index), device=device) - query_start_loc[request_index].long()
        )
        positions = first_position[request_index] + offset
        return cls(
            input_ids=ring.read_text(slots[request_index], positions),
            positions=positions,
            request_index=request_index,
            query_start_loc=query_start_loc,
            seq_lens=(first_position + num_rows).int(),
            block_table=torch.tensor(tables, dtype=torch.int32, device=device),
            slots=slots,
            first_position=first_position,
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            draft_token_ids=torch.tensor(drafts, dtype=torch.int64, device=device).view(
                len(requests), -1
            ),
            samples=samples,
            resumes=ends_prefill.bool() & ~samples,
            prefilling=prefilling.bool(),
            max_query_len=max(entry.num_scheduled_tokens for entry in scheduled),
            block_size=block_size,
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

    def target_context(self, cache: KVCache, *, backend: str) -> PagedContext:
        """Attention context of the target forward pass."""
        return PagedContext(
            pool=cache,
            slot_mapping=self.slot_mapping(self.request_index, self.positions),
            block_table=self.block_table,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            max_query_len=self.max_query_len,
            backend=backend,
        )

    def logits_indices(self, num_speculative_tokens: int) -> Tensor:
        """`[R, K+1]` rows whose logits decide tokens: the last accepted token's, then the drafts'.

        Requests with fewer drafts repeat their last row; the padding drafts there are never
        accepted. Requests inside their prompt get their last row, and nothing is sampled from it.
        """
        last = self.query_start_loc[1:].long() - 1
        column = torch.arange(num_speculative_tokens + 1, device=last.device)
        return torch.minimum((last - self.num_drafts)[:, None] + column, last[:, None])
