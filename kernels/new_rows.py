"""This step's keys and values, stored by the attention launch that reads them.

Where it sits: in compiled decoding, in place of a `store_kv` before attention; a launch a layer
less. Each attention program writes the rows whose positions lie in its own span of keys to the
pages, and reads pages afterwards: it sees what it wrote, whatever other programs do. Every row's
position is in the span of the tile of rows that holds it, so that every row is written; programs
that share a row write the same values. Prompt chunks, whose tiles would write each row many times,
are stored by `store_kv` beforehand, and so are rows of the other backends.
Rows may come before their rotary embedding: the programs then rotate keys and queries (`rotary`).
Letters: R requests, T packed rows, H / Hkv heads, Dk / Dv head dims, P rotary dims.
Source: FlashAttention-2 appends keys of a step this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mtp_research.kernels import checks
from mtp_research.kernels.rotary import check_angles, load_rotated, rotate_ref
from mtp_research.kernels.store_kv import check_store_kv, store_kv

try:
    import triton.language as tl
except ImportError:  # checks.resolve_backend refuses the kernels then
    tl = None

if TYPE_CHECKING:
    from torch import Tensor

# A program holds all new rows of its request in registers.
MAX_STORED_ROWS = 16


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
    *,
    key_cache: Tensor,
    value_cache: Tensor,
    backend: str,
    resolved: str,
    max_query_len: int,
) -> LaunchRows:
    """The rows that the attention launch has to store; others are stored here, in place.

    Args:
        query: `[T, H, Dk]`.
        new_rows: None if the pages hold this step's rows.
        key_cache: `[num_blocks, block_size, Hkv, Dk]`, written.
        value_cache: `[num_blocks, block_size, Hkv, Dv]`, written.
        backend: of the attention call.
        resolved: what `checks.resolve_backend` made of it.
        max_query_len: upper bound of rows a request.

    Raises:
        ValueError: shapes, dtypes, devices or layouts disagree.
    """
    if new_rows is None:
        return LaunchRows(query, None)
    key, value, slot_mapping, cos, sin = new_rows
    if cos is not None and sin is not None:
        check_angles(key, cos, sin)
    if resolved == "reference" or backend == checks.INVARIANT or max_query_len > MAX_STORED_ROWS:
        if cos is not None and sin is not None:
            query, key = rotate_ref(query, cos, sin), rotate_ref(key, cos, sin)
        store_kv(
            key,
            value,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slot_mapping,
            backend=backend,
        )
        return LaunchRows(query, None)
    check_store_kv(key, value, key_cache, value_cache, slot_mapping)
    for name, tensor in (("key", key), ("value", value), ("cos", cos), ("sin", sin)):
        if tensor is not None:
            checks.check_last_dim_contiguous(name, tensor)
    return LaunchRows(query, new_rows)


@checks.kernel_jit
def store_new_rows(
    key,  # [T, Hkv, Dk], pointer to the program's KV head
    value,  # [T, Hkv, Dv], likewise
    slot_mapping,  # [T] int64
    first_row,
    key_cache,  # [num_blocks, block_size, Hkv, Dk], pointer to the KV head, written
    value_cache,  # [num_blocks, block_size, Hkv, Dv], likewise
    num_slots,
    num_new_rows,
    first_pos,  # position of the request's first new row
    begin,
    end,
    stride_key_row,
    stride_value_row,
    stride_key_block,
    stride_key_slot,
    stride_value_block,
    stride_value_slot,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_KEY_DIM: tl.constexpr,
    PADDED_VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    cos=None,  # [T, P]; keys are rotated before they are stored
    sin=None,  # [T, P]
    stride_cos_row=0,
    stride_sin_row=0,
    ROTARY_DIM: tl.constexpr = 0,
):
    """Part of an attention program: stores a request's new rows at positions `[begin, end)`.

    The program's threads may read the pages afterwards.
    """
    if (first_pos + num_new_rows > begin) & (first_pos < end):
        rows = tl.arange(0, NUM_ROWS)
        pos = first_pos + rows
        stored = (rows < num_new_rows) & (pos >= begin) & (pos < end)
        packed = first_row.to(tl.int64) + rows
        slot = tl.load(slot_mapping + packed, mask=stored, other=-1)
        stored &= (slot >= 0) & (slot < num_slots)
        block_id, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE

        dims = tl.arange(0, PADDED_KEY_DIM)[None, :]
        inside = (rows < num_new_rows)[:, None] & (dims < KEY_DIM)
        source = key + (packed * stride_key_row)[:, None]
        if cos is None:
            new = tl.load(source + dims, mask=inside)
        else:
            new = load_rotated(
                source,
                cos + (packed * stride_cos_row)[:, None],
                sin + (packed * stride_sin_row)[:, None],
                (rows < num_new_rows)[:, None],
                dims,
                KEY_DIM,
                ROTARY_DIM,
            )
        at = block_id * stride_key_block + offset * stride_key_slot
        tl.store(key_cache + at[:, None] + dims, new, mask=stored[:, None] & inside)

        dims = tl.arange(0, PADDED_VALUE_DIM)[None, :]
        inside = (rows < num_new_rows)[:, None] & (dims < VALUE_DIM)
        new = tl.load(value + (packed * stride_value_row)[:, None] + dims, mask=inside)
        at = block_id * stride_value_block + offset * stride_value_slot
        tl.store(value_cache + at[:, None] + dims, new, mask=stored[:, None] & inside)
        tl.debug_barrier()  # every thread sees the rows that the others stored
