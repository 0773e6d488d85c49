"""Other libraries' attention over pages, timed in the same run where they can be imported.

Where it sits: `bench_attention` times the rows of these too. Nothing here is required: a
library that is not installed is named once, one that refuses a shape gives its reason as the row.
Letters: B requests, M pages a request.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import torch
from mtp_research.kernels.bench.bench_runner import time_calls
from torch import Tensor

MODULES = {"flashinfer": "flashinfer", "vllm": "vllm.vllm_flash_attn"}
_WORKSPACE_BYTES = 128 * 2**20
_NUM_SETS = 8  # a plan has buffers of its own
_REFUSALS = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)

Call = Callable[[], Tensor]


def import_peers() -> dict[str, ModuleType]:
    """The libraries that are here; the others are named."""
    found = {}
    for name, module in MODULES.items():
        try:
            found[name] = importlib.import_module(module)
        except (ImportError, OSError, RuntimeError):
            print(f"{name}: not importable", flush=True)
    return found


def time_peers(
    peers: dict[str, ModuleType],
    sets: list[dict[str, Tensor]],
    expected: Tensor,
    *,
    scale: float,
    max_query_len: int,
) -> dict[str, float | str]:
    """Microseconds of each library over the same inputs, or why there are none.

    Args:
        peers: what `import_peers` found.
        sets: arguments of `paged_attention` or `latent_attention`, of equal lengths.
        expected: output of the first set.
        scale: of the softmax.
        max_query_len: rows of each request.
    """
    makers = {"flashinfer": flashinfer_call, "vllm": vllm_call}
    if "latent_cache" in sets[0]:
        makers = {"flashinfer": flashinfer_latent_call}
    found: dict[str, float | str] = {}
    for name, module in peers.items():
        if name not in makers:
            continue
        make = functools.partial(makers[name], module, scale=scale)
        try:
            calls = [make(inputs, max_query_len=max_query_len) for inputs in sets[:_NUM_SETS]]
            torch.testing.assert_close(calls[0](), expected, atol=2e-2, rtol=2e-2)
            found[name] = time_calls(calls).median_us
        except _REFUSALS as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        print(f"    {name} us: {found[name]}", flush=True)
    return found


def flashinfer_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Call:
    """FlashInfer's prefill over pages, planned outside the timing."""
    _, num_heads, head_dim = inputs["query"].shape
    cache = inputs["key_cache"]
    page_size, num_kv_heads = cache.shape[1:3]
    starts, pages, last = _pages(inputs, page_size)
    wrapper = module.BatchPrefillWithPagedKVCacheWrapper(_workspace(cache), "NHD")
    wrapper.plan(
        inputs["query_start_loc"],
        starts,
        pages,
        last,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=inputs["query"].dtype,
        kv_data_type=cache.dtype,
    )
    return functools.partial(wrapper.run, inputs["query"], (cache, inputs["value_cache"]))


def flashinfer_latent_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Call:
    """FlashInfer's attention over latents, planned outside the timing."""
    latent, rope = inputs["query_latent"], inputs["query_rope"]
    cache = inputs["latent_cache"]
    parts = cache.split((latent.shape[2], rope.shape[2]), dim=-1)
    starts, pages, _ = _pages(inputs, cache.shape[1])
    wrapper = module.mla.BatchMLAPagedAttentionWrapper(_workspace(cache))
    wrapper.plan(
        inputs["query_start_loc"],
        starts,
        pages,
        inputs["seq_lens"],
        latent.shape[1],
        latent.shape[2],
        rope.shape[2],
        cache.shape[1],
        True,  # causal
        scale,
        latent.dtype,
        cache.dtype,
    )
    return functools.partial(wrapper.run, latent, rope, *parts)


def vllm_call(
    module: ModuleType, inputs: dict[str, Tensor], *, scale: float, max_query_len: int
) -> Call:
    """The FlashAttention of vLLM, over block tables like ours."""
    table = inputs["block_table"]
    return functools.partial(
        module.flash_attn_varlen_func,
        q=inputs["query"],
        k=inputs["key_cache"],
        v=inputs["value_cache"],
        max_seqlen_q=max_query_len,
        cu_seqlens_q=inputs["query_start_loc"],
        max_seqlen_k=table.shape[1] * inputs["key_cache"].shape[1],
        seqused_k=inputs["seq_lens"],
        softmax_scale=scale,
        causal=True,
        block_table=table,
    )


def _pages(inputs: dict[str, Tensor], page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """First page of each request `[B + 1]`, pages `[B * M]`, tokens in the last page `[B]`."""
    table, seq_lens = inputs["block_table"], inputs["seq_lens"]
    num_pages = table.shape[1]
    starts = torch.arange(0, table.numel() + 1, num_pages, device=table.device, dtype=torch.int32)
    return starts, table.flatten(), seq_lens - (num_pages - 1) * page_size


def _workspace(like: Tensor) -> Tensor:
    return torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)
