"""The product of few rows: its reference, refused calls, and the table of program shapes."""

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.bench import __main__ as bench
from mtp_research.kernels.products import few_rows_choice
from mtp_research.kernels.products.few_rows_choice import choose_config, choose_gated_config
from mtp_research.kernels.products.few_rows_product import (
    FewRowsConfig,
    choose_num_splits,
    few_rows_product,
)
from mtp_research.kernels.products.gemv import GemvConfig, slab_of
from mtp_research.kernels.products.scaled_weights import FP8, check_scale, dequantise

from tests.kernels.few_rows_cases import FP8_CASES, INTERPRETED_CASES, check_few_rows, draw_fp8

BF16 = torch.bfloat16
PLAIN, SPLIT = FewRowsConfig(16, 32, 1, 2), FewRowsConfig(16, 32, 1, 2, 1)
X, WEIGHT = torch.zeros(2, 8), torch.zeros(6, 8)
STORED, SCALE = WEIGHT.to(FP8), torch.ones(6, 1)


@pytest.mark.parametrize("case", INTERPRETED_CASES + FP8_CASES, ids=lambda case: case.name)
def test_reference_matches_float64(case):
    check_few_rows(case, BF16, backend="reference")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: few_rows_product(X[0], WEIGHT, config=PLAIN), r"x must have shape \[T, K\]"),
        (lambda: few_rows_product(X, WEIGHT[:, 1:], config=PLAIN), r"\[N, K\] = \[6, 8\]"),
        (lambda: few_rows_product(X, WEIGHT.double(), config=PLAIN), "weight must have dtype"),
        (lambda: few_rows_product(X, WEIGHT, X[0], config=PLAIN), r"bias .* \[N\] = \[6\]"),
        (lambda: few_rows_product(X.expand(129, 2, 8)[:, 0], WEIGHT, config=PLAIN), "at most 128"),
        (
            lambda: few_rows_product(X, WEIGHT[:5], config=PLAIN, is_gated=True),
            "even number of weight rows",
        ),
        (lambda: few_rows_product(X, WEIGHT, config=SPLIT, is_gated=True), "without splits"),
        (lambda: few_rows_product(X, WEIGHT, config=GemvConfig(4, 128, 1)), "x must have one row"),
        (
            lambda: few_rows_product(X, STORED, scale=SCALE, config=PLAIN, is_gated=True),
            "no scales",
        ),
        (lambda: few_rows_product(X, STORED, config=PLAIN), "weight must have dtype torch.float32"),
        (
            lambda: few_rows_product(X, WEIGHT, scale=SCALE, config=PLAIN),
            "dtype torch.float8_e4m3fn",
        ),
        (
            lambda: few_rows_product(X, STORED, scale=SCALE, scale_block=16, config=PLAIN),
            r"weight_scale must have shape .* = \[1, 1\], got \[6, 1\]",
        ),
        (lambda: check_scale("w", STORED, SCALE, block=24), "a power of two >= 16, got 24"),
    ],
)
def test_wrong_operands_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("num_tiles", "depth", "num_splits"),
    [(64, 4096, 2), (128, 4096, 1), (132, 4096, 1), (33, 64, 2)],
)
def test_splits_bring_one_program_for_every_multiprocessor(num_tiles, depth, num_splits):
    assert choose_num_splits(num_tiles, depth, config=SPLIT) == num_splits


def test_more_tiles_than_counters_are_never_split():
    crowded = PLAIN._replace(programs_per_sm=400)
    assert choose_num_splits(checks.MAX_SHARED_TILES, 4096, config=crowded) == 3
    assert choose_num_splits(checks.MAX_SHARED_TILES + 1, 4096, config=crowded) == 1


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "depth", "is_ours"),
    [
        (1, 6144, 4096, True),
        (4, 151_680, 4096, True),
        (16, 4096, 11_008, True),
        (4, 11_264, 2048, False),  # the library was faster
        (64, 22_016, 4096, False),
        (128, 151_680, 4096, False),
        (4, 6144, 4100, False),  # rows that do not start at 16 bytes
    ],
)
def test_table_names_a_program_shape_only_where_it_was_faster(
    num_rows, num_outputs, depth, is_ours
):
    assert (choose_config(num_rows, num_outputs, depth, dtype=BF16) is not None) == is_ours
    assert choose_config(num_rows, num_outputs, depth, dtype=torch.float32) is None


