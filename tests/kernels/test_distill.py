"""Distillation against plain autograd in float64: the reference path, on any machine."""

import pytest
import torch
from mtp_research.kernels.losses import distill as distill_module
from mtp_research.kernels.losses.distill import distill
from mtp_research.kernels.losses.distill_rows import Mixture, distill_rows

from tests.kernels.distill_cases import ETA, MIXTURES, distill_case, plain_distill


def run(case, mixtures, **options):
    return distill(
        case.rows,
        labels=case.labels,
        valid=case.valid,
        lm_head=case.lm_head,
        teacher=case.teacher,
        mixtures=mixtures,
        eta=ETA,
        **options,
    )


@pytest.mark.parametrize("chunk_rows", [1, 4, 1024])
@pytest.mark.parametrize("name", MIXTURES)
def test_distill_float64_equals_plain_autograd(name, chunk_rows):
    case = distill_case()
    terms, grads = plain_distill(case, MIXTURES[name])
    result = run(case, [MIXTURES[name]], chunk_rows=chunk_rows)
    for got, term in ((result.nll, "ce"), (result.kl, "kl"), (result.tv, "tv")):
        assert (got - terms[term]).abs().max() < 1e-12
    for got, wanted in zip(result.grads[0], grads, strict=True):
        assert wanted.abs().max() > 1e-2
        assert (got - wanted).abs().max() < 1e-10


def test_distill_many_mixtures_equal_one_at_a_time():
    case = distill_case()
    together = run(case, list(MIXTURES.values()))
    for group, mixture in zip(together.grads, MIXTURES.values(), strict=True):
        alone = run(case, [mixture])
        assert all(torch.equal(a, b) for a, b in zip(group, alone.grads[0], strict=True))
        assert torch.equal(together.tv, alone.tv)


def test_distill_near_a_perfect_draft_stays_exact_in_float32():
    case = distill_case(noise=0.01, vocab=997, dtype=torch.float32)
    terms, grads = plain_distill(case, Mixture(kl=1.0))
    assert 1 - terms["tv"][case.valid].mean() > 0.97
    result = run(case, [Mixture(kl=1.0)])
    error = (result.grads[0][0].double() - grads[0]).norm() / grads[0].norm()
    assert error < 1e-4
    assert (result.tv - terms["tv"]).abs().max() < 1e-6


def test_distill_counts_hits():
    case = distill_case()
    result = run(case, [])
    logits = torch.stack([row @ case.lm_head.T for row in case.rows])
    hits = (logits.argmax(-1) == case.labels) & case.valid
    assert torch.equal(result.is_hit, hits)
    assert result.grads == []


def test_distill_projects_the_teacher_once_for_all_depths(monkeypatch):
    case, calls = distill_case(num_rows=10, num_depths=3), []
    plain = distill_module._project

    def counted(rows, *, weight):
        calls.append(len(rows))
        return plain(rows, weight=weight)

    monkeypatch.setattr(distill_module, "_project", counted)
    run(case, [Mixture(kl=1.0)], chunk_rows=4)
    assert calls == [4] * 4 + [4] * 4 + [2] * 4  # a teacher and three depths per chunk


def test_distill_invalid_rows_may_hold_nan():
    case = distill_case()
    case.rows[1][0] = torch.nan
    result = run(case, [MIXTURES["all"]])
    for tensor in (result.nll, result.kl, result.tv, *result.grads[0]):
        assert torch.isfinite(tensor).all()
    assert result.grads[0][1][0].abs().max() == 0


def test_distill_without_rows_is_empty():
    case = distill_case(num_rows=0)
    result = run(case, [MIXTURES["all"]])
    assert result.nll.shape == (2, 0)
    assert [grad.shape for grad in result.grads[0]] == [(0, 16)] * 2


def test_distill_without_teacher_gives_cross_entropy_alone():
    case = distill_case()
    expected = run(case, [Mixture(ce=1.0)])
    arguments = {"labels": case.labels, "valid": case.valid, "lm_head": case.lm_head}
    alone = distill(case.rows, **arguments, mixtures=[Mixture(ce=1.0)])
    assert torch.equal(alone.grads[0][0], expected.grads[0][0])
    assert alone.tv.abs().max() == 0
    with pytest.raises(ValueError, match="need teacher_logits"):
        distill(case.rows, **arguments, mixtures=[Mixture(tv=1.0)])


def test_distill_rows_teacher_with_impossible_tokens_has_finite_divergence():
    case = distill_case(num_depths=1)
    logits, teacher = case.rows[0] @ case.lm_head.T, case.teacher @ case.lm_head.T
    teacher[:, ::2] = -torch.inf
    grad = torch.empty_like(logits)
    result = distill_rows(
        logits,
        lse=logits.logsumexp(-1),
        labels=case.labels,
        valid=case.valid[0],
        mixture=MIXTURES["all"],
        eta=ETA,
        grad=grad,
        teacher_logits=teacher,
        teacher_lse=teacher.logsumexp(-1),
    )
    assert torch.isfinite(result.kl).all()
    assert torch.isfinite(grad).all()
