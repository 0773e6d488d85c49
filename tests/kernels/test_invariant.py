"""References of the batch-invariant products: values, bits whatever the batch, refused calls."""

import pytest
import torch
from mtp_research.kernels.bench.bench_attention import (
    latent_attention,
    paged_attention,
)
from mtp_research.kernels.products.invariant_matmul import (
    choose_matmul_config,
    invariant_grouped_matmul,
    invariant_matmul,
    row_sum,
    tile_pairs,
)

from tests.kernels import kernel_cases
from tests.kernels.invariant_cases import (
    VARIANTS,
    check_attention,
    check_grouped,
    check_matmul,
    check_row_sum,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_products_by_reference_have_the_same_bits_in_any_batch(dtype):
    check_matmul(dtype, backend="reference", sizes=(1, 2, 5, 33))
    check_grouped(dtype, backend="reference")
    check_row_sum(dtype, backend="reference")


def attend_invariantly(query, *, key_cache, value_cache, sliding_window, sinks, **keywords):
    """Either attention by its wrapper; the values of latent pages lie inside their keys."""
    if key_cache.data_ptr() != value_cache.data_ptr():
        return paged_attention(
            query,
            key_cache=key_cache,
            value_cache=value_cache,
            sliding_window=sliding_window,
            sinks=sinks,
            backend="invariant",
            **keywords,
        )
    latent, rope = query.split((value_cache.shape[3], query.shape[2] - value_cache.shape[3]), -1)
    return latent_attention(
        latent, query_rope=rope, latent_cache=key_cache[:, :, 0], backend="invariant", **keywords
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_attention_by_reference_has_the_same_bits_in_any_batch(variant, dtype):
    check_attention(variant, dtype, attend=attend_invariantly)


def test_invariant_reference_equals_the_plain_one_up_to_rounding():
    case = kernel_cases.MIXED
    inputs = kernel_cases.make_inputs(case, dtype=torch.float64)
    call = kernel_cases.call_arguments(case)
    plain = paged_attention(inputs.query, **inputs.keywords(), **call)
    alone = paged_attention(inputs.query, **inputs.keywords(), **call, backend="invariant")
    torch.testing.assert_close(alone, plain, atol=1e-12, rtol=0)


def test_tile_pairs_sorts_by_group_and_pads_whole_tiles():
    tiles = tile_pairs(torch.tensor([1, 0, 1]), num_groups=4, block_m=2)
    assert tiles.pair_index.tolist() == [1, -1, 0, 2, -1, -1, -1, -1]
    assert tiles.tile_group.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("seed", range(20))
def test_tile_pairs_places_every_pair_once_in_a_tile_of_its_group(seed):
    generator = torch.Generator().manual_seed(seed)
    num_groups, block_m = 1 + seed % 7, (1, 4, 16)[seed % 3]
    groups = torch.randint(num_groups, (seed * 5,), generator=generator)
    tiles = tile_pairs(groups, num_groups=num_groups, block_m=block_m)
    placed = tiles.pair_index.view(-1, block_m)
    for group, pairs in zip(tiles.tile_group.tolist(), placed.tolist(), strict=True):
        assert all(groups[pair] == group for pair in pairs if pair >= 0)
    assert sorted(pair for pair in placed.flatten().tolist() if pair >= 0) == list(range(seed * 5))


def test_tile_shape_follows_the_weight_alone():
    # Rows, batch and card are no arguments: what is left are the outputs and the element size.
    assert choose_matmul_config(4096, element_bytes=2)[:3] == (64, 32, 128)
    assert choose_matmul_config(150_000, element_bytes=2)[:3] == (64, 128, 64)
    assert choose_matmul_config(150_000, element_bytes=4)[:3] == (16, 32, 32)


X = torch.zeros(2, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: invariant_matmul(X, torch.zeros(3, 9)), r"weight must have shape \[N, K\]"),
        (lambda: invariant_matmul(X, torch.zeros(3, 8).double()), "weight must have dtype"),
        (lambda: invariant_matmul(X, torch.zeros(3, 8), torch.zeros(2)), r"bias .* \[N\] = \[3\]"),
        (lambda: invariant_matmul(X, torch.zeros(3, 8), backend="fast"), "backend must be one of"),
        (
            lambda: invariant_grouped_matmul(X, torch.zeros(4, 3, 8), torch.zeros(3).long()),
            "as many pairs for every row, got 3 for 2 rows",
        ),
        (lambda: row_sum(torch.zeros(3)), r"x must have shape \[M, D\]"),
    ],
)
def test_wrong_operands_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
