"""Speculative decoding as an engine does it, on a checkpoint folder alone: slow, without a cache.

The text is the library's greedy text. Before every round all rows are computed anew: rows up to the
frontier read the target's states, a row per draft reads the module's own output. Nothing here uses
`mtp_research`.

Source: vLLM 0.24.0 `v1/spec_decode/llm_base_proposer.py` (`propose`) and `glm4_moe_mtp.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.heads.reference_experts import deepseek_moe
from tests.heads.reference_parts import Checkpoint, HeadAttention, linear, read_checkpoint, rms_norm
from tests.heads.references import decoder_layer


@dataclass(frozen=True)
class Habits:
    """What engines disagree about."""

    recycles_pre_norm: bool
    zeroes_position_0: bool


VLLM_GLM4_MOE = Habits(recycles_pre_norm=True, zeroes_position_0=True)
SGLANG_GLM4_MOE = Habits(recycles_pre_norm=False, zeroes_position_0=False)


class EngineLoop:
    """One folder of GLM-4.5's family with one module, loaded as an engine finds it."""

    def __init__(self, folder: Path) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self.checkpoint: Checkpoint = read_checkpoint(folder)
        # As vLLM's classes of this family do: never the embedding.
        self.lm_head = self.checkpoint.tensors["lm_head.weight"]
        self._texts: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}

    def accepted_per_round(
        self, prompt: Sequence[int], *, num_drafts: int, num_rounds: int, habits: Habits
    ) -> list[int]:
        """How many drafts each of the first rounds keeps."""
        text, hidden = self._greedy(prompt, num_new=num_rounds * (num_drafts + 1) + num_drafts + 1)
        length, counts = len(prompt) + 1, []  # the prompt's pass gives the first token
        for _ in range(num_rounds):
            drafts = self._drafts(text[:length], hidden[: length - 1], num_drafts, habits)
            count = 0
            while count < num_drafts and drafts[count] == text[length + count]:
                count += 1
            counts.append(count)
            length += count + 1
        return counts

    def _greedy(self, prompt: Sequence[int], *, num_new: int) -> tuple[list[int], Tensor]:
        """Text and states, which are the same for all habits."""
        key = (tuple(prompt), num_new)
        if key not in self._texts:
            self._texts[key] = self._write(prompt, num_new=num_new)
        return self._texts[key]

    def _write(self, prompt: Sequence[int], *, num_new: int) -> tuple[list[int], Tensor]:
        text = list(prompt)
        with torch.no_grad():
            for _ in range(num_new):
                text.append(int(self.model(torch.tensor([text])).logits[0, -1].argmax()))
            states = self.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        return text, states[-1][0].double()  # behind the final norm

    def _drafts(
        self, text: list[int], hidden: Tensor, num_drafts: int, habits: Habits
    ) -> list[int]:
        tokens, states = text[1:], hidden
        drafts: list[int] = []
        for _ in range(num_drafts):
            raw, normed = self._module(tokens, states, habits)
            drafts.append(int((normed[-1] @ self.lm_head.T).argmax()))
            recycled = raw if habits.recycles_pre_norm else normed
            tokens, states = [*tokens, drafts[-1]], torch.cat([states, recycled[-1:]])
        return drafts

    def _module(self, tokens: list[int], states: Tensor, habits: Habits) -> tuple[Tensor, Tensor]:
        """Output of the module before and after its norm, each `[S, D]`."""
        config = self.checkpoint.config
        eps, rope = config["rms_norm_eps"], config["rope_parameters"]
        own = self.checkpoint.under(f"model.layers.{config['num_hidden_layers']}.")
        embeddings = self.checkpoint.embedding[tokens].clone()
        if habits.zeroes_position_0:
            embeddings[0] = 0
        halves = (
            rms_norm(embeddings, own["enorm.weight"], eps),
            rms_norm(states, own["hnorm.weight"], eps),
        )
        turned = int(config["head_dim"] * rope["partial_rotary_factor"])
        raw = decoder_layer(
            linear(torch.cat(halves, -1), own, "eh_proj"),
            own,
            attention=HeadAttention(config["head_dim"], eps, rope, num_rotated=turned),
            mlp=lambda rows, weights: deepseek_moe(rows, weights, config),
            eps=eps,
        )
        return raw, rms_norm(raw, own["shared_head.norm.weight"], eps)
