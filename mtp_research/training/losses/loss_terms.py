"""The weighted sum of loss terms, the factor of each gradient in it, and the weights of depths.

    loss = sum_d 1/n_d sum_t w_dt (c_ce ce + c_kl kl + c_tv tv + c_lk lk)
         + c_e2e / n sum_t (1 - E[L_t] / k),      E[L] = sum_j prod_{i<=j} (1 - tv_i)

n_d counts the labels of depth d in the whole optimizer step, n the anchors with a label at every
depth. A gradient in the draft's hidden states is linear in the factor of its anchor, so it is made
before the factors are known: w may depend on other depths of the anchor, E[L] always does. Terms
whose mix is fixed within an anchor share one gradient. The weights w_dt:

    decay            beta^(d-1)                                        one weight a depth
    uniform          1
    expected_length  dE[L]/da_d, E[L] = sum_j prod_{i<=j} a_i,         a = hit rate of the depth
    dpace            sum_{j>=d} prod_{i<=j} c_i,                       one weight an anchor,
                                                                       c = probability of the label

The last two ask how much a depth adds to the acceptance length: of greedy drafts on average, or of
one anchor, where it is the length's gradient in log c_d. They are held constant, estimated on the
micro-batch, and scaled so that the weights of an anchor's depths sum to 1 on average.

Letters: k depths, N anchors.
Source: lk from LK losses (arXiv:2602.23881); decay FastMTP (arXiv:2509.18362); dpace after D-PACE
(arXiv:2605.18810).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_research.config.training_schema import (
    DEPTH_WEIGHTS,
    LOSS_TERMS,
    ObjectiveConfig,
    parse_loss,
)
from mtp_research.kernels.losses.distill_rows import Mixture
from mtp_research.runtime.errors import ConfigError

_NEEDS_TEACHER = {"e2e_tv", "hidden", "kl", "lk", "tv"}


@dataclass(frozen=True)
class LossSpec:
    """What is minimised; see `config.ObjectiveConfig` for the fields."""

    loss: str = "ce"  # a term of `config.LOSS_TERMS`, or a weighted sum such as `kl+0.1*hidden`
    depth_decay: float = 0.8  # beta in (0, 1] of `depth_weights=decay`
    depth_weights: str = "decay"  # one of `config.DEPTH_WEIGHTS`
    lk_eta: float = 3.0  # sharpness of lk
    lk_acceptance: str = "row"  # `row` or `batch`: what lk takes for the acceptance
    chunk_rows: int | None = None  # rows of logits held at a time; None: by memory
    # cross-entropy alone visits each row of logits once, all depths in one list; False takes the
    # path of the other terms
    fused_rows: bool = True
    # that visit reads and writes float16 on a GPU, see `kernels.cross_entropy`
    half_logits: bool = False

    def __post_init__(self) -> None:
        if self.depth_weights not in DEPTH_WEIGHTS:
            raise ConfigError(
                f"objective.depth_weights must be one of {list(DEPTH_WEIGHTS)}, "
                f"got {self.depth_weights!r}."
            )
        parse_loss(self.loss)

    @property
    def terms(self) -> dict[str, float]:
        """Weight of each term of `config.LOSS_TERMS`, 0 where it is not asked for."""
        return dict.fromkeys(LOSS_TERMS, 0.0) | parse_loss(self.loss)

    @property
    def needs_teacher(self) -> bool:
        """Some term compares with the target."""
        return any(self.terms[name] for name in _NEEDS_TEACHER)

    @property
    def known(self) -> Mixture:
        """Terms whose mix is known when a row is read."""
        terms = self.terms
        lk = 0.0 if self.mixes_lk_late else terms["lk"]
        return Mixture(terms["ce"], terms["kl"], terms["tv"], lk)

    @property
    def mixes_lk_late(self) -> bool:
        """The mix of lk waits for the mean acceptance of the batch."""
        return self.lk_acceptance == "batch" and self.terms["lk"] > 0

    def mixtures(self) -> list[Mixture]:
        """Gradients to make: the known mix, then bare tv and bare kl, as far as they are needed."""
        found = [self.known] if any(self.known) else []
        if self.mixes_lk_late or self.terms["e2e_tv"]:
            found.append(Mixture(tv=1.0))
        return [*found, Mixture(kl=1.0)] if self.mixes_lk_late else found


def loss_spec(objective: ObjectiveConfig) -> LossSpec:
    """The loss that a configuration asks for."""
    return LossSpec(
        loss=objective.loss,
        depth_decay=objective.depth_decay,
        depth_weights=objective.depth_weights,
        lk_eta=objective.lk_eta,
        lk_acceptance=objective.lk_acceptance,
        half_logits=objective.half_logits,
    )


class AnchorStats(NamedTuple):
    """Statistics of all anchors and depths, each `[k, N]`, 0 where there is no label."""

    nll: Tensor
    kl: Tensor
    tv: Tensor
    is_hit: Tensor


class CombinedLoss(NamedTuple):
    """Loss and factors."""

    loss: Tensor  # scalar
    weights: Tensor  # `[k, N]` w_dt / n_d, 0 where there is no label
    factors: list[Tensor]  # `[k, N]` for each of `LossSpec.mixtures`


def combine_terms(
    stats: AnchorStats, *, labelled: Tensor, num_step_labels: Tensor, spec: LossSpec
) -> CombinedLoss:
    """Loss of a micro-batch but for the term `hidden`.

    `labelled` is `[k, N]` bool, `num_step_labels` `[k + 1]` of `losses.label_counts` for the whole
    optimizer step.
    """
    terms, num_depths = spec.terms, len(labelled)
    weights = depth_weights(
        spec.depth_weights,
        labelled=labelled,
        confidence=torch.exp(-stats.nll),
        is_hit=stats.is_hit > 0,
        decay=spec.depth_decay,
    )
    weights = weights * labelled / num_step_labels[:num_depths, None].clamp(min=1)
    towards_kl = _towards_kl(stats.tv, labelled=labelled, spec=spec)
    lk = towards_kl * stats.kl + (1 - towards_kl) * stats.tv
    known = terms["ce"] * stats.nll + terms["kl"] * stats.kl + terms["tv"] * stats.tv
    loss = (weights * (known + terms["lk"] * lk)).sum()
    factors = [weights] if any(spec.known) else []
    tv_factor = torch.zeros_like(weights)
    if spec.mixes_lk_late:
        tv_factor = tv_factor + terms["lk"] * weights * (1 - towards_kl)
    if terms["e2e_tv"]:
        is_full = labelled.all(dim=0).to(weights.dtype)
        shares = is_full / num_step_labels[num_depths].clamp(min=1)
        acceptance = torch.where(labelled, 1 - stats.tv, 0)
        missed = 1 - expected_length(acceptance) / num_depths
        loss = loss + terms["e2e_tv"] * (shares * missed).sum()
        slope = length_gradient(acceptance) / num_depths
        tv_factor = tv_factor + terms["e2e_tv"] * shares * slope
    if spec.mixes_lk_late or terms["e2e_tv"]:
        factors.append(tv_factor)
    if spec.mixes_lk_late:
        factors.append(terms["lk"] * weights * towards_kl)
    return CombinedLoss(loss, weights, factors)


def depth_weights(
    kind: str, *, labelled: Tensor, confidence: Tensor, is_hit: Tensor, decay: float
) -> Tensor:
    """Weights of all anchors and depths, `[k, N]`.

    `confidence` is the draft probability of the label, `is_hit` says whether it is the argmax; all
    `[k, N]`. `decay` is beta.
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
        # made on the device: a copy of host memory would wait for all that is queued
        steps = torch.arange(num_depths, dtype=torch.float64, device=confidence.device)
        raw = (beta**steps).to(confidence.dtype)
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
    """Depths without a label are passed over: they count as accepted, and add no length."""
    reached = torch.where(labelled, confidence, 1.0).cumprod(dim=0) * labelled
    raw = reached.flip(0).cumsum(dim=0).flip(0) * labelled
    num_anchors = labelled.any(dim=0).sum()
    return raw * (num_anchors / raw.sum().clamp(min=torch.finfo(raw.dtype).tiny))


def _towards_kl(tv: Tensor, *, labelled: Tensor, spec: LossSpec) -> Tensor:
    """Share of kl in lk, `[k, N]` or `[k, 1]`."""
    acceptance = 1 - tv
    if spec.lk_acceptance == "batch":
        num_labels = labelled.sum(dim=1, keepdim=True).clamp(min=1)
        acceptance = (acceptance * labelled).sum(dim=1, keepdim=True) / num_labels
    return torch.exp(-spec.lk_eta * acceptance)
