"""The block of MTP modules in families whose layers hold one part each: an attention, then an MLP.

Letters: B batch rows, T rows, D hidden.
Source: Nemotron 3, whose published MTP layers are such a pair.
"""

from torch import Tensor, nn
from transformers import PreTrainedConfig


class LayerStack(nn.Module):
    """Layers of the target's own class, one after the other.

    Args:
        config: sizes; it lists one entry of `layers_block_type` for each layer to build, the
            attention first: its rows go to the module's cache layer 0.
        layer: a layer of the target, for its class.
    """

    def __init__(self, config: PreTrainedConfig, layer: nn.Module) -> None:
        super().__init__()
        count = len(config.layers_block_type)
        self.layers = nn.ModuleList(type(layer)(config, index) for index in range(count))

    @property
    def mlp(self) -> nn.Module:
        """The feed-forward part, under the name that it has in other blocks."""
        return self.layers[-1].get_submodule("mixer")

    def forward(self, hidden_states: Tensor, **kwargs: object) -> Tensor:
        """`[B, T, D]` to `[B, T, D]`; keywords are those of the library's layers."""
        for layer in self.layers:
            hidden_states = layer(hidden_states, **kwargs)
        return hidden_states
