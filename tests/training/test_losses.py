"""The chunked multi-depth loss against plain autograd, and its normalisation."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtp_research.errors import ConfigError
from mtp_research.training.losses import (
    LossSpec,
    argmax_tokens,
    depth_labels,
    depth_weights,
    multi_depth_loss,
)
from mtp_research.training.unroll import DepthOutput, same_document
from tests.training.tiny import DOCUMENT_INDEX

VOCAB, HIDDEN, DEPTHS = 37, 8, 3


def make_inputs(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict:
    generator = torch.Generator().manual_seed(seed)
    shape = DOCUMENT_INDEX.shape
    input_ids = torch.randint(0, VOCAB, shape, generator=generator)
    loss_mask = torch.rand(shape, generator=generator) < 0.7
    rows = torch.randn(DEPTHS, *shape, HIDDEN, generator=generator, dtype=dtype)
    return {
        "rows": [row.clone().requires_grad_() for row in rows],
        "labels": depth_labels(
            input_ids, document_index=DOCUMENT_INDEX, loss_mask=loss_mask, num_depths=DEPTHS
        ),
        "lm_head": torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype),
        "target": torch.randn(*shape, HIDDEN, generator=generator, dtype=dtype),
    }


def outputs_of(rows: list[Tensor]) -> list[DepthOutput]:
    return [
        DepthOutput(row, same_document(DOCUMENT_INDEX, offset=depth))
        for depth, row in enumerate(rows, start=1)
    ]


def run(inputs: dict, *, loss: str, chunk_rows: int = 1024, num_step_labels: Tensor | None = None):
    counts = torch.stack([(label >= 0).sum() for label in inputs["labels"]])
    return multi_depth_loss(
        outputs_of(inputs["rows"]),
        labels=inputs["labels"],
        num_step_labels=counts if num_step_labels is None else num_step_labels,
        lm_head=inputs["lm_head"],
        spec=LossSpec(loss=loss, depth_decay=0.6, chunk_rows=chunk_rows),
        target_post_norm=inputs["target"],
    )


def plain_loss(inputs: dict, *, loss: str) -> Tensor:
    """The definition, row by row."""
    total = torch.zeros((), dtype=torch.float64)
    weights = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    for depth, (row, label, weight) in enumerate(
        zip(inputs["rows"], inputs["labels"], weights, strict=True), start=1
    ):
        losses = []
        for batch, column in (label >= 0).nonzero().tolist():
            logits = row[batch, column] @ inputs["lm_head"].T
            if loss == "ce":
                losses.append(functional.cross_entropy(logits, label[batch, column]))
            else:
                teacher = inputs["target"][batch, column + depth] @ inputs["lm_head"].T
                log_p, log_q = teacher.log_softmax(-1), logits.log_softmax(-1)
                losses.append((log_p.exp() * (log_p - log_q)).sum())
        total = total + weight * torch.stack(losses).mean()
    return total


@pytest.mark.parametrize("chunk_rows", [1, 4, 1024])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_multi_depth_loss_float64_equals_plain_autograd(loss, chunk_rows):
    inputs = make_inputs()
    got = run(inputs, loss=loss, chunk_rows=chunk_rows).loss
    expected = plain_loss(inputs, loss=loss)
    assert abs(got - expected) < 1e-10
    got_grads = torch.autograd.grad(got, inputs["rows"])
    for got_grad, grad in zip(
        got_grads, torch.autograd.grad(expected, inputs["rows"]), strict=True
    ):
        assert (got_grad - grad).abs().max() < 1e-10
        assert grad.abs().max() > 1e-4


def test_multi_depth_loss_counts_labels_and_hits():
    inputs = make_inputs()
    result = run(inputs, loss="ce")
    for depth, (row, label) in enumerate(zip(inputs["rows"], inputs["labels"], strict=True)):
        drafts = argmax_tokens(row, lm_head=inputs["lm_head"], chunk_rows=5)
        assert result.num_labels[depth] == (label >= 0).sum()
        assert result.num_correct[depth] == ((drafts == label) & (label >= 0)).sum()


def test_multi_depth_loss_split_batch_sums_to_the_whole():
    inputs = make_inputs()
    whole = run(inputs, loss="ce")
    total = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        part = {
            "rows": [rows[row : row + 1] for rows in inputs["rows"]],
            "labels": [label[row : row + 1] for label in inputs["labels"]],
            "lm_head": inputs["lm_head"],
        }
        outputs = [
            DepthOutput(rows, labels >= 0)
            for rows, labels in zip(part["rows"], part["labels"], strict=True)
        ]
        total = (
            total
            + multi_depth_loss(
                outputs,
                labels=part["labels"],
                num_step_labels=whole.num_labels,
                lm_head=part["lm_head"],
                spec=LossSpec(depth_decay=0.6),
            ).loss
        )
    assert abs(total - whole.loss) < 1e-12


def test_multi_depth_loss_without_labels_is_zero_with_zero_gradient():
    inputs = make_inputs()
    inputs["labels"] = [torch.full_like(label, -1) for label in inputs["labels"]]
    result = run(inputs, loss="ce")
    assert result.loss == 0
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(result.loss, inputs["rows"]))


def test_depth_labels_hand_example():
    input_ids = torch.tensor([[10, 11, 12, 13, 20, 21, 22]])
    document_index = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    loss_mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1]], dtype=torch.bool)
    first, second = depth_labels(
        input_ids, document_index=document_index, loss_mask=loss_mask, num_depths=2
    )
    assert first.tolist() == [[12, 13, -1, -1, 22, -1, -1]]
    assert second.tolist() == [[13, -1, -1, -1, -1, -1, -1]]


def test_depth_labels_masked_token_has_no_label():
    labels = depth_labels(
        torch.tensor([[1, 2, 3, 4]]),
        document_index=torch.zeros(1, 4, dtype=torch.long),
        loss_mask=torch.tensor([[False, False, False, True]]),
        num_depths=1,
    )
    assert labels[0].tolist() == [[-1, 4, -1, -1]]


def test_depth_weights_fastmtp_example():
    assert [round(weight, 2) for weight in depth_weights(3, decay=0.6)] == [0.51, 0.31, 0.18]


def test_loss_spec_unknown_loss_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.loss must be one of \['ce', 'kl'\]"):
        LossSpec(loss="mse")
