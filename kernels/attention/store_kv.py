"""Write this step's keys and values into the paged KV pool, before attention or by its launch.

Where it sits: the first thing a layer's attention does in a step; paged_attention then reads pages
only. Row t of `key` and `value` goes to slot `slot_mapping[t] = block_id * block_size + offset`;
slot -1 writes nothing (padded or clamped rows).
Layout of `store_kv`: one program copies one row for a run of KV heads, all of Dk and Dv, 16 bytes a
thread.

In compiled decoding the attention launch stores the rows itself (`write_new_rows`), a launch a
layer less. Each attention program writes the rows whose positions lie in its own span of keys to
the pages, and reads pages afterwards: it sees what it wrote, whatever other programs do. Every
row's position is in the span of the tile of rows that holds it, so that every row is written;
programs that share a row write the same values. Prompt chunks, whose tiles would write each row
many times, are stored by `store_kv` beforehand, and so are rows of the other backends.

Queries and new keys may come there before their rotary embedding (`rotate_rows`), again a launch a
layer less. Maths: `y = x cos + swapped(x) sin` on the first P dims, `swapped(x) = (-x[P/2:P],
x[:P/2])`; dims from P on stay. Both products and the sum are rounded to the dtype of the rows, as
in PyTorch, which runs one operation after the other: keys have the bits that passes without a
compiler store. (Tested in half precision; float32 is not promised.)
Letters: R requests, T packed rows, H / Hkv heads, D / Dk / Dv head dims, P rotary dims.
Source: slot mapping as in vLLM and nano-vllm; FlashAttention-2 appends keys of a step this way;
RoFormer (arXiv:2104.09864), in the form with halves instead of pairs (GPT-NeoX).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention.attention_rows import PagedKV

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    triton = tl = None

# Elements a program holds at a time: 16 a thread with 4 warps, two 16-byte accesses in bf16.
_MAX_TILE_ELEMENTS = 2048
# An attention program holds all new rows of its request in registers.
MAX_STORED_ROWS = 16


class KeptRows(NamedTuple):
    """Rows that are stored, and where: what `store_kv_ref` makes of a slot mapping."""

    rows: Tensor | None  # [*] int64 of the packed rows; None where all are stored
    block_ids: Tensor  # [*] int64
    offsets: Tensor  # [*] int64, in the block


def kept_rows(slot_mapping: Tensor, *, block_size: int) -> KeptRows:
    """The rows whose slot is not negative; reads the host on a GPU."""
    kept = slot_mapping >= 0
    rows = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    slots = slot_mapping if rows is None else slot_mapping[rows]
    return KeptRows(rows, slots // block_size, slots % block_size)


def store_kv_ref(
    key: Tensor,
    value: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kept: KeptRows | None = None,
) -> None:
    """Plain PyTorch, any device and dtype; arguments as in `store_kv`, `kept` as `kept_rows` says.

    A slot outside the pool is an IndexError on a CPU and a device assertion on CUDA.
    """
    if kept is None:
        kept = kept_rows(slot_mapping, block_size=key_cache.shape[1])
    if kept.rows is not None:
        key, value = key[kept.rows], value[kept.rows]
    key_cache[kept.block_ids, kept.offsets] = key
    value_cache[kept.block_ids, kept.offsets] = value


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
    store_rows(
        key, value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping,
        backend=backend,
    )  # fmt: skip


def store_rows(
    key: Tensor,
    value: Tensor,
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    backend: str = "auto",
    kept: dict[tuple[object, ...], KeptRows] | None = None,
) -> None:
    """What the op does, for code that runs as it is; arguments as in `store_kv`.

    `kept`, by sizes and dtypes, is filled and read by the reference; the layers of a pass share it,
    and are checked once.
    """
    sizes = (key.shape, value.shape, key_cache.shape, value_cache.shape)
    layout = (*sizes, key.dtype, value.dtype, key_cache.dtype, value_cache.dtype)
    if kept is not None and (known := kept.get(layout)) is not None:
        store_kv_ref(
            key, value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping,
            kept=known,
        )  # fmt: skip
        return
    _check_store_kv(key, value, key_cache, value_cache, slot_mapping)
    resolved = checks.resolve_backend(backend, tensor=key, kernel=_store_kv_kernel)
    if key.shape[0] == 0:
        return
    if resolved == "triton":
        _launch_store_kv(key, value, key_cache, value_cache, slot_mapping)
        return
    known = kept_rows(slot_mapping, block_size=key_cache.shape[1])
    if kept is not None:
        kept[layout] = known
    store_kv_ref(
        key, value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping,
        kept=known,
    )  # fmt: skip


@_store_kv_op.register_fake
def _store_kv_fake(key: Tensor, *_: object) -> None:
    return None


def _check_store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
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


def rotate_ref(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotated `rows` in plain PyTorch, on any device and dtype.

    Args:
        rows: `[T, H, D]`.
        cos: `[T, P]`, dtype of `rows`; P is even and at most D.
        sin: `[T, P]`.
    """
    turned, kept = rows.split((cos.shape[1], rows.shape[2] - cos.shape[1]), dim=-1)
    low, high = turned.chunk(2, dim=-1)
    swapped = torch.cat((-high, low), dim=-1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], kept), dim=-1)


