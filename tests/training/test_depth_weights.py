"""Depth weights by hand."""

import torch

from mtp_research.training.losses.loss_terms import depth_weights, expected_length, length_gradient


def weights(kind, *, labelled, confidence=None, is_hit=None, decay=0.8):
    labelled = torch.tensor(labelled, dtype=torch.bool)
    confidence = torch.ones(labelled.shape) if confidence is None else torch.tensor(confidence)
    is_hit = labelled if is_hit is None else torch.tensor(is_hit, dtype=torch.bool)
    found = depth_weights(
        kind, labelled=labelled, confidence=confidence, is_hit=is_hit, decay=decay
    )
    return found * labelled


def test_decay_weights_fastmtp_example():
    found = weights("decay", labelled=[[1], [1], [1]], decay=0.6)[:, 0].tolist()
    assert [round(weight, 2) for weight in found] == [0.51, 0.31, 0.18]


def test_uniform_weights_ignore_the_decay():
    assert weights("uniform", labelled=[[1], [1]], decay=0.1)[:, 0].tolist() == [0.5, 0.5]


def test_expected_length_weights_of_a_hopeless_first_depth_are_all_its_own():
    found = weights("expected_length", labelled=[[1, 1], [1, 1]], is_hit=[[0, 0], [1, 1]])
    # E[L] = a1 + a1 a2 at a = (0, 1): dE/da1 = 1 + a2 = 2, dE/da2 = a1 = 0
    assert found[:, 0].tolist() == [1.0, 0.0]


def test_dpace_weights_follow_each_anchors_confidence():
    found = weights("dpace", labelled=[[1, 1], [1, 1]], confidence=[[0.5, 1.0], [0.5, 1.0]])
    # anchor 0: (0.5 + 0.25, 0.25); anchor 1: (2, 1); sum 4 over two anchors -> scale 1/2
    assert found.tolist() == [[0.375, 1.0], [0.125, 0.5]]


def test_dpace_weights_pass_over_depths_without_a_label():
    found = weights("dpace", labelled=[[0, 1], [1, 0]], confidence=[[0.1, 0.5], [0.5, 0.1]])
    assert found.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_length_gradient_equals_autograd_with_zeros_inside():
    acceptance = torch.rand(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    acceptance[1, 2] = acceptance[3, 1] = 0
    acceptance.requires_grad_()
    (expected,) = torch.autograd.grad(expected_length(acceptance).sum(), acceptance)
    torch.testing.assert_close(length_gradient(acceptance.detach()), expected)
