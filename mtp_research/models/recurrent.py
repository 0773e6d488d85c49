"""Recurrent layers (gated delta nets) of a target, in packed passes whose drafts may be rejected.

The library's layers see one text a batch row. Their calls are routed (`route_mixers`): in decoding
to `RecurrentContext.mix`, in training (`DenseContext`) once per document. The layer's own forward,
unmodified, does the work.

`RecurrentContext.mix` calls it once per group of requests with as many rows, from the state of each
request's slot. Up to K+1 rows run one at a time (the library's decode path), so that the state
after each can be kept; a longer prompt chunk runs as one (its chunk path) and leaves one state. One
call a row would read the layer's weights K+1 times a step, so its linear layers run first, over all
rows; during the calls they hand out their rows, and the output projection follows (`run_rows`).

A recurrent layer keeps one state, which a rejection cannot shorten. So the state after each of the
K+1 rows of a step is kept, and the next step starts from the one of the last accepted row:

    step starts from column c;  row 0 -> column c+1, row 1 -> c+2, ... row K -> c+K+1  (mod K+2)
    `select` moves c on by the number of rows that stay; 0 undoes the step

No step writes the column it starts from, so undoing one copies nothing. Columns live on the device,
so `select` needs no word from the host. Which states a layer has, and in which dtype, only its own
code knows: a call on one zero row shows it (`zero_state`). Calls then get a library cache that
holds our tensors and updates them in place.

Letters: S request slots (in training the row length), R requests, T packed rows, G requests of a
group, Q rows of each, K drafts per step, C convolution channels, W convolution width, D hidden.
Source: modeling_qwen3_next.py and cache_utils.py of transformers 5.17.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from mtp_research.models.attention.attention import AttentionCall, AttentionContext, DenseContext
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.family import MIXER_BLOCK

_OUT_PROJECTION = "out_proj"


class MixerForward(Protocol):
    """The forward of a recurrent layer of the library."""

    def __call__(self, hidden_states: Tensor, *, cache_params: Cache | None = None) -> Tensor:
        """`[G, Q, D]` of `[G, Q, D]`; moves the states in `cache_params` on, in place."""
        ...


def mixers_of(model: PreTrainedModel, name: str | None) -> dict[int, nn.Module]:
    """Recurrent layers by layer index; `name` is `Family.mixer`, None for families without."""
    if name is None:
        return {}
    layers = cast(nn.ModuleList, model.base_model.layers)
    return {
        index: layer.get_submodule(name)
        for index, layer in enumerate(layers)
        if name in dict(layer.named_children())
        and getattr(layer, "block_type", MIXER_BLOCK) == MIXER_BLOCK
    }


def route_mixers(mixers: Iterable[nn.Module]) -> None:
    """Let calls of recurrent layers reach the context of the pass, in place."""
    for mixer in mixers:
        mixer.forward = partial(_mix, mixer, mixer.forward)


@torch.compiler.disable  # it calls modules of the layer by forwards of its own, and writes states
def _mix(
    mixer: nn.Module,
    forward: MixerForward,
    hidden_states: Tensor,
    *,
    attention_context: AttentionContext | None = None,
    **kwargs: Any,  # the library's
) -> Tensor:
    if attention_context is None:
        return forward(hidden_states, **kwargs)
    if isinstance(attention_context, DenseContext):
        return _mix_documents(forward, hidden_states, attention_context.document_index)
    assert isinstance(attention_context, RecurrentContext), (
        f"a pass through recurrent layers needs a RecurrentContext, got "
        f"{type(attention_context).__name__}"
    )
    return attention_context.mix(mixer, forward, hidden_states)


def _mix_documents(
    forward: MixerForward, hidden_states: Tensor, document_index: Tensor | None
) -> Tensor:
    """Rows `[B, S, D]`, every document from the zero state; None takes a row for one document."""
    if document_index is None:
        return forward(hidden_states)
    output = torch.empty_like(hidden_states)
    for row, documents in enumerate(document_index):
        lengths = torch.unique_consecutive(documents, return_counts=True)[1].tolist()
        pieces = hidden_states[row].split(lengths)
        output[row] = torch.cat([forward(piece[None])[0] for piece in pieces])
    return output


class MixerState(NamedTuple):
    """State of one recurrent layer for several requests."""

    conv: Tensor  # last inputs of the causal convolution, [G, C, W]
    recurrent: Tensor  # the memory, [G, ...]; [G, heads, Dk, Dv] of a gated delta net


class RecurrentStates:
    """Slot-addressed states of every recurrent layer, K+2 columns a slot.

    One slot more than `num_slots` takes the rows of padding requests.
    """

    def __init__(
        self, mixers: Mapping[int, nn.Module], *, num_slots: int, num_speculative_tokens: int
    ) -> None:
        columns, num_slots = num_speculative_tokens + 2, num_slots + 1
        self.layers = {
            layer_idx: _column_states(mixer, num_slots=num_slots, columns=columns)
            for layer_idx, mixer in mixers.items()
        }
        device = next(iter(self.layers.values())).conv.device
        self._column = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @property
    def num_candidates(self) -> int:
        """K+1, the rows of a step whose states are all kept."""
        return next(iter(self.layers.values())).conv.shape[1] - 1

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
        """Keep the `state` after the first `num_rows` >= 1 rows of this step, in place.

        A chunk of more than K+1 rows keeps its last state only. `slots` `[G]` are distinct.
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
    states = zero_state(mixer)
    return MixerState(*(part.new_zeros(num_slots, columns, *part.shape[1:]) for part in states))


