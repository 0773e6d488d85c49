"""The benchmark of FP8 weights: what it quantises, and the program shapes that it tries."""

import pytest
import torch
from mtp_research.kernels.bench import __main__ as bench
from mtp_research.kernels.bench import bench_fp8
from mtp_research.kernels.products.scaled_weights import check_scale, dequantise


@pytest.mark.parametrize("block", bench_fp8.LAYOUTS.values(), ids=bench_fp8.LAYOUTS)
def test_quantised_weights_are_close_to_the_plain_ones(block: int) -> None:
    plain = torch.randn(3, 2 * 150, 200)
    stored = bench_fp8.quantise(plain, block=block, num_parts=2)
    check_scale("weight", stored.weight, stored.scale, block=block, num_parts=2)
    parts = (tensor.unflatten(1, (2, -1)) for tensor in stored)
    found = dequantise(*parts, block=block, dtype=torch.float32).flatten(1, 2)
    torch.testing.assert_close(found, plain, atol=1e-2, rtol=2**-4)  # three bits of mantissa


def test_variants_are_as_deep_as_a_block_at_most() -> None:
    configs = [c for count in bench_fp8.NUM_ROWS for c in bench_fp8._variants(count)]
    products = [p for c in bench_fp8.EXPERT_VARIANTS for p in (c.gate_up, c.down)]
    assert max(config.block_k for config in (*configs, *products)) <= bench_fp8.LAYOUTS["blocks"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_without_device_says_so_and_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fp8", "--variants", "--layouts", "rows"]) == 4
    expected = "error: the kernel benchmark needs a CUDA device; none is visible.\n"
    assert capsys.readouterr().err == expected
