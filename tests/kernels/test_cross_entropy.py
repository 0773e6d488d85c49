"""Cross-entropy in one visit and the row gather: references, refusals, sm_90."""

import re

import pytest
import torch
from mtp_research.kernels.losses import cross_entropy as module
from mtp_research.kernels.losses.cross_entropy import (
    BLOCK_V,
    NUM_WARPS,
    ROWS_PER_PROGRAM,
    _cross_entropy_kernel,
    _gather_kernel,
    cross_entropy,
    cross_entropy_rows,
    gather_rows,
    wave_rows,
)

from tests.kernels.cross_entropy_cases import check_gather, check_rows, run_product


@pytest.mark.parametrize("chunk_rows", [1, 4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_reference_matches_autograd(dtype, chunk_rows):
    run_product(dtype=dtype, chunk_rows=chunk_rows)


def test_cross_entropy_reference_rows_match_autograd():
    check_rows(vocab=53, dtype=torch.float32, grad_dtype=torch.float32, backend="reference")
    check_rows(vocab=53, dtype=torch.float16, grad_dtype=torch.float16, backend="reference")


def test_gather_reference_picks_scales_and_casts():
    check_gather(hidden=24, dtype=torch.float32, out_dtype=torch.bfloat16, backend="reference")


def test_cross_entropy_without_rows_is_empty():
    rows, lm_head = torch.zeros(0, 16), torch.randn(53, 16)
    labels, valid = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool)
    result = cross_entropy(rows, labels=labels, valid=valid, lm_head=lm_head, weight=1.0)
    assert result.nll.shape == (0,)
    assert result.grads is not None
    assert result.grads.shape == (0, 16)


def test_float16_logits_are_closer_to_the_exact_gradient_than_bfloat16_gradients():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 32, generator=generator).bfloat16()
    lm_head = (0.5 * torch.randn(999, 32, generator=generator)).bfloat16()
    logits = rows.double() @ lm_head.double().T
    labels = logits.argmax(-1)  # a predictable text: what is left of the gradient is small
    labels[::4] = 7
    valid = torch.ones(64, dtype=torch.bool)
    arguments = {"labels": labels, "valid": valid, "weight": 1.0}
    exact = cross_entropy(rows.double(), lm_head=lm_head.double(), **arguments).grads
    wide = cross_entropy(rows, lm_head=lm_head, **arguments).grads
    half = cross_entropy(rows.half(), lm_head=lm_head, half_logits=True, **arguments).grads
    assert exact is not None
    errors = [float((x.double() - exact).norm() / exact.norm()) for x in (wide, half)]
    assert 1e-4 < errors[1] < errors[0] < 5e-3, errors


def test_chunks_fill_whole_waves(monkeypatch):
    monkeypatch.setattr(module.checks, "num_multiprocessors", lambda device: 132)

    class OnGPU(torch.Tensor):
        is_cuda = True

    def rows_of(vocab: int, hidden: int, size: int) -> int:
        weight = torch.empty(vocab, hidden, device="meta").as_subclass(OnGPU)
        return wave_rows(weight, bytes_per_logit=size)

    assert rows_of(16384, 768, 4) == 128 * 132 // 3 == 5632
    assert rows_of(16384, 768, 2) == 3 * 5632
    assert rows_of(151_552, 4096, 4) == 1024
    assert rows_of(10**6, 4096, 4) == 128  # less than a wave fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "labels must have shape"),
        ({"nll": torch.zeros(3)}, "nll must have shape"),
        ({"backend": "triton"}, "needs CUDA tensors"),
    ],
)
def test_cross_entropy_rows_refuse_what_they_cannot_run(change, message):
    arguments = {
        "labels": torch.zeros(2, dtype=torch.int64),
        "valid": torch.ones(2, dtype=torch.bool),
        "nll": torch.zeros(2),
        "is_hit": torch.zeros(2, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        cross_entropy_rows(torch.zeros(2, 5), **(arguments | change))


def test_gather_refuses_a_wrong_shape():
    with pytest.raises(ValueError, match="out must have shape"):
        gather_rows(torch.zeros(3, 4), index=torch.zeros(2, dtype=int), out=torch.zeros(2, 5))


TYPES = {"nll": "*fp32", "is_hit": "*i1", "labels": "*i64", "valid": "*i1", "weight": "fp32"}
SIZES = ("vocab_size", "stride_logits", "stride_grad")


@pytest.mark.parametrize(
    ("logits", "grad", "writes"),
    [("*fp32", "*bf16", True), ("*fp16", "*fp16", True), ("*bf16", "*bf16", False)],
)
def test_cross_entropy_kernel_sm90_has_no_spills(logits, grad, writes, tmp_path):
    sm90 = pytest.importorskip("tests.kernels.test_sm90_compile")
    compiled = sm90._compile(
        _cross_entropy_kernel,
        types={"logits": logits, "grad": grad, **TYPES, **dict.fromkeys(SIZES, "i32")},
        constants={"WRITES_GRAD": writes, "BLOCK_V": BLOCK_V},
        num_warps=NUM_WARPS,
        divisible=SIZES,
    )
    assert sm90._num_spilled_bytes(compiled, tmp_path) == 0
    assert re.search(r"ld\.global[\w.:]*\.v4", compiled.asm["ptx"])  # sixteen bytes a thread


def test_gather_kernel_sm90_has_no_spills(tmp_path):
    sm90 = pytest.importorskip("tests.kernels.test_sm90_compile")
    types = {"values": "*fp16", "index": "*i64", "scale": "*fp32", "out": "*bf16"}
    sizes = ("num_rows", "hidden_size", "stride_values")
    compiled = sm90._compile(
        _gather_kernel,
        types=types | dict.fromkeys(sizes, "i32"),
        constants={"HAS_SCALE": True, "ROWS": ROWS_PER_PROGRAM, "BLOCK_D": 1024},
        num_warps=4,
        divisible=sizes[1:],
    )
    assert sm90._num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v4" in compiled.asm["ptx"]