class RowGroup(NamedTuple):
    """Requests with the same number of rows in a step."""

    slots: Tensor  # [G] int64
    rows: Tensor  # [G, num_rows] int64, packed rows of each request in text order
    is_start: Tensor  # [G] bool, the first row is at position 0


@dataclass(frozen=True)
class RecurrentContext:
    """Context of one target pass: pages for the attention layers, states for the recurrent ones."""

    paged: PagedContext
    states: RecurrentStates
    groups: tuple[RowGroup, ...]  # the requests of the pass by number of rows

    def mix(self, mixer: nn.Module, forward: MixerForward, hidden_states: Tensor) -> Tensor:
        """Output `[1, T, D]` of layer `mixer` for packed rows `[1, T, D]`; writes its states."""
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

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """See `AttentionContext`."""
        return self.paged.attend(module, call)

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

    `slots` `[R]` and `first_position` `[R]` are int64; `num_rows` of each request add up to T.
    """
    if states is None:
        return paged
    return RecurrentContext(
        paged, states, group_rows(num_rows, slots=slots, is_start=first_position == 0)
    )


def group_rows(num_rows: Sequence[int], *, slots: Tensor, is_start: Tensor) -> tuple[RowGroup, ...]:
    """Requests by number of rows, shortest first; `slots` and `is_start` are `[R]`."""
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


def run_rows(
    mixer: nn.Module,
    forward: MixerForward,
    hidden_states: Tensor,
    *,
    cache: Cache,
    after_row: Callable[[int], None],
) -> Tensor:
    """Output `[G, Q, D]` of a recurrent layer, one row of every request at a time.

    Args:
        mixer: the layer; every linear child but `out_proj` must read the layer's input.
        forward: its own forward.
        hidden_states: `[G, Q, D]`.
        cache: holds the states before the first row; updated in place.
        after_row: called with 1, 2, ... Q when the states in `cache` are those after that row.
    """
    linears = {name: c for name, c in mixer.named_children() if isinstance(c, nn.Linear)}
    out_projection = linears.pop(_OUT_PROJECTION)
    projected = {linear: linear(hidden_states) for linear in linears.values()}
    outputs = []
    for row in range(hidden_states.shape[1]):
        stand_ins: dict[nn.Module, Callable[[Tensor], Tensor]] = {
            linear: _always(rows[:, row : row + 1]) for linear, rows in projected.items()
        }
        stand_ins[out_projection] = _unchanged
        with _replaced_forwards(stand_ins):
            outputs.append(forward(hidden_states[:, row : row + 1], cache_params=cache))
        after_row(row + 1)
    return out_projection(torch.cat(outputs, dim=1))


@contextmanager
def _replaced_forwards(forwards: Mapping[nn.Module, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Modules answer with other functions inside the block; in place, undone at its end."""
    before = {module: vars(module).get("forward") for module in forwards}  # hooks of others
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            del module.forward  # the class's is back
            if forward is not None:
                module.forward = forward


def _always(output: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: output


def _unchanged(hidden_states: Tensor) -> Tensor:
    return hidden_states


def library_cache(layer_idx: int, state: MixerState) -> Cache:
    """A cache that a call of layer `layer_idx` continues from `state`, and updates in place."""
    layer = LinearAttentionLayer()
    layer.conv_states[0], layer.recurrent_states[0] = state
    layer.conv_kernel_size[0] = state.conv.shape[-1]
    layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
    # A zero state is the state before the first row, so there always is a previous one.
    layer.has_previous_state[0] = True
    return Cache(layers=list(repeat(layer, layer_idx + 1)))


@torch.no_grad()
def zero_state(mixer: nn.Module) -> MixerState:
    """The zero state of one request, `[1, ...]`, as the library would allocate it."""
    layer, layer_idx = LinearAttentionLayer(), cast(int, mixer.layer_idx)
    weight = next(child.weight for child in mixer.children() if isinstance(child, nn.Linear))
    row = weight.new_zeros(1, 1, weight.shape[1])
    mixer(row, cache_params=Cache(layers=list(repeat(layer, layer_idx + 1))))
    conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
    assert conv is not None, f"layer {layer_idx} keeps no convolution state"
    assert recurrent is not None, f"layer {layer_idx} keeps no recurrent state"
    return MixerState(torch.zeros_like(conv), torch.zeros_like(recurrent))
