"""The rows of a draft pass: what they are made from, what is known of each, how they are packed.

Packed means: the same number of rows for every request, or as many as each one needs.

Letters: R requests, T rows of a pass, p frontier row, f first fresh row, m draft step.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor


class HiddenKind(IntEnum):
    """Where a row's hidden vector comes from."""

    TARGET = 0  # the target's hidden state; `hidden_index` is its absolute position
    CHAIN = 1  # output of the previous pass; `hidden_index` is the row index in that pass
    DRAFT = 2  # output of an earlier pass at its sampled row; `hidden_index` is i of g_i, 1-based


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


class RowLayout(NamedTuple):
    """How the rows of a pass are packed; fields as in `PassPlan`, `counts` are rows a request."""

    counts: Tensor
    query_start_loc: Tensor
    request_index: Tensor
    max_query_len: int

    def positions(self, first_row: Tensor) -> Tensor:
        """Position `[T]` of every row, counted from the first one `[R]` of its request."""
        row = torch.arange(len(self.request_index), device=first_row.device)
        start = first_row - self.query_start_loc[:-1].long()
        return row + start[self.request_index]


def equal_rows(num_rows: int, like: Tensor) -> RowLayout:
    """`num_rows` rows for every request; nothing is read on the host."""
    requests = torch.arange(len(like) + 1, device=like.device)
    return RowLayout(
        counts=torch.full_like(like, num_rows),
        query_start_loc=(requests * num_rows).int(),
        request_index=requests[:-1].repeat_interleave(num_rows),
        max_query_len=num_rows,
    )


class BaseRows(NamedTuple):
    """Base rows of every request, padding included, as far as the host can bound them.

    Attributes:
        counts: `[R]` int64.
        total: their sum.
        longest: their maximum.
    """

    counts: Tensor
    total: int
    longest: int


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
