import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.paged_attention_triton import attention_kernel
from mtp_research.kernels.attention.splits import merge_splits_kernel
from mtp_research.kernels.latent.latent_attention_triton import latent_attention_kernel


def test_resolve_backend_auto_on_cpu_is_reference():
    resolved = checks.resolve_backend("auto", tensor=torch.zeros(1), kernel=attention_kernel)
    assert resolved == "reference"


def test_resolve_backend_auto_on_cuda_is_triton():
    class CudaTensor:
        is_cuda = True

    assert checks.resolve_backend("auto", tensor=CudaTensor(), kernel=attention_kernel) == "triton"


def test_resolve_backend_without_triton_falls_back_only_when_auto(monkeypatch):
    class CudaTensor:
        is_cuda = True

    monkeypatch.setattr(checks, "triton", None)
    resolved = checks.resolve_backend("auto", tensor=CudaTensor(), kernel=attention_kernel)
    assert resolved == "reference"
    with pytest.raises(ValueError, match="install triton or use backend='reference'"):
        checks.resolve_backend("triton", tensor=CudaTensor(), kernel=attention_kernel)


def test_resolve_backend_unknown_name_lists_choices():
    with pytest.raises(ValueError, match="one of auto, invariant, reference, triton, got 'cuda'"):
        checks.resolve_backend("cuda", tensor=torch.zeros(1), kernel=attention_kernel)


def test_resolve_backend_triton_on_cpu_names_interpreter_switch():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        checks.resolve_backend("triton", tensor=torch.zeros(1), kernel=attention_kernel)


@pytest.mark.parametrize("head_dim", [8, 16, 24, 80, 96, 112, 128, 192, 256])
def test_check_head_dim_supported_passes(head_dim):
    checks.check_head_dim("Dk", head_dim)


@pytest.mark.parametrize("head_dim", [0, 4, 20, 129, 264])
def test_check_head_dim_unsupported_names_dim_and_set(head_dim):
    expected = rf"Dk must be a multiple of 8 in \[8, 256\].* got {head_dim}"
    with pytest.raises(ValueError, match=expected):
        checks.check_head_dim("Dk", head_dim)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_check_block_size_supported_passes(block_size):
    checks.check_block_size(block_size)


@pytest.mark.parametrize(("block_size", "fix"), [(1, 16), (8, 16), (24, 32), (48, 64), (100, 128)])
def test_check_block_size_unsupported_names_next_one(block_size, fix):
    with pytest.raises(ValueError, match=f"got {block_size}; set engine.block_size={fix} "):
        checks.check_block_size(block_size)


def test_check_kernel_dtype_float64_names_supported_set():
    tensor = torch.zeros(1, dtype=torch.float64)
    expected = r"torch.bfloat16, torch.float16, torch.float32 .* got torch.float64"
    with pytest.raises(ValueError, match=expected):
        checks.check_kernel_dtype("query", tensor, kernel=attention_kernel)


def test_check_last_dim_contiguous_transposed_raises():
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        checks.check_last_dim_contiguous("query", torch.zeros(4, 8).T)


@pytest.mark.parametrize("value", [None, 1, 7])
def test_check_optional_range_inside_passes(value):
    checks.check_optional_range("num_splits", value, low=1, high=7)


@pytest.mark.parametrize(("value", "high", "text"), [(0, None, ">= 1"), (8, 7, r"in \[1, 7\]")])
def test_check_optional_range_outside_names_range(value, high, text):
    with pytest.raises(ValueError, match=f"num_splits must be {text} or None, got {value}"):
        checks.check_optional_range("num_splits", value, low=1, high=high)


@pytest.mark.skipif(
    not hasattr(attention_kernel, "params"), reason="Triton is interpreted, or missing"
)
@pytest.mark.parametrize(
    "kernel",
    [attention_kernel, merge_splits_kernel, latent_attention_kernel],
    ids=lambda kernel: kernel.__name__,
)
def test_programs_of_a_step_are_compiled_once_for_all_batch_sizes(kernel):
    counts = [p for p in kernel.params if p.name.startswith(("num_", "max_"))]
    assert len(counts) >= 3
    assert all(param.do_not_specialize for param in counts)
    strides = [param for param in kernel.params if param.name.startswith("stride")]
    assert not any(param.do_not_specialize for param in strides)
