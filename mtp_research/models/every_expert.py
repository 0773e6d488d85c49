"""Every expert on every row: for few experts in dtypes without a grouped product on a GPU.

transformers runs such experts in a Python loop that waits for the device at each one: a forward of
12 layers of 16 experts has some 180 waits, and it cannot be captured. Two products over all experts
do more arithmetic, E / top_k times, and wait for nothing.

Letters: T tokens, E experts, H hidden size, I inner size of an expert.
"""

from typing import cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EVERY_EXPERT_NAME = "mtp_research_every_expert"
MAX_EVERY_EXPERT = 32  # more do too much that is thrown away
_MAX_ROWS = 2048  # at a time: the inner activations of all experts take E / top_k times the memory


def every_expert(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Output `[T, H]` of an expert layer, as `transformers.integrations.moe` calls it.

    Args:
        module: gated experts without biases, with the library's names and layout of weights, all
            experts on this rank.
        hidden_states: `[T, H]`, dtype of the weights.
        top_k_index: `[T, top_k]` int64 in [0, E), no expert twice in a row.
        top_k_weights: `[T, top_k]`.
    """
    if len(hidden_states) > _MAX_ROWS:
        operands = (hidden_states, top_k_index, top_k_weights)
        parts = zip(*(tensor.split(_MAX_ROWS) for tensor in operands), strict=True)
        return torch.cat([every_expert(module, *part) for part in parts])
    gate_up_proj, down_proj = cast(Tensor, module.gate_up_proj), cast(Tensor, module.down_proj)
    num_experts = len(down_proj)
    shares = hidden_states.new_zeros(len(hidden_states), num_experts)
    shares = shares.scatter(1, top_k_index, top_k_weights.to(shares.dtype))
    inner = hidden_states @ gate_up_proj.flatten(0, 1).T  # [T, E 2I]
    gated = module._apply_gate(inner.unflatten(1, (num_experts, -1)))  # [T, E, I]
    return torch.einsum("tei,ehi->th", gated * shares[..., None], down_proj)


ALL_EXPERTS_FUNCTIONS.register(EVERY_EXPERT_NAME, every_expert)