def _check_angles(rows: Tensor, cos: Tensor, sin: Tensor) -> None:
    num_rotary_dims = cos.shape[-1]
    for name, tensor in (("cos", cos), ("sin", sin)):
        shape = (rows.shape[0], num_rotary_dims)
        checks.check_shape(name, tensor, shape=shape, letters="[T, P]")
        checks.check_dtype(name, tensor, dtype=rows.dtype)
        checks.check_device(name, tensor, device=rows.device)
    if num_rotary_dims % 2 or not 0 < num_rotary_dims <= rows.shape[2]:
        raise ValueError(
            f"cos must have an even number of dims in [2, {rows.shape[2]}], got {num_rotary_dims}."
        )


@checks.kernel_jit
def load_rows(
    source,  # pointers [N, 1] to dim 0 of each row
    cos,  # [T, P], or None: the rows are as they should be
    sin,
    row,  # [N, 1] int64, of `cos` and `sin`
    is_row,  # [N, 1] bool
    dims,  # [1, padded D], from 0 on
    stride_cos_row,
    stride_sin_row,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # P
):
    """What `rotate_rows` makes rows of: rows `[N, padded D]`, their partner dims, cos and sin.

    Apart from it, so that a program can ask for all that it needs before it waits for any of it.
    """
    rows = tl.load(source + dims, mask=is_row & (dims < HEAD_DIM), other=0.0)
    swapped, c, s = rows, rows, rows
    if cos is not None:
        is_turned = is_row & (dims < ROTARY_DIM)
        # A second load instead of a shuffle: the partner dim belongs to another thread.
        HALF: tl.constexpr = ROTARY_DIM // 2
        partner = tl.where(dims < HALF, dims + HALF, dims - HALF)
        swapped = tl.load(source + partner, mask=is_turned, other=0.0)
        c = tl.load(cos + row * stride_cos_row + dims, mask=is_turned, other=0.0)
        s = tl.load(sin + row * stride_sin_row + dims, mask=is_turned, other=0.0)
    return rows, swapped, c, s


