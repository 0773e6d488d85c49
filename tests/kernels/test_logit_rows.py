"""Masked logits and best tokens: references, refusals, programs for sm_90, kernels on a GPU."""

import pytest
import torch
from mtp_research.kernels.losses import logit_rows as kernel
from mtp_research.kernels.losses.logit_rows import (
    best_tokens,
    best_tokens_kernel,
    mask_logits,
    mask_logits_kernel,
)

from tests.kernels.logit_cases import (
    BEST_CASES,
    EXACTLY,
    MASK_CASES,
    BestCase,
    MaskCase,
    check_best,
    check_mask,
    slow_mask,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
MIMO_STEP = MaskCase("mimo_step", 32, 4, 4, 151_936)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case.name)
def test_mask_reference_matches_unpacked_bits(case, dtype):
    check_mask(case, dtype, device="cpu", backend="auto")


@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case.name)
def test_mask_is_what_a_compiled_step_is_told(case):
    logits, bitmask = case.make(torch.float32, device="cpu")
    torch.library.opcheck(kernel._mask_logits_op, (logits.nan_to_num(), bitmask, "auto"))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 4, 2), torch.int32, r"bitmask must have shape .* = \[2, 4, 3\], got \[2, 4, 2\]"),
        ((2, 2, 3), torch.int32, r"bitmask must have shape .* = \[2, 3, 3\], got \[2, 2, 3\]"),
        ((1, 4, 3), torch.int32, r"bitmask must have shape .* = \[2, 4, 3\], got \[1, 4, 3\]"),
        ((2, 3), torch.int32, r"bitmask must have shape \[R, J or more, W\], got \[2, 3\]"),
        ((2, 4, 3), torch.int64, "bitmask must have dtype torch.int32, got torch.int64"),
    ],
)
def test_mask_that_does_not_fit_is_refused(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        mask_logits(torch.zeros(2, 3, 70), torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_mask_kernel_sm90_has_no_spills_and_moves_16_bytes(dtype, tmp_path):
    pytest.importorskip("triton")
    from tests.kernels.test_sm90_compile import POINTERS, _compile, _num_spilled_bytes

    types = dict.fromkeys(mask_logits_kernel.arg_names, "i32")
    types |= {"logits": POINTERS[dtype], "out": POINTERS[dtype], "bitmask": "*i32"}
    # A launch makes constants of strides of 1.
    constants = {"stride_logits_token": 1, "stride_mask_word": 1, "WORDS": kernel.MASK_WORDS}
    compiled = _compile(
        mask_logits_kernel,
        types=types | dict.fromkeys(constants, "constexpr"),
        constants=constants,
        num_warps=kernel.MASK_WARPS,
        divisible=("vocab_size",),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*MASK_CASES, MIMO_STEP], ids=lambda case: case.name)
def test_mask_on_gpu_matches_unpacked_bits(case, dtype):
    check_mask(case, dtype, device="cuda", backend="auto")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [MIMO_STEP, MASK_CASES[3]], ids=lambda case: case.name)
def test_mask_on_gpu_in_a_compiled_captured_step_gives_the_argmax_of_the_reference(case):
    logits, bitmask = case.make(torch.bfloat16, device="cuda")
    logits.nan_to_num_(nan=0.0, posinf=1.0)  # an argmax that numbers decide

    @torch.compile(fullgraph=True, dynamic=False)
    def verify(logits, bitmask):
        masked = mask_logits(logits * 2, bitmask)
        return masked, masked.argmax(dim=-1)

    verify(logits, bitmask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        masked, best = verify(logits, bitmask)
    bitmask.bitwise_not_()  # a replay reads the masks of its own step
    graph.replay()
    expected = slow_mask(logits * 2, bitmask)
    torch.testing.assert_close(masked.cpu(), expected, **EXACTLY)
    assert torch.equal(best.cpu(), expected.argmax(dim=-1))


MIMO_BEST = BestCase("mimo_step", (32, 4), 151_680)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", BEST_CASES, ids=lambda case: case.name)
def test_best_tokens_reference_is_the_first_largest(case, dtype):
    check_best(case, dtype, device="cpu", backend="auto")


@pytest.mark.parametrize("case", BEST_CASES, ids=lambda case: case.name)
def test_best_tokens_are_what_a_compiled_step_is_told(case):
    logits = case.make(torch.float32, device="cpu")
    assert logits.is_contiguous() != case.is_strided or not logits.numel()
    torch.library.opcheck(kernel._best_in_parts, (logits.nan_to_num_(), "auto"))


def test_logits_that_float32_does_not_hold_are_refused():
    with pytest.raises(ValueError, match=r"logits dtype must be one of .*, got torch\.float64"):
        best_tokens(torch.zeros(1, 3, dtype=torch.float64))


def test_logits_without_tokens_have_no_best_one():
    with pytest.raises(ValueError, match=r"logits must be \[\.\.\., V\] with V > 0, got no token"):
        best_tokens(torch.zeros(3, 0))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_best_tokens_kernel_sm90_has_no_spills_and_reads_16_bytes(dtype, tmp_path):
    pytest.importorskip("triton")
    from tests.kernels.test_sm90_compile import POINTERS, _compile, _num_spilled_bytes

    types = dict.fromkeys(best_tokens_kernel.arg_names, "i32")
    types |= {"logits": POINTERS[dtype], "values": "*fp32", "indices": "*i32"}
    compiled = _compile(
        best_tokens_kernel,
        types=types | {"TOKENS": "constexpr"},
        constants={"TOKENS": kernel.BEST_TOKENS},
        num_warps=kernel.BEST_WARPS,
        divisible=("vocab_size", "part_size"),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v4" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("case", [*BEST_CASES, MIMO_BEST], ids=lambda case: case.name)
def test_best_tokens_on_gpu_are_the_first_largest(case, dtype):
    check_best(case, dtype, device="cuda", backend="auto")


@pytest.mark.gpu
def test_best_tokens_on_gpu_in_a_compiled_captured_step():
    logits = MIMO_BEST.make(torch.bfloat16, device="cuda").nan_to_num(nan=0.0)

    @torch.compile(fullgraph=True, dynamic=True)
    def verify(logits):
        return best_tokens(logits * 2)

    verify(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        best = verify(logits)
    logits.neg_()
    graph.replay()
    assert torch.equal(best, (logits * 2).argmax(dim=-1))
