"""The block of MTP modules in families whose layers hold two attentions beside an expert shortcut.

The module has one attention and one dense MLP, of the classes that the target's layers use.

Letters: B batch rows, T rows, D hidden.
Source: LongCat-Flash (arXiv:2509.01322); its published MTP tensors.
"""

from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig


class SingleLayer(nn.Module):
    """Attention and MLP with a norm before each.

    Args:
        config: sizes.
        layer: a layer of the target, whose parts give the classes.
    """

    def __init__(self, config: PreTrainedConfig, layer: nn.Module) -> None:
        super().__init__()
        parts = {name: cast(nn.ModuleList, part) for name, part in layer.named_children()}
        norm_class = type(parts["input_layernorm"][0])
        self.input_layernorm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = norm_class(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = type(parts["self_attn"][0])(config, 0)
        self.mlp = type(parts["mlps"][0])(config)

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; keywords are those of the library's layers."""
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), attention_mask=None, **kwargs
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
