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
    """What a step left behind for the draft passes, one entry per request, all `[R]`."""

    first_fresh: Tensor  # int64, f: first row whose target hidden state this step computed
    frontier: Tensor  # int64, p: last row of the committed text whose target hidden state is known
    # int64, tokens of the text that are committed (or belong to the prompt), bonus included
    num_known_tokens: Tensor
    # int64, first position whose target hidden state is still at hand (ring or this step)
    oldest_hidden: Tensor
    # bool, the request has a sampled token and wants drafts; False inside a chunked prompt
    drafting: Tensor
    prefilling: Tensor  # bool, the fresh rows are prompt rows rather than verified drafts


class PassPlan(NamedTuple):
    """Rows of one draft pass, packed request by request in rising position."""

    draft_step: int  # m
    module_idx: int  # module to run
    kv_layer: int  # draft KV layer to write and read, 0-based
    request_index: Tensor  # `[T]` int64
    # `[T]` int64, slot and rotary position of the row (negative only for padding rows of the static
    # form)
    position: Tensor
    # `[T]` int64, absolute index of the token the row consumes; drafts follow the committed text
    token_position: Tensor
    hidden_kind: Tensor  # `[T]` int64 of `HiddenKind`
    hidden_index: Tensor  # `[T]` int64, see `HiddenKind`
    writes: Tensor  # `[T]` bool; False for padding rows and for rows whose inputs are not known yet
    query_start_loc: Tensor  # `[R + 1]` int32
    seq_lens: Tensor  # `[R]` int32, KV length including this pass's rows
    max_query_len: int  # most rows of one request

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
