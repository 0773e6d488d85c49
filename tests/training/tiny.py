"""Packed batches and trainable heads for the training tests, on the targets of `tests.tiny`."""

from collections import defaultdict

import torch
from torch import Tensor

from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention import DenseContext
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
