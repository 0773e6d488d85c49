"""The distillation kernels compile for sm_90 without a GPU: no spills, wide accesses."""

import pytest
from mtp_research.kernels.losses.distill import _summarise_kernel
from mtp_research.kernels.losses.distill_rows import BLOCK_V, NUM_WARPS, _distill_kernel

pytest.importorskip("triton")
from tests.kernels.test_sm90_compile import _compile, _num_spilled_bytes, kinds_first

VARIANTS = {
    "cross_entropy": {"HAS_TEACHER": False, "HAS_TV": False, "WRITES_GRAD": True},
    "divergence": {"HAS_TEACHER": True, "HAS_TV": False, "WRITES_GRAD": True},
    "total_variation": {"HAS_TEACHER": True, "HAS_TV": True, "WRITES_GRAD": True},
    "statistics": {"HAS_TEACHER": True, "HAS_TV": False, "WRITES_GRAD": False},
}


def _compile_rows(kernel, *, types, constants):
    """A vocabulary of a multiple of 16, as all large ones are."""
    options = {"num_warps": NUM_WARPS, "divisible": ("vocab_size",)}
    return _compile(kernel, types=types, constants=constants, **options)


GRADIENTS = {f"{name}-{grad}": (name, grad) for name in VARIANTS for grad in ("*bf16", "*fp32")}
USUAL = {"cross_entropy-*bf16", "divergence-*fp32", "total_variation-*bf16", "statistics-*fp32"}


@pytest.mark.parametrize("case", kinds_first(GRADIENTS, USUAL))
def test_distill_kernel_sm90_has_no_spills(case, tmp_path):
    name, grad = case
    constants = {**VARIANTS[name], "BLOCK_V": BLOCK_V}
    types = dict.fromkeys(("vocab_size", *(f"stride_{x}" for x in ("logits", "teacher", "grad"))))
    types = dict.fromkeys(types, "i32")
    types |= dict.fromkeys(("logits", "teacher_logits", "lse", "teacher_lse", "kl", "tv"), "*fp32")
    types |= {"grad": grad, "labels": "*i64", "valid": "*i1"}
    types |= {f"weight_{term}": "fp32" for term in ("ce", "kl", "tv", "lk")} | {"eta": "fp32"}
    compiled = _compile_rows(_distill_kernel, types=types, constants=constants)
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v4" in compiled.asm["ptx"]


def test_summarise_kernel_sm90_has_no_spills(tmp_path):
    types = {"vocab_size": "i32", "stride_logits": "i32", "labels": "*i64", "argmax": "*i64"}
    types |= dict.fromkeys(("logits", "lse", "label_logit"), "*fp32")
    constants = {"BLOCK_V": BLOCK_V}
    compiled = _compile_rows(_summarise_kernel, types=types, constants=constants)
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    assert "ld.global.v4" in compiled.asm["ptx"]
