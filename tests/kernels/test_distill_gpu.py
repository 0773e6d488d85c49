"""The distillation kernels on a CUDA device: every mixture and dtype, a large vocabulary."""

import pytest
import torch
from mtp_research.kernels.bench.bench_losses import make_inputs, reference, run_distill, run_liger
from mtp_research.kernels.losses.distill import distill

from tests.kernels.distill_cases import ETA, MIXTURES, DistillCase, distill_case, plain_distill

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]

# Largest error of a gradient, relative to the largest one; the products round to the dtype.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("vocab", [53, 2048, 151_552], ids="V{}".format)
@pytest.mark.parametrize("name", MIXTURES)
def test_distill_on_gpu_matches_autograd(name, vocab, dtype):
    case = distill_case(num_rows=9, hidden=32, vocab=vocab, dtype=dtype)
    moved = DistillCase([row.cuda() for row in case.rows], *(x.cuda() for x in case[1:]))
    result = distill(
        moved.rows,
        labels=moved.labels,
        valid=moved.valid,
        lm_head=moved.lm_head,
        teacher=moved.teacher,
        mixtures=[MIXTURES[name]],
        eta=ETA,
        chunk_rows=4,
    )
    terms, grads = plain_distill(case, MIXTURES[name])
    for got, term in ((result.nll, "ce"), (result.kl, "kl"), (result.tv, "tv")):
        torch.testing.assert_close(got.cpu().double(), terms[term], atol=1e-4, rtol=1e-4)
    for got, wanted in zip(result.grads[0], grads, strict=True):
        error = (got.cpu().double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCES[dtype]


def test_distill_on_gpu_agrees_with_liger_and_float64():
    pytest.importorskip("liger_kernel")
    inputs = make_inputs(rows=512, hidden=256, vocab=32_000, num_depths=2, alpha=0.98, seed=0)
    expected = reference(inputs, loss="kl")
    ours, theirs = (run(inputs, loss="kl", chunk_rows=0) for run in (run_distill, run_liger))
    torch.testing.assert_close(ours.losses.double(), expected.losses, rtol=1e-3, atol=0)
    torch.testing.assert_close(ours.losses, theirs.losses.float(), rtol=2e-2, atol=0)


def test_distill_on_gpu_memory_does_not_grow_with_depths():
    peaks = []
    for num_depths in (1, 4):
        case = distill_case(num_rows=4096, num_depths=num_depths, hidden=64, vocab=50_000)
        rows = [row.cuda().bfloat16() for row in case.rows]
        head, teacher = case.lm_head.cuda().bfloat16(), case.teacher.cuda().bfloat16()
        labels, valid = case.labels.cuda(), case.valid.cuda()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = distill(
            rows,
            labels=labels,
            valid=valid,
            lm_head=head,
            teacher=teacher,
            mixtures=[MIXTURES["kl"]],
            chunk_rows=512,
        )
        gradients = sum(grad.nbytes for grad in result.grads[0])
        peaks.append(torch.cuda.max_memory_allocated() - before - gradients)
    assert peaks[0] < 2.2 * 512 * 50_000 * 4
    assert peaks[1] < peaks[0] * 1.02


def test_distill_on_gpu_never_synchronises():
    case = distill_case(num_rows=64, hidden=32, vocab=5000, dtype=torch.bfloat16)
    moved = DistillCase([row.cuda() for row in case.rows], *(x.cuda() for x in case[1:]))
    arguments = {"labels": moved.labels, "valid": moved.valid, "lm_head": moved.lm_head}
    arguments |= {"teacher": moved.teacher, "mixtures": [MIXTURES["all"]]}
    distill(moved.rows, **arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        distill(moved.rows, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
