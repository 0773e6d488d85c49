"""The Triton kernels in Triton's CPU interpreter, against the slow loops.

Not collected by name: test_interpreter.py runs it in a process of its own, because TRITON_INTERPRET
must be set before the kernels are first imported. By hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreter_suite.py
"""

import os

import numpy
import pytest
import torch
import triton.language as tl
from mtp_research.kernels import checks
from mtp_research.kernels.attention import attention_launch
from mtp_research.kernels.attention.attention_rows import AttentionRows
from mtp_research.kernels.attention.paged_attention_triton import tile_of_program
from mtp_research.kernels.attention.store_kv import store_kv
from mtp_research.kernels.bench.bench_attention import (
    latent_attention,
    launch_paged_attention,
    paged_attention,
)
from mtp_research.kernels.checks import part_mark
from mtp_research.kernels.experts import expert_routing
from mtp_research.kernels.latent import latent_attention as latent_attention_launch
from mtp_research.kernels.latent.head_product import head_product

from tests.kernels.append_cases import (
    APPEND_CASES,
    BESIDE_PROMPTS,
    ROTATED_CASES,
    SHARED_CASES,
    check_new_rows,
    check_rotated_rows,
    check_shared_beside_prompts,
    check_shared_splits,
)
from tests.kernels.expert_cases import (
    check_all_on_one_expert,
    check_expert_mlp,
    check_experts_that_are_away,
    check_fp8_experts,
    check_router,
    check_routing,
    check_shared_expert,
    check_unchosen_expert_is_not_read,
)
from tests.kernels.few_rows_cases import (
    FP8_CASES,
    INTERPRETED_CASES,
    check_dequantise,
    check_few_rows,
)
from tests.kernels.invariant_cases import (
    VARIANTS,
    check_attention,
    check_grouped,
    check_matmul,
    check_row_sum,
)
from tests.kernels.kernel_cases import (
    ATTENTION_CASES,
    LATENT_CASES,
    STORE_CASES,
    call_arguments,
    latent_keywords,
    make_inputs,
    make_store_inputs,
    slow_arguments,
)
from tests.kernels.logit_cases import BEST_CASES, MASK_CASES, check_best, check_mask
from tests.kernels.slow import (
    slow_paged_attention,
    slow_store_kv,
)
from tests.kernels.test_expanded_attention import CASES as PROMPT_CASES
from tests.kernels.test_expanded_attention import Case as PromptCase
from tests.kernels.test_head_product import CASES as HEAD_PRODUCTS
from tests.kernels.test_head_product import check_head_product

TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2}

# Two splits leave some of them empty; None is what the launch chooses for 132 multiprocessors.
SPLITS = {"mixed": 2, "kv_start": None, "sinks": 3, "positions": 2, "padded_rows": 2, "group_12": 2}
HALF_PRECISION = {"mixed", "value_wider", "sinks_window"}

ATTENTION_PARAMETERS = [
    *((case, torch.float32) for case in ATTENTION_CASES),
    *(
        (case.with_splits(SPLITS[case.name]), torch.float32)
        for case in ATTENTION_CASES
        if case.name in SPLITS
    ),
    *((case, torch.float16) for case in ATTENTION_CASES if case.name in HALF_PRECISION),
]


pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@pytest.fixture(autouse=True)
def interpreter_is_on() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before pytest starts"


@pytest.mark.parametrize(
    ("case", "dtype"), ATTENTION_PARAMETERS, ids=lambda value: getattr(value, "name", str(value))
)
def test_paged_attention_interpreted_matches_slow_loop(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    out = paged_attention(
        inputs.query,
        **inputs.keywords(),
        **call_arguments(case),
        backend="triton",
        num_splits=case.num_splits,
    )
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in LATENT_CASES),
        *((case.with_splits(3), torch.float32) for case in LATENT_CASES[1:4]),
        (LATENT_CASES[0].with_splits(None), torch.float32),
        (LATENT_CASES[0], torch.float16),
        (LATENT_CASES[2].with_splits(2), torch.float16),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_latent_attention_interpreted_matches_slow_loop(case, dtype):
    inputs = make_inputs(case, dtype=dtype, values_in_keys=True)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    arguments = latent_keywords(inputs, case)
    query_latent = arguments.pop("query_latent")
    out = latent_attention(query_latent, **arguments, backend="triton", num_splits=case.num_splits)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize(
    "case",
    # `verify` is rotated below as well, and `sinks_window` has a window.
    [case for case in APPEND_CASES if not case.name.startswith(("verify", "window_in_block"))],
    ids=lambda case: case.name,
)
def test_attention_that_stores_new_rows_matches_stored_pages(case):
    check_new_rows(case, torch.float32, device="cpu", backend="triton")


