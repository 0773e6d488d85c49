"""Families with a learned index over keys (DeepSeek sparse attention), run densely.

Their attention reads the `index_topk` keys that an indexer selects for a row. A row with no more
keys than that selects all of them, so that dense latent attention is exact up to `index_topk`
tokens; beyond it the result would be another model's, and is refused. The index itself is neither
computed nor stored; its weights stay in the modules, for export.

Letters: B batch rows, S row length, D hidden.
"""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from mtp_research.errors import ConfigError
from mtp_research.models.attention import AttentionContext, DenseContext


def route_sparse(attentions: Iterable[nn.Module], *, config: PreTrainedConfig) -> None:
    """Let attention layers with an index attend to all keys, in place.

    Args:
        attentions: layers with the parts of DeepSeek-V3's attention beside their indexer.
        config: of the model, which then says what their forward does: rotate interleaved pairs.
    """
    config.rope_interleave = True
    for attention in attentions:
        attention.forward = partial(_attend_densely, attention, num_keys=config.index_topk)


def require_exact_length(num_tokens: int, *, limit: int | None) -> None:
    """Refuse texts that dense attention computes otherwise than the model's index would.

    Raises:
        ConfigError: names both lengths.
    """
    if limit is not None and num_tokens > limit:
        raise ConfigError(
            f"engine.max_model_len must be <= {limit} (index_topk) for a model with sparse "
            f"attention, which is run densely and exact up to there, got {num_tokens}; set "
            f"engine.max_model_len={limit}."
        )


def _attend_densely(
    attention: nn.Module,
    hidden_states: Tensor,
    *,
    num_keys: int,
    attention_context: AttentionContext,
    prev_topk_indices: Tensor | None = None,
    **kwargs: object,  # the library's
) -> tuple[Tensor, None] | tuple[Tensor, None, None]:
    """Output `[B, S, D]` of DeepSeek-V3's attention on the layer's weights."""
    if isinstance(attention_context, DenseContext):
        require_exact_length(hidden_states.shape[1], limit=num_keys)
    output, _ = DeepseekV3Attention.forward(
        attention, hidden_states, attention_context=attention_context, **kwargs
    )
    # Layers that hand their selection on to the next expect a third result.
    hands_on = "skip_topk" in vars(attention)
    return (output, None, None) if hands_on else (output, None)
