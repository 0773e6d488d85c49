"""The library's cache of one recurrent layer, around states of ours.

Which states a layer has, and in which dtype, only its own code knows: a call on one zero row shows
it (`zero_state`). Calls then get a library cache that holds our tensors and updates them in place.

Letters: G requests, C convolution channels, W convolution width, D hidden.
Source: cache_utils.py of transformers 5.17.
"""

from itertools import repeat
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer


class MixerState(NamedTuple):
    """State of one recurrent layer for several requests.

    Attributes:
        conv: last inputs of the causal convolution, `[G, C, W]`.
        recurrent: the memory, `[G, ...]`; `[G, heads, Dk, Dv]` of a gated delta net.
    """

    conv: Tensor
    recurrent: Tensor


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
