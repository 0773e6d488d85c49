"""Products of each head: against float64 on any device, refusals, and the program for sm_90."""

import pytest
import torch
from mtp_research.kernels.latent import head_product as launch
from mtp_research.kernels.latent.head_product import (
    head_product,
    head_product_blocks,
    head_product_kernel,
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# H, T, K, N, and whether the weight's columns are contiguous: sizes that fit no tile, and others.
CASES = {
    "one_row": (3, 1, 24, 40, False),
    "one_row_by_columns": (2, 1, 72, 33, True),
    "five_rows": (2, 5, 48, 33, True),
    "most_rows": (2, 16, 192, 96, False),
}
REAL_CASES = {
    "key_projection": (20, 1, 192, 512, False),
    "key_projection_4": (20, 4, 192, 512, False),
    "value_projection": (20, 1, 512, 256, True),
    "value_projection_8": (20, 8, 512, 256, True),
    "many_heads": (128, 3, 128, 512, False),
}


def check_head_product(case, dtype, *, backend, device="cpu"):
    """Rows cut from wider ones, as queries are; an empty batch."""
    num_heads, num_rows, depth, num_outputs, by_columns = case
    generator = torch.Generator().manual_seed(depth)
    shape = (num_heads, *((num_outputs, depth) if by_columns else (depth, num_outputs)))
    weight = (torch.randn(shape, generator=generator) / depth**0.5).to(dtype).to(device)
    weight = weight.mT if by_columns else weight
    x = torch.randn(num_rows, num_heads, depth + 8, generator=generator).to(dtype).to(device)
    x = x[..., :depth].transpose(0, 1)
    out = head_product(x, weight, backend=backend)
    assert out.is_contiguous()
    expected = x.double() @ weight.double()
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)
    empty = head_product(x[:, :0], weight, backend=backend)
    assert empty.shape == (num_heads, 0, num_outputs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_product_by_reference_matches_float64(case):
    for backend in ("auto", "reference"):
        check_head_product(case, torch.float32, backend=backend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(2, 6, 7)}, r"weight must have shape \[H, K, N\] = \[2, 5, 7\]"),
        ({"weight": torch.zeros(2, 5, 7).double()}, "weight must have dtype torch.float32"),
        ({"x": torch.zeros(3, 5)}, r"x must have shape \[H, T, K\]"),
    ],
)
def test_wrong_operands_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        head_product(**{"x": torch.zeros(2, 3, 5), "weight": torch.zeros(2, 5, 7)} | change)


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", [*CASES.values(), *REAL_CASES.values()], ids=str)
def test_product_on_gpu_matches_float64(case, dtype):
    check_head_product(case, dtype, backend="triton", device="cuda")


@pytest.mark.gpu
def test_kernel_is_taken_where_it_is_faster(monkeypatch):
    launched = []
    monkeypatch.setattr(
        launch, "head_product_ref", lambda *of: launched.append(of) or torch.bmm(*of)
    )
    weight = torch.zeros(20, 192, 512, device="cuda", dtype=torch.bfloat16)
    for num_rows, times in ((1, 0), (8, 0), (9, 1)):
        head_product(weight.new_zeros(20, num_rows, 192), weight)
        assert len(launched) == times
    head_product(weight.new_zeros(128, 1, 192), weight.new_zeros(128, 192, 512))
    assert len(launched) == 2


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("depth", "contiguous"), [(192, "n"), (512, "k")])
def test_kernel_sm90_asks_for_its_weight_before_it_waits(num_rows, depth, contiguous, tmp_path):
    pytest.importorskip("triton")
    from tests.kernels.test_sm90_compile import _compile, _num_spilled_bytes

    strides = [f"stride_{name}" for name in ("x_head", "x_row", "weight_head")]
    strides += [f"stride_weight_{name}" for name in "kn" if name != contiguous]
    types = dict.fromkeys(head_product_kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "weight", "out"), "*bf16")
    constants = head_product_blocks(num_rows, depth) | {f"stride_weight_{contiguous}": 1}
    compiled = _compile(
        head_product_kernel,
        types=types,
        constants=constants,
        num_warps=launch._NUM_WARPS,
        divisible=("depth", "num_outputs", *strides),
    )
    assert _num_spilled_bytes(compiled, tmp_path) == 0
    early, late = compiled.asm["ptx"].split("griddepcontrol.wait")
    assert early.count("ld.global.v4") == early.count("ld.global") == 16, "16 bytes a load"
    assert "griddepcontrol.launch_dependents" in late
