"""Device state of the decode loop: the page pool, and the per-slot texts and recent hidden states.

`to_device` brings host values there without waiting; the way back is `ledger.PendingResult`.

Letters: L cache layers, S request slots, K drafts per step, D hidden.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mtp_research.models.family import KVPages, KVStack, LayerGeometry
from mtp_research.models.recurrent import RecurrentStates
from mtp_research.policy.plan import DraftPlan

Tree = TypeVar("Tree")
_RING_ROWS = 8

_NUMPY_TYPES = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}


class KVCache:
    """Pages of every attention layer: the target's layers first, then the draft layers.

    Layers of one geometry share one allocation, so that a uniform model has one pool.
    """

    def __init__(
        self,
        layers: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent: RecurrentStates | None = None,
    ) -> None:
        self.recurrent, self.block_size, self.num_blocks = recurrent, block_size, num_blocks
        self.runs_regions = False  # see `PagePool`
        self._pools: list[Tensor] = []
        self._stacks: dict[int, KVStack] = {}
        for geometry in dict.fromkeys(layers):
            members = [layer for layer, other in enumerate(layers) if other == geometry]
            shape = (len(members), num_blocks, block_size, geometry.num_kv_heads)
            keys = torch.zeros(*shape, geometry.key_dim, dtype=dtype, device=device)
            self._pools.append(keys)
            if geometry.kind == "latent":
                values = keys[..., : geometry.value_dim]
            else:
                values = torch.zeros(*shape, geometry.value_dim, dtype=dtype, device=device)
                self._pools.append(values)
            for index, layer in enumerate(members):
                self._stacks[layer] = KVStack(keys, values, geometry.kind, index)
        self._pages = {layer: stack.pages for layer, stack in self._stacks.items()}

    def pages(self, layer: int) -> KVPages:
        """Pages of one layer, writable."""
        return self._pages[layer]

    def stack(self, layer: int) -> KVStack:
        """See `PagePool`."""
        return self._stacks[layer]

    @property
    def stacks(self) -> Iterable[KVStack]:
        """The stacks of all layers."""
        return self._stacks.values()

    def fill(self, value: float) -> None:
        """Overwrite every page, which also makes the system commit the memory behind them."""
        for pool in self._pools:
            pool.fill_(value)

    def bytes_per_token(self, layer: int) -> int:
        """Bytes that one token takes in the pages of a layer."""
        pages = self._pages[layer]
        shares_storage = pages.kind == "latent"
        width = pages.keys.shape[3] + (0 if shares_storage else pages.values.shape[3])
        return pages.keys.shape[2] * width * pages.keys.element_size()

    @property
    def num_bytes(self) -> int:
        """Size of the pool in bytes."""
        return sum(pool.numel() * pool.element_size() for pool in self._pools)


class Tenant(NamedTuple):
    """A request that is given a slot."""

    slot: int
    token_ids: Sequence[int]  # accepted text
    first_row: int  # position of the first row that will run


class SlotState:
    """What the next step needs of the text, by request slot so that batch order cannot matter.

    `text[slot, j]` is the token at absolute position j: accepted tokens, then the current drafts.
    `num_tokens[slot]` counts the accepted ones (L) and `draft_token_ids[slot]` are the drafts as
    proposed, so that a step needs nothing from the host but slots and block tables.
    `hidden[slot, q mod C]` is the target hidden state of row q for the last K rows, but of none
    before `first_row[slot]`: those rows came from the prefix cache. C is K rounded up, so that
    most K share the code that is compiled for a ring of C. One slot more than requests
    takes the writes that are not wanted: masking them would wait for the device. Distributions of
    drafts are kept where `keep_draft_probs`: drafts are sampled, and verification asks for them.
    `axis_positions[slot, axis, j]` are rotary positions, from the first request on whose prompt has
    positions that differ by axis.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_model_len: int,
        plan: DraftPlan,
        hidden_size: int,
        vocab_size: int,
        keep_draft_probs: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_drafts = plan.num_speculative_tokens
        rows = num_slots + 1
        ints = {"dtype": torch.int64, "device": device}
        self.text = torch.zeros(rows, max_model_len + num_drafts + 1, **ints)
        self.num_tokens = torch.ones(rows, **ints)
        self.first_row = torch.zeros(rows, **ints)
        self.draft_token_ids = torch.full((rows, num_drafts), -1, **ints)
        ring = -(-max(num_drafts, 1) // _RING_ROWS) * _RING_ROWS
        self.hidden = torch.zeros(rows, ring, hidden_size, dtype=dtype, device=device)
        self.axis_positions: Tensor | None = None
        self.draft_probs: Tensor | None = None
        self._vocab_size = vocab_size
        if keep_draft_probs:
            self.draft_probs = torch.zeros(
                rows, num_drafts, vocab_size, dtype=torch.float64, device=device
            )

    @property
    def spare_slot(self) -> int:
        """The slot of no request."""
        return len(self.text) - 1  # of tensors: a number would bind compiled code to itself

    @property
    def num_rows(self) -> int:
        """Hidden states kept of a request."""
        return max(self.draft_token_ids.shape[1], 1)

    def start(self, tenants: Sequence[Tenant]) -> None:
        """Give slots to requests.

        All goes to the device in one copy: a number that is assigned to an element there comes from
        memory that is not pinned, and would wait for all that the device has yet to do.
        """
        count, device = len(tenants), self.text.device
        facts = [(one.slot, len(one.token_ids), one.first_row) for one in tenants]
        values = [*itertools.chain(*zip(*facts, strict=True), *(one.token_ids for one in tenants))]
        uploaded = to_device(values, dtype=torch.int64, device=device)
        slots, lengths, first_rows = uploaded[: 3 * count].view(3, count)
        self.num_tokens.index_copy_(0, slots, lengths)
        self.first_row.index_copy_(0, slots, first_rows)
        self.draft_token_ids.index_fill_(0, slots, -1)
        start = 3 * count
        for slot, length, _ in facts:
            self.text[slot, :length] = uploaded[start : start + length]
            start += length

    def start_positions(self, slot: int, positions: Tensor | None) -> None:
        """Give a slot the rotary positions of its prompt `[axes, prompt]`; None is j on all axes.

        Tokens behind the prompt follow its greatest position by 1 each, on every axis.
        """
        width, device = self.text.shape[1], self.text.device
        if self.axis_positions is None:
            if positions is None:
                return
            shape = (len(self.text), len(positions), width)
            self.axis_positions = torch.arange(width, device=device).expand(shape).contiguous()
        column, given = torch.arange(width, device=device), 0
        if positions is not None:
            given = positions.shape[1]
            self.axis_positions[slot, :, :given] = positions
            column = column + (positions.amax() + 1 - given)
        self.axis_positions[slot, :, given:] = column[given:]

    def read_positions(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions `[axes, T]` of rows at absolute positions `[T]`."""
        assert self.axis_positions is not None, "no request has positions that differ by axis"
        return self.axis_positions[slots, :, positions.clamp(0, self.text.shape[1] - 1)].T

    def write_text(
        self, slots: Tensor, *, positions: Tensor, token_ids: Tensor, keep: Tensor | None
    ) -> None:
        """Write `token_ids` at `positions` where `keep`, all `[R, J]`, or all; slots `[R]`.

        Ids outside the vocabulary (drafts that must be rejected) are stored as 0: the verifier
        knows them from `draft_token_ids`, and every lookup in an embedding stays in range.
        """
        token_ids = token_ids.masked_fill((token_ids < 0) | (token_ids >= self._vocab_size), 0)
        rows = slots[:, None]
        if keep is not None:
            rows = torch.where(keep, rows, self.spare_slot)
        self.text[rows, positions.clamp(0, self.text.shape[1] - 1)] = token_ids

    def read_text(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Tokens at absolute positions, `[T]`; outside the table, its first or last entry."""
        return self.text[slots, positions.clamp(0, self.text.shape[1] - 1)]

    def read_inputs(
        self, slots: Tensor, request_index: Tensor, positions: Tensor, drafts: Tensor
    ) -> Tensor:
        """Tokens `[T]` of target rows; in place of a draft that is no token, the newest token.

        A stand-in must not break the rows beside it, and the newest token is needed anyway. Row t
        is of request `request_index[t]` at `positions[t]`, both `[T]`; drafts `[R, K]` as proposed.
        """
        text = self.read_text(slots[request_index], positions)
        if drafts.shape[1] == 0:
            return text
        num_tokens = self.num_tokens[slots]
        newest = self.text[slots, num_tokens - 1]
        depth = positions - num_tokens[request_index]  # < 0 for accepted tokens
        proposed = drafts[request_index, depth.clamp(0, drafts.shape[1] - 1)]
        is_token = (depth < 0) | ((proposed >= 0) & (proposed < self._vocab_size))
        return torch.where(is_token, text, newest[request_index])

    def read_drafts(self, slots: Tensor, *, num_drafts: Tensor) -> Tensor:
        """Drafts `[R, K]` of which the first `num_drafts` `[R]` are verified; -1 elsewhere."""
        column = torch.arange(self.draft_token_ids.shape[1], device=slots.device)
        return self.draft_token_ids[slots].masked_fill(column >= num_drafts[:, None], -1)

    def write_hidden(
        self, slots: Tensor, *, positions: Tensor, hidden: Tensor, keep: Tensor
    ) -> None:
        """Store `hidden` `[R, J, D]` of rows `positions` where `keep`; at most K rows a request."""
        rows = torch.where(keep, slots[:, None], self.spare_slot)
        self.hidden[rows, positions % self.hidden.shape[1]] = hidden

    def read_hidden(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Hidden states `[T, D]` of rows that are among the last K of their request."""
        return self.hidden[slots, positions % self.hidden.shape[1]]

    def write_draft(
        self, slots: Tensor, draft_step: int | Tensor, *, token_ids: Tensor, positions: Tensor
    ) -> None:
        """Keep the drafts `[R]` of a pass as proposed, and as text at `positions` `[R]`.

        Those lie behind the text, also that of a prompt of which only a chunk was read.
        """
        self.draft_token_ids[slots, _column(draft_step, slots)] = token_ids
        self.write_text(
            slots, positions=positions[:, None], token_ids=token_ids[:, None], keep=None
        )

    def write_draft_probs(self, slots: Tensor, *, draft_step: int | Tensor, probs: Tensor) -> None:
        """Keep the distributions `[R, V]` that the drafts of `draft_step` were drawn from."""
        assert self.draft_probs is not None, (
            "draft distributions are kept only when drafts are sampled"
        )
        self.draft_probs[slots, _column(draft_step, slots)] = probs

    def read_draft_probs(self, slots: Tensor, *, num_drafts: int) -> Tensor | None:
        """Distributions `[R, n, V]` of the first n current drafts; None when drafts are one-hot."""
        return None if self.draft_probs is None else self.draft_probs[slots, :num_drafts]


def _column(draft_step: int | Tensor, slots: Tensor) -> int | Tensor:
    """An index beside that of `slots` `[R]`.

    A tensor without dims would be read on the host, which ends a graph and a capture.
    """
    return draft_step if isinstance(draft_step, int) else torch.zeros_like(slots) + draft_step


def to_device(values: list, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of host values, copied without waiting for the device to finish its work.

    By way of numpy, which reads a list in about half of the time that torch takes.
    """
    return copy_to_device(torch.from_numpy(np.array(values, dtype=_NUMPY_TYPES[dtype])), device)


def write_to_device(values: list, out: Tensor) -> None:
    """Copy host values likewise into a tensor of their shape that is there."""
    source = torch.from_numpy(np.array(values, dtype=_NUMPY_TYPES[out.dtype]))
    out.copy_(_pinned(source, out.device), non_blocking=True)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host, copied likewise: only from pinned memory does a copy not wait."""
    return _pinned(tensor, device).to(device, non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


def map_tensors(function: Callable[..., Tensor], value: Tree, *others: Tree) -> Tree:
    """Named tuples, nested, with `function(tensor, *others' tensors)` in place of each tensor.

    Flags and None stay as they are; `others` are built like `value`.
    """
    if isinstance(value, Tensor):
        return cast(Tree, function(value, *others))
    if isinstance(value, tuple):
        make = cast(Callable[..., Tree], type(value))
        alike = cast(tuple[tuple[object, ...], ...], (value, *others))
        return make(*(map_tensors(function, *parts) for parts in zip(*alike, strict=True)))
    return value
