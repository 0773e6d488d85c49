"""States of recurrent layers: one per candidate row, chosen by accepted index, never cropped.

A recurrent layer (gated delta net) keeps no rows but one state, which a rejection cannot shorten.
So the state after each of the K+1 rows of a step is kept, and the next step starts from the one
that belongs to the last accepted row:

    step starts from column c;  row 0 -> column c+1, row 1 -> c+2, ... row K -> c+K+1  (mod K+2)
    `select` moves c on by the number of rows that stay; 0 undoes the step

No step writes the column it starts from, so undoing one copies nothing. Columns live on the device,
so `select` needs no word from the host.

Letters: S request slots, R requests, G requests of a group, K drafts per step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtp_research.models.mixer_cache import MixerState, zero_state


class RecurrentStates:
    """Slot-addressed states of every recurrent layer, K+2 columns a slot.

    Args:
        mixers: recurrent layers by layer index (`Target.mixers`).
        num_slots: S; one slot more takes the rows of padding requests.
        num_speculative_tokens: K, >= 0.

    Attributes:
        layers: states `[S, K+2, ...]` by layer index.
        num_candidates: K+1.
    """

    def __init__(
        self, mixers: Mapping[int, nn.Module], *, num_slots: int, num_speculative_tokens: int
    ) -> None:
        self.num_candidates = num_speculative_tokens + 1
        columns, num_slots = self.num_candidates + 1, num_slots + 1
        self.layers = {
            layer_idx: _column_states(mixer, num_slots=num_slots, columns=columns)
            for layer_idx, mixer in mixers.items()
        }
        device = next(iter(self.layers.values())).conv.device
        self._column = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def read(self, layer_idx: int, slots: Tensor, *, is_start: Tensor) -> MixerState:
        """Copies of the states that the next rows continue.

        Args:
            layer_idx: of a recurrent layer.
            slots: `[G]` int64.
            is_start: `[G]` bool, the first row is at position 0: the state is zero, whoever used
                the slot before.
        """
        column = self._column[slots]
        conv, recurrent = (part[slots, column] for part in self.layers[layer_idx])
        return MixerState(_zero_where(is_start, conv), _zero_where(is_start, recurrent))

    def write(self, layer_idx: int, slots: Tensor, *, num_rows: int, state: MixerState) -> None:
        """Keep the state after the first `num_rows` rows of this step, in place.

        Args:
            layer_idx: of a recurrent layer.
            slots: `[G]` int64, distinct.
            num_rows: >= 1; a chunk of more than K+1 rows keeps its last state only.
            state: what the layer left.
        """
        column = self._shifted(slots, min(num_rows, self.num_candidates))
        conv, recurrent = self.layers[layer_idx]
        conv[slots, column] = state.conv
        recurrent[slots, column] = state.recurrent

    def select(self, slots: Tensor, *, num_rows: Tensor, num_kept: Tensor) -> None:
        """Let the next step start after the kept rows of this one; device tensors only, in place.

        Args:
            slots: `[R]` int64, distinct.
            num_rows: `[R]` int64, rows that the step ran.
            num_kept: `[R]` int64, rows that stay: all of a prompt chunk, `num_accepted + 1` rows
                of a verification, 0 when the step is undone.
        """
        written = num_rows.clamp(max=self.num_candidates)
        advance = (written - (num_rows - num_kept)).masked_fill(num_kept <= 0, 0)
        self._column[slots] = self._shifted(slots, advance)

    def _shifted(self, slots: Tensor, advance: Tensor | int) -> Tensor:
        return (self._column[slots] + advance) % (self.num_candidates + 1)


def _zero_where(rows: Tensor, state: Tensor) -> Tensor:
    """`state` `[G, ...]` with zeros where `rows` `[G]`, even in the place of NaN."""
    return state.masked_fill(rows.view(-1, *[1] * (state.dim() - 1)), 0)


def _column_states(mixer: nn.Module, *, num_slots: int, columns: int) -> MixerState:
    """Zero states `[S, columns, ...]` of one layer."""
    conv, recurrent = (
        part.new_zeros(num_slots, columns, *part.shape[1:]) for part in zero_state(mixer)
    )
    return MixerState(conv, recurrent)
