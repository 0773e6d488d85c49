"""The distillation kernels in Triton's CPU interpreter, against plain autograd in float64.

Not collected by name: test_interpreter.py runs it, see interpreter_suite.py for why. By hand:

    TRITON_INTERPRET=1 pytest tests/kernels/distill_interpreter_suite.py
"""

import os

import pytest
import torch
from mtp_research.kernels.losses import cross_entropy
from mtp_research.kernels.losses.distill import distill
from mtp_research.kernels.losses.distill_rows import Mixture

from tests.kernels.cross_entropy_cases import check_gather, check_rows, run_product
from tests.kernels.distill_cases import ETA, MIXTURES, distill_case, plain_distill

# Largest difference of a statistic, and of a gradient relative to the largest one: half-precision
# gradients are rounded before the product with lm_head.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.float16: (1e-5, 2e-3)}
# Of the logits and of the gradient over them.
CROSS_ENTROPY_DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float16),
]

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.fixture(autouse=True)
def interpreter_is_on() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before pytest starts"


def check(case, mixtures):
    result = distill(
        case.rows,
        labels=case.labels,
        valid=case.valid,
        lm_head=case.lm_head,
        teacher=case.teacher,
        mixtures=mixtures,
        eta=ETA,
        chunk_rows=4,
        backend="triton",
    )
    statistic, slope = TOLERANCES[case.lm_head.dtype]
    for mixture, group in zip(mixtures, result.grads, strict=True):
        terms, grads = plain_distill(case, mixture)
        for got, term in ((result.nll, "ce"), (result.kl, "kl"), (result.tv, "tv")):
            assert (got - terms[term]).abs().max() < statistic * max(1, terms[term].max())
        for got, wanted in zip(group, grads, strict=True):
            assert (got - wanted).abs().max() < slope * wanted.abs().max()
    logits = torch.stack([row.float() @ case.lm_head.float().T for row in case.rows])
    assert torch.equal(result.is_hit, (logits.argmax(-1) == case.labels) & case.valid)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_distill_interpreted_one_tile_matches_autograd(name, dtype):
    check(distill_case(num_rows=6, dtype=dtype), [MIXTURES[name]])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("vocab", [2048, 4500])
def test_distill_interpreted_many_tiles_match_autograd(vocab, dtype):
    # Gradients of half-precision rows overwrite the first half of the logits they come from.
    case = distill_case(num_rows=3, hidden=4, vocab=vocab, dtype=dtype)
    check(case, [Mixture(ce=0.5, kl=0.5), MIXTURES["all"]])


def test_distill_interpreted_invalid_row_of_nan_counts_nothing():
    case = distill_case(num_rows=3, dtype=torch.float32)
    case.rows[1][0] = torch.nan
    arguments = {"labels": case.labels, "valid": case.valid, "lm_head": case.lm_head}
    result = distill(
        case.rows,
        **arguments,
        teacher=case.teacher,
        mixtures=[MIXTURES["all"]],
        backend="triton",
    )
    for tensor in (result.nll, result.kl, result.tv, *result.grads[0]):
        assert torch.isfinite(tensor).all()
    assert result.grads[0][1][0].abs().max() == 0


def test_distill_interpreted_without_teacher_matches_the_reference():
    case = distill_case(num_rows=3, dtype=torch.float32)
    arguments = {"labels": case.labels, "valid": case.valid, "lm_head": case.lm_head}
    mixtures = [Mixture(ce=1.0)]
    result = distill(case.rows, **arguments, mixtures=mixtures, backend="triton")
    expected = distill(case.rows, **arguments, mixtures=mixtures, backend="reference")
    torch.testing.assert_close(result.grads, expected.grads)
    torch.testing.assert_close(result.nll, expected.nll)


@pytest.mark.parametrize("dtypes", CROSS_ENTROPY_DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [53, 300])
def test_cross_entropy_rows_interpreted_match_autograd(vocab, dtypes, monkeypatch):
    # 300 logits are three tiles here; narrower gradients overwrite the first half of the logits.
    monkeypatch.setattr(cross_entropy, "BLOCK_V", 128)
    dtype, grad_dtype = dtypes
    check_rows(vocab=vocab, dtype=dtype, grad_dtype=grad_dtype, backend="triton")


def test_cross_entropy_interpreted_matches_autograd():
    run_product(dtype=torch.float32, backend="triton")
    run_product(dtype=torch.float16, backend="triton", half_logits=True)


@pytest.mark.parametrize("hidden", [24, 40])
def test_gather_interpreted_picks_scales_and_casts(hidden, monkeypatch):
    monkeypatch.setattr(cross_entropy, "MAX_BLOCK_D", 32)  # 40 are two blocks
    check_gather(hidden=hidden, dtype=torch.float16, out_dtype=torch.float32, backend="triton")
