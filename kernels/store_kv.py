"""Write this step's keys and values into the paged KV pool.

Where it sits: the first thing a layer's attention does in a step; paged_attention then reads pages
only. Row t of `key` and `value` goes to slot `slot_mapping[t] = block_id * block_size + offset`;
slot -1 writes nothing (padded or clamped rows).
Layout: one program copies one row for a run of KV heads, all of Dk and Dv, 16 bytes a thread.
Letters: T packed rows, Hkv KV heads, Dk / Dv head dims.
Source: slot mapping as in vLLM and nano-vllm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from mtp_research.kernels import checks

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernel then
    triton = None

if TYPE_CHECKING:
    from torch import Tensor

# Elements a program holds at a time: 16 a thread with 4 warps, two 16-byte accesses in bf16.
_MAX_TILE_ELEMENTS = 2048


def store_kv_ref(
    key: Tensor,
    value: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Writes rows into cache slots in place, in plain PyTorch, on any device and dtype.

    Args:
        key: `[T, Hkv, Dk]`, the rows of this step.
        value: `[T, Hkv, Dv]`.
        key_cache: `[num_blocks, block_size, Hkv, Dk]`, any strides; written in place.
        value_cache: `[num_blocks, block_size, Hkv, Dv]`, any strides; written in place.
        slot_mapping: `[T]` int64 in `[-1, num_blocks * block_size)`, distinct where >= 0; -1 writes
            nothing.

    Raises:
        IndexError: a slot lies outside the pool (CPU; a device assertion on CUDA).
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    block_ids, offsets = slots // block_size, slots % block_size
    key_cache[block_ids, offsets] = key[kept]
    value_cache[block_ids, offsets] = value[kept]


@checks.kernel_jit
def _store_kv_kernel(
    key,  # [T, Hkv, Dk]
    value,  # [T, Hkv, Dv]
    key_cache,  # [num_blocks, block_size, Hkv, Dk], written
    value_cache,  # [num_blocks, block_size, Hkv, Dv], written
    slot_mapping,  # [T] int64
    num_slots,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_key_cache_block,
    stride_key_cache_slot,
    stride_key_cache_head,
    stride_value_cache_block,
    stride_value_cache_slot,
    stride_value_cache_head,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    # A slot beyond the pool is the caller's fault; writing it would corrupt foreign memory.
    if (slot < 0) | (slot >= num_slots):
        return
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]

    dims = tl.arange(0, PADDED_KEY_DIM)[None, :]
    inside = (heads < NUM_HEADS) & (dims < KEY_DIM)
    source = key + row * stride_key_row + heads * stride_key_head + dims
    target = key_cache + block_id * stride_key_cache_block + offset * stride_key_cache_slot
    target += heads * stride_key_cache_head + dims
    tl.store(target, tl.load(source, mask=inside), mask=inside)

    dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    inside = (heads < NUM_HEADS) & (dims < VALUE_DIM)
    source = value + row * stride_value_row + heads * stride_value_head + dims
    target = value_cache + block_id * stride_value_cache_block + offset * stride_value_cache_slot
    target += heads * stride_value_cache_head + dims
    tl.store(target, tl.load(source, mask=inside), mask=inside)


def store_kv(
    key: Tensor,
    value: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    backend: str = "auto",
) -> None:
    """Writes rows into cache slots; `key_cache` and `value_cache` are changed in place.

    Opaque to torch.compile (custom op `mtp_research::store_kv`). The Triton path never synchronises
    with the device.

    Args:
        key: `[T, Hkv, Dk]`, the rows of this step, dtype of the caches.
        value: `[T, Hkv, Dv]`.
        key_cache: `[num_blocks, block_size, Hkv, Dk]`; a non-contiguous view is fine.
        value_cache: `[num_blocks, block_size, Hkv, Dv]`; a non-contiguous view is fine.
        slot_mapping: `[T]` int64, `block_id * block_size + offset`, distinct where >= 0; -1 writes
            nothing.
        backend: `auto`, `invariant` (copies have no order), `reference` or `triton`.

    Raises:
        ValueError: shapes, dtypes or devices disagree, or the backend cannot run them.
    """
    torch.ops.mtp_research.store_kv(key, value, key_cache, value_cache, slot_mapping, backend)


@torch.library.custom_op("mtp_research::store_kv", mutates_args=("key_cache", "value_cache"))
def _store_kv_op(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    backend: str,
) -> None:
    check_store_kv(key, value, key_cache, value_cache, slot_mapping)
    resolved = checks.resolve_backend(backend, tensor=key, kernel=_store_kv_kernel)
    if key.shape[0] == 0:
        return
    if resolved == "reference":
        store_kv_ref(
            key, value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
        )
    else:
        _launch_store_kv(key, value, key_cache, value_cache, slot_mapping)


@_store_kv_op.register_fake
def _store_kv_fake(key: Tensor, *_: object) -> None:
    return None


def check_store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Refuses arguments of `store_kv` whose shapes, dtypes or devices disagree.

    Raises:
        ValueError: names the tensor and what was expected of it.
    """
    checks.check_rank("key", key, letters="[T, Hkv, Dk]")
    checks.check_paged_cache(key_cache, value_cache, rows=key)
    num_rows, _, key_dim = key.shape
    num_heads = key_cache.shape[2]
    shapes = {"key": (key, key_dim), "value": (value, value_cache.shape[3])}
    for name, (tensor, head_dim) in shapes.items():
        shape = (num_rows, num_heads, head_dim)
        checks.check_shape(name, tensor, shape=shape, letters="[T, Hkv, D]")
    checks.check_dtype("value", value, dtype=key.dtype)
    checks.check_device("value", value, device=key.device)
    checks.check_shape("slot_mapping", slot_mapping, shape=(num_rows,), letters="[T]")
    checks.check_dtype("slot_mapping", slot_mapping, dtype=torch.int64)
    checks.check_device("slot_mapping", slot_mapping, device=key.device)


def _launch_store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    num_rows, num_heads, key_dim = key.shape
    value_dim = value.shape[2]
    num_blocks, block_size = key_cache.shape[:2]
    checks.check_kernel_layout(
        key,
        key_cache=key_cache,
        value_cache=value_cache,
        kernel=_store_kv_kernel,
        max_head_dim=checks.MAX_LATENT_DIM,  # a latent and its rotary key are rows of one head
    )
    checks.check_last_dim_contiguous("value", value)
    constants = store_constants(
        num_heads, key_dim=key_dim, value_dim=value_dim, block_size=block_size
    )
    with checks.launch_device(key):
        _store_kv_kernel[(num_rows, triton.cdiv(num_heads, constants["BLOCK_HEADS"]))](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            num_blocks * block_size,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            **constants,
            num_warps=4,
        )


def store_constants(
    num_heads: int, *, key_dim: int, value_dim: int, block_size: int
) -> dict[str, int]:
    """The compile-time arguments of the store kernel, by parameter name."""
    padded_key_dim = triton.next_power_of_2(key_dim)
    padded_value_dim = triton.next_power_of_2(value_dim)
    heads_that_fit = max(1, _MAX_TILE_ELEMENTS // max(padded_key_dim, padded_value_dim))
    return {
        "NUM_HEADS": num_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_HEADS": min(triton.next_power_of_2(num_heads), heads_that_fit),
        "PADDED_KEY_DIM": padded_key_dim,
        "PADDED_VALUE_DIM": padded_value_dim,
    }