@pytest.mark.parametrize(
    ("case", "num_dims", "dtype"),
    [
        *((*case, torch.float32) for case in ROTATED_CASES),
        *((*case, torch.float16) for case in ROTATED_CASES if case[0].name == "verify-splits1"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_attention_that_rotates_new_rows_matches_rotated_pages(case, num_dims, dtype):
    check_rotated_rows(case, num_dims, dtype, device="cpu", backend="triton")


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float16) for case in SHARED_CASES[:2]),
        *((case, torch.float32) for case in SHARED_CASES[::2]),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_attention_whose_requests_share_splits_matches_slow_loop(case, dtype, monkeypatch):
    check_shared_splits(case, dtype, device="cpu", backend="triton", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float16) for case in BESIDE_PROMPTS[::3]),
        *((case, torch.float32) for case in BESIDE_PROMPTS[:3]),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_attention_beside_prompts_shares_splits_and_matches_slow_loop(case, dtype, monkeypatch):
    check_shared_beside_prompts(
        case, dtype, device="cpu", backend="triton", monkeypatch=monkeypatch
    )


@pytest.mark.parametrize("num_launched", [None, 10])
def test_absorbed_rows_interpreted_beside_expanded_prompts_match_the_reference(num_launched):
    case = PromptCase(*PROMPT_CASES["beside_decoding"], dtype=torch.float32, block=16)
    expected = case.attend(None, backend="reference")
    found = case.attend(case.prompts(num_launched=num_launched), backend="triton")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@checks.kernel_jit
def note_tiles(query_start_loc, requests, first_rows, num_requests, RAGGED: tl.constexpr):
    program = tl.program_id(0)
    request, row = tile_of_program(program, query_start_loc, num_requests, 4, 64, RAGGED)
    tl.store(requests + program, request)
    tl.store(first_rows + program, row)


def test_tiles_of_prompts_come_before_those_of_other_requests():
    query_lens = torch.tensor([4, 40, 0, 16, 17])  # four heads a group: 1, 3, 0, 1 and 2 tiles
    starts = torch.tensor([0, *query_lens.cumsum(0)], dtype=torch.int32)
    requests, first_rows = torch.zeros(2, 10, dtype=torch.int32)
    note_tiles[(10,)](starts, requests, first_rows, 5, 8)
    assert requests[:7].tolist() == [1, 1, 1, 4, 4, 0, 3]
    assert first_rows[:7].tolist() == [0, 64, 128, 0, 64, 0, 0]
    assert (first_rows[7:] >= 4 * query_lens[requests[7:]]).all()  # no rows are left


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.name)
def test_store_kv_interpreted_matches_slow_copy(case, dtype):
    rows, pool = make_store_inputs(case, dtype=dtype)
    expected = slow_store_kv(*rows, **pool)
    store_kv(*rows, **pool, backend="triton")
    assert torch.equal(pool["key_cache"], expected[0])
    assert torch.equal(pool["value_cache"], expected[1])


def test_kernels_interpreted_on_strided_cache_match():
    case = ATTENTION_CASES[1]
    inputs = make_inputs(case, dtype=torch.float32)
    keywords = inputs.keywords()
    expected = slow_paged_attention(inputs.query, **keywords, **slow_arguments(case))
    both = torch.stack([inputs.key_cache, inputs.value_cache], dim=2)  # K and V beside each other
    keywords["key_cache"], keywords["value_cache"] = both[:, :, 0], both[:, :, 1]
    out = paged_attention(inputs.query, **keywords, **call_arguments(case), backend="triton")
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


