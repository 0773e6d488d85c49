"""How much each depth weighs in the loss.

    decay            beta^(d-1)                                        one weight a depth
    uniform          1
    expected_length  dE[L]/da_d, E[L] = sum_j prod_{i<=j} a_i,         a = hit rate of the depth
    dpace            sum_{j>=d} prod_{i<=j} c_i,                       one weight an anchor,
                                                                       c = probability of the label

The last two ask how much a depth adds to the acceptance length: of greedy drafts on average, or of
one anchor, where it is the length's gradient in log c_d. They are held constant, estimated on the
micro-batch, and scaled so that the weights of an anchor's depths sum to 1 on average.

Letters: k depths, N anchors.
Source: decay FastMTP (arXiv:2509.18362); dpace after D-PACE (arXiv:2605.18810).
"""

import torch
from torch import Tensor


def depth_weights(
    kind: str, *, labelled: Tensor, confidence: Tensor, is_hit: Tensor, decay: float
) -> Tensor:
    """Weights of all anchors and depths, `[k, N]`.

    Args:
        kind: one of `config.DEPTH_WEIGHTS`.
        labelled: `[k, N]` bool.
        confidence: `[k, N]` draft probability of the label.
        is_hit: `[k, N]` bool, the label is the draft's argmax.
        decay: beta of `decay`.
    """
    if kind == "dpace":
        return _confidence_weights(confidence, labelled=labelled)
    num_depths = len(labelled)
    if kind == "expected_length":
        num_hits = (is_hit & labelled).sum(dim=1).to(confidence.dtype)
        rates = num_hits / labelled.sum(dim=1).clamp(min=1)
        raw = length_gradient(rates[:, None])[:, 0]
    else:
        beta = decay if kind == "decay" else 1.0
        raw = confidence.new_tensor([beta**depth for depth in range(num_depths)])
    return (raw / raw.sum())[:, None].expand(labelled.shape)


def expected_length(acceptance: Tensor) -> Tensor:
    """E[L] `[...]` of acceptance probabilities `[k, ...]`, the bonus token not counted."""
    return acceptance.cumprod(dim=0).sum(dim=0)


def length_gradient(acceptance: Tensor) -> Tensor:
    """Gradient of `expected_length` in each probability, `[k, ...]`; free of divisions.

    With P_d = prod_{i<d} a_i it is P_d R_d, where R_k = 1 and R_d = 1 + a_{d+1} R_{d+1}.
    """
    before = torch.ones_like(acceptance)
    before[1:] = acceptance[:-1].cumprod(dim=0)
    after = torch.ones_like(acceptance)
    for depth in range(len(acceptance) - 2, -1, -1):
        after[depth] = 1 + acceptance[depth + 1] * after[depth + 1]
    return before * after


def _confidence_weights(confidence: Tensor, *, labelled: Tensor) -> Tensor:
    """Depths without a label are passed over: their token counts as kept, and adds no length."""
    kept = torch.where(labelled, confidence, 1.0).cumprod(dim=0) * labelled
    raw = kept.flip(0).cumsum(dim=0).flip(0) * labelled
    num_anchors = labelled.any(dim=0).sum()
    return raw * (num_anchors / raw.sum().clamp(min=torch.finfo(raw.dtype).tiny))
