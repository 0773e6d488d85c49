"""Cross-entropy in one visit and the row gather on a CUDA device."""

import pytest
import torch
from mtp_research.kernels.losses.cross_entropy import cross_entropy

from tests.kernels.cross_entropy_cases import check_gather, check_rows, run_product

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]

DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [53, 16_384, 151_552], ids="V{}".format)
def test_cross_entropy_rows_on_gpu_match_autograd(vocab, dtypes):
    dtype, grad_dtype = dtypes
    options = {"dtype": dtype, "grad_dtype": grad_dtype}
    check_rows(vocab=vocab, **options, backend="triton", device="cuda")


@pytest.mark.parametrize("half_logits", [False, True])
@pytest.mark.parametrize("chunk_rows", [4, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_cross_entropy_on_gpu_matches_autograd(dtype, chunk_rows, half_logits):
    run_product(dtype=dtype, half_logits=half_logits, chunk_rows=chunk_rows, device="cuda")


@pytest.mark.parametrize("hidden", [24, 768, 5000])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_on_gpu_picks_scales_and_casts(hidden, out_dtype):
    for dtype in (torch.float16, torch.bfloat16):
        check_gather(
            hidden=hidden, dtype=dtype, out_dtype=out_dtype, backend="triton", device="cuda"
        )


def test_cross_entropy_on_gpu_never_synchronises():
    rows, lm_head = (torch.randn(n, 64, device="cuda").bfloat16() for n in (512, 4096))
    labels = torch.randint(0, 4096, (512,), device="cuda")
    arguments = {"labels": labels, "valid": labels >= 0, "lm_head": lm_head, "weight": 1.0}
    cross_entropy(rows, **arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        cross_entropy(rows, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