def test_gated_program_shapes_are_ones_that_the_kernel_takes():
    for num_rows in (1, 16):
        config = choose_gated_config(num_rows, 22_016, 4096, dtype=BF16)
        few_rows_product(X[:num_rows], WEIGHT, config=config, is_gated=True)
    for num_rows in (4, 32):  # the activation by itself was faster
        assert choose_gated_config(num_rows, 22_016, 4096, dtype=BF16) is None


@pytest.mark.parametrize(
    ("weight", "limits"), [((3072, 576), [1]), ((22_016, 4096), [1, 8, 16]), ((256, 576), [])]
)
def test_rows_are_compared_only_where_a_choice_depends_on_them(weight, limits):
    compared = []

    class Rows(int):
        def __le__(self, limit):  # each answer narrows what compiled code holds for
            compared.append(limit)
            return super().__le__(limit)

    assert choose_gated_config(Rows(40), *weight, dtype=BF16) is None
    assert compared == limits


@pytest.mark.parametrize("block", [16, 64, 0])
@pytest.mark.parametrize("shape", [(33, 50), (64, 128), (3, 21, 40)], ids=str)
def test_dequantised_weight_is_each_number_times_its_scale(shape, block):
    stored, scale = draw_fp8(shape, block=block, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, BF16):
        plain = dequantise(stored, scale, block=block, dtype=dtype)
        for place in ((0, 0), (-1, -1), (17, 39), (20, 16)):
            row, column = (number % size for number, size in zip(place, shape[-2:], strict=True))
            at = (row // block, column // block) if block else (row, 0)
            expected = stored[..., row, column].float() * scale[..., at[0], at[1]]
            assert torch.equal(plain[..., row, column], expected.to(dtype))


def test_fp8_weights_have_a_program_shape_for_any_size():
    assert all(few_rows_choice.choose_fp8_config(count, 88) for count in (1, 8, 9, 33, 128))
    assert few_rows_choice.choose_fp8_config(129, 4096) is None
    for depth in (88, 96):  # rows that begin at 8 and at 16 bytes
        found = few_rows_choice.choose_fp8_config(32, depth)
        assert found is not None
        assert found.uses_descriptor == (depth == 96)


@pytest.mark.parametrize(
    ("depth", "scale_block", "columns"),
    [(4096, 0, 4096), (12_288, 0, 4096), (5120, 0, 2048), (1408, 0, 512), (1408, 128, 512)],
)
def test_slabs_of_one_row_leave_at_most_a_quarter_of_their_lanes_idle(depth, scale_block, columns):
    slab = slab_of(depth, config=GemvConfig(4, 4096, 4), scale_block=scale_block)
    assert slab == {"BLOCK_N": 4, "BLOCK_K": columns, "SCALE_BLOCK": scale_block}


def test_slabs_of_one_row_lie_in_one_block_of_scales_and_hold_whole_ones():
    slab = slab_of(72, config=GemvConfig(64, 16, 4), scale_block=32)
    assert slab == {"BLOCK_N": 32, "BLOCK_K": 32, "SCALE_BLOCK": 32}


def test_table_is_for_hopper_alone():
    assert not few_rows_choice.runs_on(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_without_device_says_so_in_one_line_and_exits_4(capsys):
    assert bench.main(["few_rows", "--quick"]) == 4
    message = "error: the kernel benchmark needs a CUDA device; none is visible.\n"
    assert capsys.readouterr().err == message
