"""The kernels on a CUDA device: the interpreter's cases in all dtypes, and larger shapes."""

import pytest
import torch
from mtp_research.kernels.attention.store_kv import store_kv
from mtp_research.kernels.bench.bench_attention import (
    paged_attention,
)
from mtp_research.kernels.checks import part_mark

from tests.kernels.kernel_cases import (
    ATTENTION_CASES,
    STORE_CASES,
    AttentionCase,
    call_arguments,
    make_inputs,
    make_store_inputs,
    slow_arguments,
)
from tests.kernels.slow import (
    slow_paged_attention,
    slow_store_kv,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nan_in_new_memory")]

# Largest absolute difference to float64 (slow loop) or float32 (reference) of the same inputs.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}

LARGE_CASES = [
    AttentionCase("decode", (1,) * 8, (1000, 2048, 1, 77, 2000, 512, 513, 1999), 32, 8, 128, 128),
    AttentionCase("verify_page64", (4,) * 3, (1000, 2048, 130), 32, 8, 128, 128, block_size=64),
    AttentionCase("verify_group12", (4,) * 3, (1000, 2048, 130), 96, 8, 128, 128),
    AttentionCase("prefill_mixed", (300, 4, 1, 77), (300, 900, 40, 600), 32, 8, 128, 128),
    AttentionCase("head_dim_64", (8, 8), (700, 64), 16, 4, 64, 64, sliding_window=128),
    AttentionCase("head_dim_256", (4, 4), (700, 64), 16, 2, 256, 256),
    AttentionCase("key_192_value_128", (4, 4), (700, 64), 64, 4, 192, 128, sinks=True),
    AttentionCase("head_dim_80", (4, 4), (700, 64), 32, 32, 80, 80),
]


def _on_gpu(inputs, case, num_splits):
    moved = inputs.to("cuda")
    return paged_attention(
        moved.query, **moved.keywords(), **call_arguments(case), num_splits=num_splits
    ).cpu()


@pytest.mark.parametrize("num_splits", [1, 2], ids="splits{}".format)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_paged_attention_on_gpu_matches_slow_loop(case, dtype, num_splits):
    inputs = make_inputs(case, dtype=dtype)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    out = _on_gpu(inputs, case, num_splits)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCES[dtype], rtol=0)


@pytest.mark.parametrize("num_splits", [1, None], ids="splits{}".format)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: case.name)
def test_paged_attention_on_gpu_large_matches_reference(case, dtype, num_splits):
    inputs = make_inputs(case, dtype=dtype)
    keywords = inputs.keywords()
    for name in ("key_cache", "value_cache"):
        keywords[name] = keywords[name].float()
    expected = paged_attention(
        inputs.query.float(), **keywords, **call_arguments(case), backend="reference"
    )
    out = _on_gpu(inputs, case, num_splits)
    torch.testing.assert_close(out.float(), expected, atol=TOLERANCES[dtype], rtol=0)


def test_paged_attention_reference_accepts_cuda_tensors():
    case = ATTENTION_CASES[2]
    inputs = make_inputs(case, dtype=torch.float64)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    moved = inputs.to("cuda")
    out = paged_attention(
        moved.query, **moved.keywords(), **call_arguments(case), backend="reference"
    )
    torch.testing.assert_close(out.cpu(), expected, atol=1e-12, rtol=0)


def test_paged_attention_page_beyond_int32_offsets_is_read():
    case = AttentionCase("far", (1,), (16,), 8, 8, 128, 128)
    inputs = make_inputs(case, dtype=torch.bfloat16).to("cuda")
    num_blocks = 2**31 // (16 * 8 * 128) + 2  # 2 x 4.3 GB
    source = int(inputs.block_table[0, 0])
    keywords = inputs.keywords()
    for name in ("key_cache", "value_cache"):
        near = keywords[name]
        far = near.new_zeros(num_blocks, *near.shape[1:])
        far[-1] = near[source]
        keywords[name] = far
    keywords["block_table"] = torch.full_like(inputs.block_table, num_blocks - 1)
    out = paged_attention(inputs.query, **keywords, **call_arguments(case))
    expected = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.name)
def test_store_kv_on_gpu_matches_slow_copy(case, dtype):
    rows, pool = make_store_inputs(case, dtype=dtype)
    expected = slow_store_kv(*rows, **pool)
    moved = {name: tensor.cuda() for name, tensor in pool.items()}
    store_kv(*(row.cuda() for row in rows), **moved)
    assert torch.equal(moved["key_cache"].cpu(), expected[0])
    assert torch.equal(moved["value_cache"].cpu(), expected[1])


def test_kernels_on_gpu_never_synchronise_and_replay_with_new_lengths():
    case = AttentionCase("verify", (4, 4), (600, 1000), 32, 8, 128, 128)
    inputs = make_inputs(case, dtype=torch.bfloat16).to("cuda")
    arguments = {**inputs.keywords(), **call_arguments(case)}
    key = torch.randn(8, 8, 128, dtype=torch.bfloat16, device="cuda")
    pool = {name: arguments[name] for name in ("key_cache", "value_cache")}
    slots = torch.full((8,), -1, device="cuda")

    def step():
        store_kv(key, key, **pool, slot_mapping=slots)
        return paged_attention(inputs.query, **arguments)

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arguments["seq_lens"].copy_(torch.tensor([37, 999]))
    graph.replay()
    assert torch.equal(out, step())


def test_kernels_on_gpu_inside_compiled_graph_match_eager():
    case = AttentionCase("verify", (4, 4), (600, 1000), 32, 8, 128, 128)
    inputs = make_inputs(case, dtype=torch.bfloat16).to("cuda")

    @torch.compile(fullgraph=True, dynamic=False)
    def step(query, keywords):
        return paged_attention(query * 2, **keywords, **call_arguments(case)) + 1

    expected = paged_attention(inputs.query * 2, **inputs.keywords(), **call_arguments(case)) + 1
    assert torch.equal(step(inputs.query, inputs.keywords()), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_part_mark_on_gpu_copies_every_value(dtype):
    for shape in ((0, 3), (1,), (32, 4, 1519)):
        values = torch.randint(2, shape, device="cuda").to(dtype)
        assert torch.equal(part_mark(values), values)
