"""Attention that stores the step's rows on a CUDA device: all dtypes, replays of a graph."""

from dataclasses import replace

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_launch import choose_num_at_once
from mtp_research.kernels.attention.store_kv import NewRows, rotate_ref, store_kv
from mtp_research.kernels.bench.bench_attention import (
    attend_pages,
)

from tests.kernels.append_cases import (
    APPEND_CASES,
    BESIDE_PROMPTS,
    ROTATED_CASES,
    SHARED_CASES,
    TOLERANCES,
    check_new_rows,
    check_rotated_rows,
    check_shared_beside_prompts,
    check_shared_splits,
)
from tests.kernels.kernel_cases import AttentionCase, call_arguments, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]

REAL = AttentionCase("real", (4,) * 5, (1000, 2048, 130, 4, 65), 32, 8, 128, 128)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", APPEND_CASES, ids=lambda case: case.name)
def test_attention_on_gpu_that_stores_new_rows_matches_stored_pages(case, dtype):
    check_new_rows(case, dtype, device="cuda", backend="triton")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("case", "num_dims"), ROTATED_CASES, ids=lambda v: getattr(v, "name", v))
def test_attention_on_gpu_that_rotates_new_rows_matches_rotated_pages(case, num_dims, dtype):
    check_rotated_rows(case, num_dims, dtype, device="cuda", backend="triton")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", SHARED_CASES, ids=lambda case: case.name)
def test_attention_on_gpu_whose_requests_share_splits_matches_slow_loop(case, dtype, monkeypatch):
    check_shared_splits(case, dtype, device="cuda", backend="triton", monkeypatch=monkeypatch)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", BESIDE_PROMPTS, ids=lambda case: case.name)
def test_attention_on_gpu_beside_prompts_matches_slow_loop(case, dtype, monkeypatch):
    check_shared_beside_prompts(
        case, dtype, device="cuda", backend="triton", monkeypatch=monkeypatch
    )


@pytest.mark.parametrize(("num_requests", "num_at_once"), [(30, 33), (60, 66)])
def test_shared_splits_on_gpu_give_the_same_bits_in_every_replay(num_requests, num_at_once):
    lens = (1000, 2048, 130, 4, 65, 700) * (num_requests // 6)
    case = replace(REAL, query_lens=(4,) * num_requests, seq_lens=lens)
    inputs = make_inputs(case, dtype=torch.bfloat16).to("cuda")
    keywords = inputs.keywords() | call_arguments(case) | {"backend": "triton"}
    expected = attend_pages(inputs.query, **keywords, num_splits=1)
    sizes = {"max_key_tiles": 34, "num_slots": 2 * 132}
    assert choose_num_at_once(num_requests, 8, **sizes) == num_at_once
    first = attend_pages(inputs.query, **keywords)
    torch.testing.assert_close(first, expected, atol=2e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [attend_pages(inputs.query, **keywords) for _ in range(4)]
    for _ in range(50):
        graph.replay()
        assert all(torch.equal(output, first) for output in outputs)
    assert not checks.arrivals(first.device).any()


@pytest.mark.parametrize("num_dims", [64, 128])
@pytest.mark.parametrize("num_splits", [1, 4], ids="splits{}".format)
def test_attention_on_gpu_that_rotates_has_the_bits_of_a_rotation_in_front(num_splits, num_dims):
    inputs = make_inputs(REAL, dtype=torch.bfloat16).to("cuda")
    keywords = inputs.keywords() | call_arguments(REAL)
    keywords |= {"num_splits": num_splits, "backend": "triton"}
    pos = inputs.seq_lens.long()[:, None] - 4 + torch.arange(4, device="cuda")
    slots = inputs.block_table.gather(1, pos // 16).long() * 16 + pos % 16
    joined = torch.randn(
        20, 48, 128, dtype=torch.bfloat16, device="cuda"
    )  # as one product gives it
    query, *rows = joined.split((32, 8, 8), dim=1)
    angle = torch.randn(20, num_dims, device="cuda")
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    new = NewRows(*rows, slots.flatten())
    results = []
    for rotated in (False, True):
        if rotated:
            query, key = rotate_ref(query, cos, sin), rotate_ref(new.key, cos, sin)
            call = {"new_rows": new._replace(key=key)}
        else:
            call = {"new_rows": new._replace(cos=cos, sin=sin)}
        inputs.key_cache[slots // 16, slots % 16] = torch.nan
        out = attend_pages(query, **keywords, **call)
        results.append((out, inputs.key_cache[slots // 16, slots % 16].clone()))
    (out, pages), (expected, expected_pages) = results
    assert torch.equal(pages, expected_pages)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("num_splits", [1, 4, 33], ids="splits{}".format)
def test_attention_on_gpu_that_stores_rows_gives_the_bits_of_two_launches_in_every_replay(
    num_splits,
):
    inputs = make_inputs(REAL, dtype=torch.bfloat16).to("cuda")
    pools = {"key_cache": inputs.key_cache, "value_cache": inputs.value_cache}
    keywords = inputs.keywords() | call_arguments(REAL)
    keywords |= {"num_splits": num_splits, "backend": "triton"}
    pos = inputs.seq_lens.long()[:, None] - 4 + torch.arange(4, device="cuda")
    slots = inputs.block_table.gather(1, pos // 16).long() * 16 + pos % 16
    rows = [torch.empty(20, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    new = NewRows(rows[0], rows[1], slots.flatten())
    attend_pages(inputs.query, **keywords, new_rows=new)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_pages(inputs.query, **keywords, new_rows=new)
    for _ in range(50):
        for part in rows:
            part.normal_()
        for pool in pools.values():
            pool[slots // 16, slots % 16] = torch.nan
        graph.replay()
        in_one_launch = out.clone()
        store_kv(*rows, **pools, slot_mapping=new.slot_mapping)
        expected = attend_pages(inputs.query, **keywords)
        assert torch.equal(in_one_launch, expected)
