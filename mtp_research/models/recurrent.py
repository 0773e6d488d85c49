"""Context of a packed target pass through full-attention and recurrent layers.

Recurrent layers of the library expect batch rows `[B, S]`, one text each. `RecurrentContext.mix`
calls a layer's own forward once per group of requests with as many rows, from the state of each
request's slot. Up to K+1 rows run one at a time (the library's decode path), so that the state
after each can be kept; a longer prompt chunk runs as one (its chunk path) and leaves one state.

Letters: R requests, T packed rows, G requests of a group, Q rows of each, K drafts per step,
D hidden.
Source: modeling_qwen3_next.py of transformers 5.17.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from mtp_research.models.mixer_cache import library_cache
from mtp_research.models.mixer_rows import MixerForward, run_rows
from mtp_research.models.paged import PagedContext
from mtp_research.models.recurrent_states import RecurrentStates


class RowGroup(NamedTuple):
    """Requests with the same number of rows in a step.

    Attributes:
        slots: `[G]` int64.
        rows: `[G, num_rows]` int64, packed rows of each request in text order.
        is_start: `[G]` bool, the first row is at position 0.
    """

    slots: Tensor
    rows: Tensor
    is_start: Tensor


@dataclass(frozen=True)
class RecurrentContext:
    """Context of one target pass: pages for the attention layers, states for the recurrent ones.

    Attributes:
        paged: where the attention layers write and read.
        states: states of the recurrent layers.
        groups: the requests of the pass by number of rows.
    """

    paged: PagedContext
    states: RecurrentStates
    groups: tuple[RowGroup, ...]

    def mix(self, mixer: nn.Module, forward: MixerForward, hidden_states: Tensor) -> Tensor:
        """Output `[1, T, D]` of a recurrent layer for packed rows `[1, T, D]`; writes its states.

        Args:
            mixer: the layer.
            forward: its own forward.
            hidden_states: rows in the order of the pass.
        """
        output = torch.empty_like(hidden_states)
        for group in self.groups:
            rows = hidden_states[0, group.rows]  # [G, Q, D]
            output[0, group.rows] = self._mix_group(mixer, forward, rows, group)
        return output

    def _mix_group(
        self, mixer: nn.Module, forward: MixerForward, hidden_states: Tensor, group: RowGroup
    ) -> Tensor:
        layer_idx = cast(int, mixer.layer_idx)
        state = self.states.read(layer_idx, group.slots, is_start=group.is_start)
        cache = library_cache(layer_idx, state)  # the layer updates `state` through it

        def keep(num_rows: int) -> None:
            self.states.write(layer_idx, group.slots, num_rows=num_rows, state=state)

        num_rows = group.rows.shape[1]
        if num_rows <= self.states.num_candidates:
            return run_rows(mixer, forward, hidden_states, cache=cache, after_row=keep)
        output = forward(hidden_states, cache_params=cache)
        keep(num_rows)
        return output

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *rest: object
    ) -> tuple[Tensor, Tensor]:
        """Cache protocol of the attention layers; see `PagedContext.update`."""
        return self.paged.update(key, value, layer_idx, *rest)

    def attend(
        self,
        module: nn.Module,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `models.attention.AttentionContext`."""
        return self.paged.attend(
            module,
            query=query,
            key=key,
            value=value,
            scale=scale,
            sliding_window=sliding_window,
            sinks=sinks,
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cache protocol: positions are passed explicitly, so the cache claims to be empty."""
        return 0


def with_states(
    paged: PagedContext,
    *,
    states: RecurrentStates | None,
    slots: Tensor,
    first_position: Tensor,
    num_rows: Sequence[int],
) -> PagedContext | RecurrentContext:
    """Context of a target pass over `paged`; `paged` itself for targets without states.

    Args:
        paged: pages of the pass.
        states: of the target's recurrent layers, None without.
        slots: `[R]` int64.
        first_position: `[R]` int64, position of each request's first row.
        num_rows: rows of each request, >= 1, known to the host; they add up to T.
    """
    if states is None:
        return paged
    return RecurrentContext(
        paged, states, group_rows(num_rows, slots=slots, is_start=first_position == 0)
    )


def group_rows(num_rows: Sequence[int], *, slots: Tensor, is_start: Tensor) -> tuple[RowGroup, ...]:
    """Requests by number of rows, shortest first.

    Args:
        num_rows: rows of each request, packed in this order.
        slots: `[R]` int64.
        is_start: `[R]` bool.
    """
    device, total = slots.device, sum(num_rows)
    if len(set(num_rows)) == 1:  # all of a captured step: nothing may be copied to the device
        return (RowGroup(slots, torch.arange(total, device=device).view(len(slots), -1), is_start),)
    first_rows = [sum(num_rows[:index]) for index in range(len(num_rows))]
    groups = []
    for count in sorted(set(num_rows)):
        members = [index for index, rows in enumerate(num_rows) if rows == count]
        index = torch.tensor(members, device=device)
        first = torch.tensor([first_rows[member] for member in members], device=device)
        rows = first[:, None] + torch.arange(count, device=device)  # [G, count]
        groups.append(RowGroup(slots[index], rows, is_start[index]))
    return tuple(groups)
