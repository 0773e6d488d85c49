"""Packed batches and trainable heads for the training tests, on the targets of `tests.tiny`."""

import json
from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from mtp_research.config.schema import ModelConfig, TrainConfig
from mtp_research.config.training_schema import DataConfig, TrainerConfig
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target
from tests.tiny import tiny_heads, tiny_target

# Two rows of packed documents: lengths 7 + 5 and 9, the rest padding.
DOCUMENT_INDEX = torch.tensor([[0] * 7 + [1] * 5 + [-1], [2] * 9 + [-1] * 4])


def trainable_heads(
    recipe: str = "qwen3", *, dtype: torch.dtype = torch.float64, num_mtp_modules: int = 1, **spec
) -> MTPHeads:
    """Random heads whose parameters want gradients."""
    target = tiny_target(recipe, dtype=dtype)
    return tiny_heads(target, num_mtp_modules=num_mtp_modules, **spec).requires_grad_(True)


def make_batch(heads: MTPHeads, document_index: Tensor = DOCUMENT_INDEX, *, seed: int = 2) -> dict:
    """Arguments of `unroll` for random documents."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(6, 128, document_index.shape, generator=generator)
    position_ids = torch.zeros_like(input_ids)
    for row, column, length in documents(document_index):
        position_ids[row, column : column + length] = torch.arange(length)
    with torch.no_grad():
        hidden = heads.target.forward(
            input_ids, position_ids=position_ids, context=DenseContext(document_index)
        )
    return {
        "input_ids": input_ids,
        "hidden": heads.source(hidden),
        "position_ids": position_ids,
        "document_index": document_index,
    }


def documents(document_index: Tensor) -> list[tuple[int, int, int]]:
    """(row, first column, length) of every document."""
    found = defaultdict(list)
    for row, column in (document_index >= 0).nonzero().tolist():
        found[row, int(document_index[row, column])].append(column)
    return [(row, min(columns), len(columns)) for (row, _), columns in found.items()]


def save_lab(folder: Path, *, recipe: str = "qwen3", num_documents: int = 60) -> TrainConfig:
    """A tiny target and its own greedy answers on disk, and a configuration that trains on them."""
    target = tiny_target(recipe, dtype=torch.float32)
    with torch.no_grad():  # weak layers: the next token follows the last one, which can be learnt
        for parameter in target.model.base_model.layers.parameters():
            parameter.mul_(0.3 if parameter.dim() > 1 else 1.0)
    target.model.save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 128, (num_documents, 6), generator=generator)
    lines = [
        json.dumps(
            {
                "id": f"document-{index}",
                "domain": ("code", "math")[index % 2],
                "token_ids": token_ids,
                "num_prompt_tokens": 6,
            }
        )
        for index, token_ids in enumerate(greedy_answers(target, prompts, num_new=26).tolist())
    ]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")
    return TrainConfig(
        model=ModelConfig("tiny", recipe, str(folder / "target"), device="cpu"),
        data=DataConfig(
            str(folder / "answers.jsonl"), seq_len=64, eval_documents=num_documents // 4
        ),
        trainer=TrainerConfig(max_steps=6, batch_size=4, eval_every=100, save_every=100),
    )


@torch.no_grad()
def greedy_answers(target: Target, prompts: Tensor, *, num_new: int) -> Tensor:
    """Prompts `[B, P]` and the target's greedy continuation, `[B, P + num_new]`."""
    text = prompts
    for _ in range(num_new):
        position_ids = torch.arange(text.shape[1]).expand(text.shape)
        hidden = target.forward(text, position_ids=position_ids, context=DenseContext())
        token = target.logits(hidden.post_norm[:, -1]).argmax(dim=-1)
        text = torch.cat([text, token[:, None]], dim=1)
    return text
