"""The product of few rows: its reference, refused calls, and the table of program shapes."""

import pytest
import torch
from mtp_research.kernels.bench import __main__ as bench
from mtp_research.kernels.products import few_rows_product as few_rows_choice
from mtp_research.kernels.products.few_rows_product import (
    FewRowsConfig,
    choose_config,
    choose_gated_config,
    choose_num_splits,
    few_rows_product,
)

from tests.kernels.few_rows_cases import INTERPRETED_CASES, check_few_rows

BF16 = torch.bfloat16
PLAIN, SPLIT = FewRowsConfig(16, 32, 1, 2), FewRowsConfig(16, 32, 1, 2, 1)
X, WEIGHT = torch.zeros(2, 8), torch.zeros(6, 8)


@pytest.mark.parametrize("case", INTERPRETED_CASES, ids=lambda case: case.name)
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
    crowded = PLAIN._replace(programs_per_sm=100)
    assert choose_num_splits(4096, 4096, config=crowded) == 3
    assert choose_num_splits(4097, 4096, config=crowded) == 1


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
    for num_rows in (1, 4, 16):
        config = choose_gated_config(num_rows, 22_016, 4096, dtype=BF16)
        few_rows_product(X, WEIGHT, config=config, is_gated=True)
    assert choose_gated_config(32, 22_016, 4096, dtype=BF16) is None


def test_table_is_for_hopper_alone():
    assert not few_rows_choice.runs_on(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_without_device_says_so_in_one_line_and_exits_4(capsys):
    assert bench.main(["few_rows", "--quick"]) == 4
    message = "error: the kernel benchmark needs a CUDA device; none is visible.\n"
    assert capsys.readouterr().err == message
