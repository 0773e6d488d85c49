"""A recurrent layer run row by row, its projections once for all rows.

The state after every row is wanted, and the library's layer shows it after every call only. One
call a row would read the layer's weights once a row, K+1 times a step, where reading weights is
what a step costs. So the linear layers run first, over all rows; during the calls they hand out
their rows, and the output projection follows at the end. The layer's own code does the rest.

Letters: G requests of a group, Q rows of each, D hidden.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import Cache

OUT_PROJECTION = "out_proj"


class MixerForward(Protocol):
    """The forward of a recurrent layer of the library."""

    def __call__(self, hidden_states: Tensor, *, cache_params: Cache | None = None) -> Tensor:
        """`[G, Q, D]` of `[G, Q, D]`; moves the states in `cache_params` on, in place."""
        ...


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
    out_projection = linears.pop(OUT_PROJECTION)
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