@checks.kernel_jit
def rotate_rows(loaded, is_row, dims, ROTARY_DIM: tl.constexpr):
    """Rotated rows `[N, padded D]` of what `load_rows` returned; as they are if P is 0."""
    rows, swapped, c, s = loaded
    rotated = rows
    if ROTARY_DIM > 0:
        # Each step is rounded to the dtype of the rows; the interpreter needs float32 in between.
        direct = (rows.to(tl.float32) * c.to(tl.float32)).to(rows.dtype)
        crossed = (swapped.to(tl.float32) * s.to(tl.float32)).to(rows.dtype)
        # A select on either side keeps the compiler from fusing a product with the sum; one by the
        # dims alone may be a constant.
        direct = tl.where(is_row & (dims < ROTARY_DIM), direct, 0.0)
        crossed = tl.where(dims < ROTARY_DIM // 2, -crossed, crossed)
        rotated = (direct.to(tl.float32) + crossed.to(tl.float32)).to(rows.dtype)
        rotated = tl.where(dims < ROTARY_DIM, rotated, rows)
    return rotated


class NewRows(NamedTuple):
    """Rows to store, as in `store_kv`; slots of rows that belong to no request must be -1.

    With `cos` and `sin` keys and queries are rotated first; attention over latents takes none.
    """

    key: Tensor  # [T, Hkv, Dk]
    value: Tensor  # [T, Hkv, Dv]
    slot_mapping: Tensor  # [T] int64; -1 writes nothing
    cos: Tensor | None = None  # [T, P], dtype of the keys
    sin: Tensor | None = None  # [T, P]


class LaunchRows(NamedTuple):
    """What is left of queries and new rows for the attention launch."""

    query: Tensor  # [T, H, Dk]; rotated, unless the launch has rows to store
    new_rows: NewRows | None


def rows_for_launch(
    query: Tensor,
    new_rows: NewRows | None,
    kv: PagedKV,
    *,
    backend: str,
    resolved: str,
    max_query_len: int,
) -> LaunchRows:
    """The rows that the attention launch has to store; others are stored in `kv` here, in place.

    `resolved` is what `checks.resolve_backend` made of `backend`.
    """
    if new_rows is None:
        return LaunchRows(query, None)
    key, value, slot_mapping, cos, sin = new_rows
    if cos is not None and sin is not None:
        _check_angles(key, cos, sin)
    if resolved == "reference" or backend == checks.INVARIANT or max_query_len > MAX_STORED_ROWS:
        if cos is not None and sin is not None:
            query, key = rotate_ref(query, cos, sin), rotate_ref(key, cos, sin)
        store_kv(
            key,
            value,
            key_cache=kv.keys,
            value_cache=kv.values,
            slot_mapping=slot_mapping,
            backend=backend,
        )
        return LaunchRows(query, None)
    _check_store_kv(key, value, *kv, slot_mapping)
    for name, tensor in (("key", key), ("value", value), ("cos", cos), ("sin", sin)):
        if tensor is not None:
            checks.check_last_dim_contiguous(name, tensor)
    return LaunchRows(query, new_rows)


@checks.kernel_jit
def load_new_rows(
    key,  # [T, Hkv, Dk], pointer to the program's KV head
    value,  # [T, Hkv, Dv], likewise
    slot_mapping,  # [T] int64
    cos,  # [T, P]; keys are rotated before they are stored; None if they are as they should be
    sin,  # [T, P] or None
    first_row,
    num_new_rows,
    first_pos,  # position of the request's first new row
    begin,
    end,
    num_slots,
    stride_key_row,
    stride_value_row,
    stride_cos_row,
    stride_sin_row,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # P
    NUM_ROWS: tl.constexpr,
):
    """Part of an attention program: a request's new rows at positions `[begin, end)`.

    Returns what `write_new_rows` takes: whether there are any, slots `[N]`, -1 of rows that are not
    to be stored, what `load_rows` returns of keys, and values `[N, padded Dv]`.
    """
    has_rows = (first_pos + num_new_rows > begin) & (first_pos < end)
    rows = tl.arange(0, NUM_ROWS)
    pos = first_pos + rows
    is_row = (rows < num_new_rows) & (pos >= begin) & (pos < end)
    packed = first_row.to(tl.int64) + rows
    slot = tl.load(slot_mapping + packed, mask=is_row, other=-1)
    # A slot beyond the pool is the caller's fault; writing it would corrupt foreign memory.
    slot = tl.where(slot < num_slots, slot, -1)
    new_key = load_rows(
        key + (packed * stride_key_row)[:, None],
        cos,
        sin,
        packed[:, None],
        is_row[:, None],
        tl.arange(0, PADDED_KEY_DIM)[None, :],
        stride_cos_row,
        stride_sin_row,
        KEY_DIM,
        ROTARY_DIM,
    )
    dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
    source = value + (packed * stride_value_row)[:, None]
    new_value = tl.load(source + dims, mask=is_row[:, None] & (dims < VALUE_DIM))
    return has_rows, slot, new_key, new_value


@checks.kernel_jit
def write_new_rows(
    new,  # of `load_new_rows`
    key_cache,  # [num_blocks, block_size, Hkv, Dk], pointer to the KV head, written
    value_cache,  # [num_blocks, block_size, Hkv, Dv], likewise
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # P
):
    """Part of an attention program: stores new rows, which its threads may read afterwards."""
    has_rows, slot, new_key, new_value = new
    if has_rows:
        is_stored = (slot >= 0)[:, None]
        block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        dims = tl.arange(0, PADDED_KEY_DIM)[None, :]
        at = block_id * stride_key_block + offset * stride_key_slot
        rotated = rotate_rows(new_key, is_stored, dims, ROTARY_DIM)
        tl.store(key_cache + at[:, None] + dims, rotated, mask=is_stored & (dims < KEY_DIM))
        dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
        at = block_id * stride_value_block + offset * stride_value_slot
        tl.store(value_cache + at[:, None] + dims, new_value, mask=is_stored & (dims < VALUE_DIM))
        tl.debug_barrier()  # every thread sees the rows that the others stored
