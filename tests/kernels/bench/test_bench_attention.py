import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mtp_research.kernels.bench import bench_attention as bench
from mtp_research.kernels.bench.bench_attention import paged_attention_ref

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_without_device_says_so_in_one_line_and_exits_4():
    command = [sys.executable, "-m", "mtp_research.kernels.bench", "--quick"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 4
    assert run.stderr == "error: the kernel benchmark needs a CUDA device; none is visible.\n"
    assert run.stdout == ""


def test_bench_shape_counts_keys_values_query_and_output_once():
    shape = bench.AttentionShape(2, 32, 4, num_heads=8, num_kv_heads=2, head_dim=16)
    (inputs,) = bench.make_attention_inputs(shape, num_sets=1, device="cpu")
    moved = [inputs["key_cache"], inputs["value_cache"], inputs["query"], inputs["query"]]
    assert shape.num_bytes() == sum(tensor.nbytes for tensor in moved)


@pytest.mark.parametrize("query_len", [1, 4])
def test_bench_peer_computes_what_the_kernel_computes(query_len):
    shape = bench.AttentionShape(3, 64, query_len, num_heads=8, num_kv_heads=2, head_dim=16)
    for inputs in bench.make_attention_inputs(shape, num_sets=2, device="cpu"):
        wide = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in inputs.items()
        }
        expected = paged_attention_ref(**wide, max_query_len=query_len, scale=0.25)
        torch.testing.assert_close(bench.gather_sdpa(**wide), expected, atol=1e-5, rtol=0)


def test_bench_sets_share_no_page():
    shape = bench.AttentionShape(2, 32, 1)
    sets = bench.make_attention_inputs(shape, num_sets=3, device="cpu")
    pages = torch.cat([inputs["block_table"].flatten() for inputs in sets])
    assert sorted(pages.tolist()) == list(range(2 * 2 * 3))


def test_prompt_chunks_give_the_same_in_both_ways():
    shape = bench.PromptShape(9, 21, num_heads=2, nope_dim=32, value_dim=48)
    prompt = bench.make_prompt(shape, device="cpu")
    absorbed, expanded = (prompt.attend(expands=expands) for expands in (False, True))
    assert absorbed.shape == (9, 2, 48)
    assert absorbed.abs().max() > 0.5
    torch.testing.assert_close(expanded, absorbed, atol=5e-2, rtol=2e-2)


def test_operations_of_a_prompt_chunk_are_those_of_its_products():
    shape = bench.PromptShape(3, 5, num_heads=2, nope_dim=4, value_dim=6)
    expansion = 8 * 512 * 10  # of every key
    pairs = 6 + 7 + 8
    assert shape.num_flops() == 2 * 2 * (expansion + pairs * (4 + 64 + 6))