def test_store_kv_interpreted_slot_outside_pool_writes_nothing():
    rows, pool = make_store_inputs(STORE_CASES[0], dtype=torch.float32)
    pool["slot_mapping"][:] = pool["key_cache"].shape[0] * pool["key_cache"].shape[1]
    before = pool["key_cache"].clone()
    store_kv(*rows, **pool, backend="triton")
    assert torch.equal(pool["key_cache"], before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.bfloat16}, "computed wrongly by Triton's interpreter"),
        ({"dtype": torch.float64}, "got torch.float64"),
        ({"block_size": 24}, "set engine.block_size=32"),
        ({"key_dim": 20}, "Dk must be a multiple of 8"),
        ({"value_dim": 520}, "Dv must be a multiple of 8"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_store_kv_unsupported_by_triton_raises(change, message):
    sizes = {"dtype": torch.float32, "block_size": 16, "key_dim": 16, "value_dim": 16, **change}
    key = torch.zeros(1, 1, sizes["key_dim"], dtype=sizes["dtype"])
    value = torch.zeros(1, 1, sizes["value_dim"], dtype=sizes["dtype"])
    pool = (2, sizes["block_size"], 1)
    with pytest.raises(ValueError, match=message):
        store_kv(
            key,
            value,
            key_cache=key.new_zeros(*pool, sizes["key_dim"]),
            value_cache=key.new_zeros(*pool, sizes["value_dim"]),
            slot_mapping=torch.zeros(1, dtype=torch.int64),
            backend="triton",
        )


@pytest.fixture
def products_by_row(monkeypatch):
    """Tiles multiplied alike in every row, which the BLAS behind `numpy.matmul` need not do.

    On some processors its last rows of a tile take another order; on a GPU the tensor cores do not.
    """

    def matmul(left, right, *, dtype):
        return numpy.einsum("...mk,...kn->...mn", left, right, dtype=dtype, optimize=False)

    monkeypatch.setattr(numpy, "matmul", matmul)


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_products_interpreted_have_the_same_bits_in_any_batch(dtype):
    sizes = (1, 2, 7, 15, 16, 17, 31, 32, 33)  # a tile of float32 holds 16 rows
    check_matmul(dtype, backend="triton", sizes=sizes)
    check_grouped(dtype, backend="triton")
    check_row_sum(dtype, backend="triton")


@pytest.mark.usefixtures("products_by_row")
@pytest.mark.parametrize(
    ("variant", "dtype"),
    list(zip(VARIANTS, (torch.float16, torch.float32, torch.float32), strict=True)),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_attention_interpreted_has_the_same_bits_in_any_batch(variant, dtype, monkeypatch):
    tile = 32 if dtype is torch.float32 else 64  # keys
    for module in (attention_launch, latent_attention_launch):
        monkeypatch.setattr(module, "INVARIANT_SPLIT_KEYS", tile)

    def attend(query, *, key_cache, value_cache, sliding_window, sinks, **keywords):
        if not variant.latent:
            return launch_paged_attention(
                query,
                invariant=True,
                key_cache=key_cache,
                value_cache=value_cache,
                sliding_window=sliding_window,
                sinks=sinks,
                **keywords,
            )
        latent, rope = query.split((16, 8), dim=-1)
        scale = keywords.pop("scale")
        rows = AttentionRows(**keywords)
        operands = (latent, rope, key_cache[:, :, 0])
        return latent_attention_launch.launch_latent_attention(
            operands, rows, scale=scale, invariant=True
        )

    check_attention(variant, dtype, attend=attend, num_keys=tile + 12, split_keys=tile)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_expert_mlp_interpreted_equals_its_definition(dtype):
    # Two slabs of columns, the second cut off.
    check_expert_mlp(1, dtype=dtype, backend="triton", hidden_size=136, inner_size=136)
    check_expert_mlp(21, dtype=dtype, backend="triton", num_experts=3, hidden_size=64)
    if dtype is not torch.float32:
        return  # which pairs are multiplied is decided alike
    check_all_on_one_expert(dtype, backend="triton")
    check_unchosen_expert_is_not_read(dtype, backend="triton", device="cpu")
    check_experts_that_are_away(1, dtype=dtype, backend="triton")
    check_experts_that_are_away(3, dtype=dtype, backend="triton")
    check_experts_that_are_away(21, dtype=dtype, backend="triton")


@pytest.mark.parametrize(
    ("block", "dtype"), [(32, torch.float32), (0, torch.float16)], ids=["blocks", "rows"]
)
def test_fp8_experts_interpreted_equal_their_plain_weights(block, dtype):
    sizes = {"num_experts": 3, "hidden_size": 72, "inner_size": 40}  # blocks of 32 are cut off
    check_fp8_experts(21, block=block, dtype=dtype, backend="triton", **sizes)
    if dtype is torch.float16:  # in large tiles the weight is the left operand
        for other in (32, 0):
            check_fp8_experts(40, block=other, dtype=dtype, backend="triton", **sizes)
    sizes = {"num_experts": 3, "hidden_size": 136, "inner_size": 136}  # in two slabs
    check_fp8_experts(1, block=block, dtype=dtype, backend="triton", **sizes)


@pytest.mark.parametrize("most_pairs", [2048, 0], ids=["one_launch", "three_launches"])
def test_routing_interpreted_equals_the_reference(most_pairs, monkeypatch):
    monkeypatch.setattr(expert_routing, "MAX_ONE_LAUNCH_PAIRS", most_pairs)
    monkeypatch.setattr(expert_routing, "_CHUNK", 16)  # 17 chunks and more: two steps of offsets
    generator = torch.Generator().manual_seed(0)
    for num_pairs, num_experts, block_m in ((1, 1, 16), (8, 9, 16), (300, 5, 4), (33, 3, 32)):
        experts = torch.randint(num_experts, (num_pairs,), generator=generator)
        check_routing(experts, num_experts=num_experts, block_m=block_m)
        check_routing(torch.zeros_like(experts), num_experts=num_experts, block_m=block_m)


@pytest.mark.parametrize("block", [None, 0, 16], ids=["plain", "rows", "blocks"])
def test_shared_expert_interpreted_is_one_of_the_stack(block):
    for num_tokens in (1, 9):
        check_shared_expert(num_tokens, dtype=torch.float32, backend="triton", block=block)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_router_interpreted_equals_its_definition(dtype):
    check_router(dtype, backend="triton")
    if dtype is not torch.float32:
        return
    # More tokens than share their slices of H among programs, against one that does.
    check_router(dtype, backend="triton", num_tokens=130, num_experts=17, hidden_size=1040)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_interpreted_plain_numbers_of_fp8_are_the_references(dtype):
    check_dequantise(dtype)


@pytest.mark.parametrize("case", INTERPRETED_CASES + FP8_CASES, ids=lambda case: case.name)
def test_products_of_few_rows_interpreted_match_float64(case):
    check_few_rows(case, torch.float32, backend="triton")
    if case.is_gated or case.scale_block is not None:
        check_few_rows(case, torch.float16, backend="triton")


@pytest.mark.parametrize("shape", [(0, 3), (1,), (2, 3, 1367)], ids=str)
def test_part_mark_copies_every_value(shape):
    values = torch.randn(shape)
    marked = part_mark(values, backend="triton")
    assert torch.equal(marked, values)
    assert not marked.numel() or marked.data_ptr() != values.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", HEAD_PRODUCTS.values(), ids=HEAD_PRODUCTS)
def test_products_of_heads_interpreted_match_float64(case, dtype):
    check_head_product(case, dtype, backend="triton")


def test_product_of_heads_has_a_tile_of_rows():
    x, weight = torch.zeros(2, 17, 16), torch.zeros(2, 16, 16)
    with pytest.raises(ValueError, match=r"x must have at most 16 rows .* got 17"):
        head_product(x, weight, backend="triton")


@pytest.mark.parametrize("dtype", [*TOLERANCES, torch.float64], ids=str)
@pytest.mark.parametrize("case", MASK_CASES, ids=lambda case: case.name)
def test_mask_interpreted_matches_unpacked_bits(case, dtype):
    check_mask(case, dtype, device="cpu", backend="triton")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", BEST_CASES, ids=lambda case: case.name)
def test_best_tokens_interpreted_are_the_first_largest(case, dtype):
    check_best(case, dtype, device="cpu", backend="triton")
