"""The reference of latent attention, its checks, and its shapes compiled for sm_90."""

import pytest
import torch
from mtp_research.kernels.bench import bench_attention
from mtp_research.kernels.bench.bench_attention import latent_attention
from mtp_research.kernels.latent.latent_attention import (
    choose_latent_config,
    fits_gluon,
)

from tests.kernels.kernel_cases import LATENT_CASES, latent_keywords, make_inputs, slow_arguments
from tests.kernels.slow import slow_paged_attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", LATENT_CASES, ids=lambda case: case.name)
def test_latent_attention_reference_matches_slow_loop(case, dtype):
    inputs = make_inputs(case, dtype=dtype, values_in_keys=True)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    arguments = latent_keywords(inputs, case)
    out = latent_attention(arguments.pop("query_latent"), **arguments)
    tolerance = 1e-12 if dtype is torch.float64 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("latent_cache", lambda t: t[..., :-1], r"latent_cache must have shape .*L \+ P"),
        ("query_rope", lambda t: t[:, :1], "query_rope must have shape"),
        ("query_rope", lambda t: t.float(), "query_rope must have dtype"),
        ("block_table", lambda t: t.long(), "block_table must have dtype torch.int32"),
    ],
)
def test_latent_attention_wrong_argument_is_named(name, change, message):
    case = LATENT_CASES[0]
    arguments = latent_keywords(make_inputs(case, dtype=torch.float64, values_in_keys=True), case)
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        latent_attention(arguments.pop("query_latent"), **arguments)


def test_latent_attention_traced_by_compile_is_one_opaque_call():
    case = LATENT_CASES[0]
    arguments = latent_keywords(make_inputs(case, dtype=torch.float64, values_in_keys=True), case)
    query_latent = arguments.pop("query_latent")
    compiled = torch.compile(
        lambda query: latent_attention(query * 1, **arguments), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(query_latent), latent_attention(query_latent, **arguments))


@pytest.mark.parametrize(
    ("num_rows", "num_requests", "block_m", "num_warps"),
    [(1, 32, 16, 4), (20, 32, 32, 4), (64, 32, 64, 8), (512, 1, 64, 8), (80, 4, 16, 4)],
)
def test_choose_latent_config_on_hopper_takes_the_gluon_program(
    num_rows, num_requests, block_m, num_warps
):
    config = choose_latent_config(num_rows, element_bytes=2, num_requests=num_requests, hopper=True)
    assert config.gluon
    assert (config.block_m, config.num_warps) == (block_m, num_warps)
    assert not choose_latent_config(num_rows, element_bytes=2).gluon


def test_fits_gluon_refuses_tensors_that_are_not_on_a_gpu():
    (inputs,) = bench_attention.make_latent_inputs(
        bench_attention.LatentShape(1, 64, 1, num_heads=2), num_sets=1, device="cpu"
    )
    operands = tuple(inputs[name] for name in ("query_latent", "query_rope", "latent_cache"))
    assert not fits_gluon(operands, new_rows=None)


def test_bench_counts_what_moves_and_its_peer_computes_the_same():
    shape = bench_attention.LatentShape(2, 128, 3, num_heads=2)
    (inputs,) = bench_attention.make_latent_inputs(shape, num_sets=1, device="cpu")
    moved = ["latent_cache", "query_latent", "query_latent", "query_rope"]  # queries and output
    assert shape.num_bytes() == sum(inputs[name].nbytes for name in moved)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in inputs.items()}
    expected = latent_attention(**wide, max_query_len=3, scale=0.1)
    peer = bench_attention.gather_latent_sdpa(**wide, scale=0.1)
    torch.testing.assert_close(peer, expected, atol=1e-5, rtol=0)
