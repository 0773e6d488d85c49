"""Attention that stores the step's rows itself: cases for reference, interpreter and GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from mtp_research.kernels import checks
from mtp_research.kernels.attention import attention_launch
from mtp_research.kernels.attention.splits import SplitOutputs, split_outputs
from mtp_research.kernels.attention.store_kv import NewRows, rotate_ref
from mtp_research.kernels.bench.bench_attention import (
    attend_latents,
    attend_pages,
)
from torch import Tensor

from tests.kernels.kernel_cases import (
    ATTENTION_CASES,
    LATENT_CASES,
    AttentionCase,
    AttentionInputs,
    call_arguments,
    latent_keywords,
    make_inputs,
    slow_arguments,
)
from tests.kernels.slow import slow_paged_attention

# Largest absolute difference to the slow loop in float64 over the same rounded inputs.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
# `mixed` has more rows than a program stores; `group_12` has two tiles of rows that share some.
_NAMES = ("verify", "mixed", "group_12", "window_in_block", "sinks_window", "empty_requests")
APPEND_CASES = [case.with_splits(2) for case in ATTENTION_CASES if case.name in _NAMES]
LATENT_APPEND_CASES = [LATENT_CASES[1].with_splits(1), LATENT_CASES[2].with_splits(3)]
# Cases by the dims that are rotated, of 16 or 24; `mixed` is rotated and stored before the launch.
ROTATED_CASES = [
    (case.with_splits(splits), dims)
    for case in ATTENTION_CASES
    for name, splits, dims in (
        ("verify", 1, 16),
        ("verify", 3, 8),
        ("mixed", 2, 16),
        ("group_12", 2, 8),
        ("value_narrower", 1, 24),
        ("padded_rows", 2, 4),
        ("sinks_window", 2, 12),
    )
    if case.name == name
]
APPEND_CASES += LATENT_APPEND_CASES
# The sizes of the Gluon program, which runs on a GPU only; three requests are cut in tiles of 16
# rows, six of them in tiles of 16, 32 and 64.
FULL_LATENT_CASES = [
    AttentionCase("latent_full", query_lens, seq_lens, heads, 1, 576, 512, num_splits=splits)
    for query_lens, seq_lens in (
        ((4, 3, 1), (130, 67, 64)),
        ((4, 3, 1, 2, 4, 3), (130, 67, 64, 2, 300, 129)),
    )
    for heads, splits in ((4, 1), (8, 2), (20, 2))
]
LATENT_APPEND_CASES += FULL_LATENT_CASES
# Texts of 10, 1, 5 and 1 tiles of 32 keys, one request without rows, and rows of none.
_UNEVEN = AttentionCase(
    "uneven", (4, 4, 2, 0, 1), (300, 20, 130, 0, 7), num_padded_rows=3, num_splits=None
)
SHARED_CASES = [
    _UNEVEN,
    replace(_UNEVEN, name="uneven_window_sinks", sliding_window=70, sinks=True),
    replace(_UNEVEN, name="uneven_kv_start", kv_start=(17, 0, 130, 0, 3)),
]
# Parts of each request with rows, in tiles of 32 and of 64 keys; one split leaves none. Of 17 and
# 10 tiles in all, with the window 8 and 6, where 6 programs of a head run at once.
SHARED_PARTS = {
    "uneven": ([4, 0, 2, 0], [3, 0, 2, 0]),
    "uneven_window_sinks": ([2, 0, 2, 0], [2, 0, 2, 0]),
}

# Beside a prompt of 40 rows requests of one tile share: of 10, 1, 1 and 3 tiles of 32 keys.
_BESIDE_PROMPT = AttentionCase(
    "beside_prompt",
    (4, 4, 40, 0, 1, 3),
    (300, 20, 130, 0, 7, 90),
    num_padded_rows=3,
    num_splits=None,
)
BESIDE_PROMPTS = [
    _BESIDE_PROMPT,
    replace(_BESIDE_PROMPT, name="beside_prompt_window_sinks", sliding_window=70, sinks=True),
    # Tiles of the prompt see no key at all, and end more than a tile of keys before `kv_start`.
    replace(
        _BESIDE_PROMPT,
        name="beside_prompt_kv_start",
        query_lens=(4, 4, 200, 0, 1, 3),
        seq_lens=(300, 20, 260, 0, 7, 90),
        kv_start=(17, 0, 200, 0, 3, 30),
    ),
    replace(
        _BESIDE_PROMPT,
        name="prompts_alone",
        query_lens=(35, 40, 37, 0, 33, 39),
        seq_lens=(300, 60, 130, 0, 40, 90),
    ),
]
# Parts of each request; of 15 tiles of 32 keys and 9 of 64, where 6 programs run at once.
_BESIDE_PARTS = {
    "beside_prompt": ([4, 0, 0, 0, 0], [3, 0, 0, 0, 0]),
    "prompts_alone": ([0] * 5, [0] * 5),
}


def check_new_rows(case: AttentionCase, dtype: torch.dtype, *, device: str, backend: str) -> None:
    """Rows that only the call stores are read by it, and are in their pages afterwards.

    The first row of each request is in its page already and not to be written (slot -1).
    """
    is_latent = case in LATENT_APPEND_CASES
    inputs = make_inputs(case, dtype=dtype, values_in_keys=is_latent)
    new = _new_rows(case, inputs, is_latent=is_latent)
    _check(case, inputs, inputs.query, new, device=device, backend=backend)


def check_rotated_rows(
    case: AttentionCase, num_dims: int, dtype: torch.dtype, *, device: str, backend: str
) -> None:
    """As `check_new_rows`, of queries and keys that only the call rotates."""
    inputs = make_inputs(case, dtype=dtype)
    new = _new_rows(case, inputs, is_latent=False)
    generator = torch.Generator().manual_seed(1)
    # The halves of cos and of sin differ, as they do nowhere: each dim must take its own.
    cos, sin = torch.randn(2, len(inputs.query), num_dims, generator=generator).to(dtype)
    new = new._replace(cos=cos, sin=sin)
    kept = new.slot_mapping >= 0
    inputs.key_cache.flatten(0, 1)[new.slot_mapping[kept]] = rotate_ref(new.key, cos, sin)[kept]
    unrotated, rotated = inputs.query, rotate_ref(inputs.query, cos, sin)
    _check(case, replace(inputs, query=rotated), unrotated, new, device=device, backend=backend)


def check_shared_splits(
    case: AttentionCase,
    dtype: torch.dtype,
    *,
    device: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As both above, on a device so small that requests share splits by their lengths."""
    written = _on_one_multiprocessor(monkeypatch)
    check_new_rows(case, dtype, device=device, backend=backend)
    check_rotated_rows(case, 8, dtype, device=device, backend=backend)
    assert not checks.arrivals(torch.empty(0, device=device).device).any()
    if case.name in SHARED_PARTS:
        parts = written[-1].lse[:, [0, 4, 8, 10], 0].isfinite().sum(0).tolist()
        assert parts == SHARED_PARTS[case.name][dtype is not torch.float32]


def check_shared_beside_prompts(
    case: AttentionCase,
    dtype: torch.dtype,
    *,
    device: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of one tile share splits beside prompts, on a device so small that they do."""
    written = _on_one_multiprocessor(monkeypatch)
    inputs = make_inputs(case, dtype=dtype)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    inputs = inputs.to(device)
    keywords = inputs.keywords() | call_arguments(case)
    out = attend_pages(inputs.query, **keywords, backend=backend).double().cpu()
    torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=0)
    assert not checks.arrivals(inputs.query.device).any()
    lse = written[-1].lse
    assert len(lse) == 4, "nobody shares"
    if case.name in _BESIDE_PARTS:
        starts = inputs.query_start_loc[:-1].tolist()
        rows = [start for start, count in zip(starts, case.query_lens, strict=True) if count]
        parts = lse[:, rows, 0].isfinite().sum(0).tolist()
        assert parts == _BESIDE_PARTS[case.name][dtype is not torch.float32]


def _on_one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> list[SplitOutputs]:
    """Where parts of launches are written, from now on and on a device of one multiprocessor."""
    written: list[SplitOutputs] = []

    def note_parts(*arguments: Any, **keywords: Any) -> SplitOutputs:
        written.append(split_outputs(*arguments, **keywords))
        return written[-1]

    monkeypatch.setattr(checks, "num_multiprocessors", lambda device: 1)
    monkeypatch.setattr(attention_launch, "split_outputs", note_parts)
    return written


def _check(
    case: AttentionCase,
    inputs: AttentionInputs,
    query: Tensor,
    new: NewRows,
    *,
    device: str,
    backend: str,
) -> None:
    """The call on `query` and `new` gives what the slow loop gives on `inputs`, whose pages hold
    the new rows, and fills pages without them.
    """
    is_latent, dtype = case in LATENT_APPEND_CASES, query.dtype
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    stored = [inputs.key_cache.clone(), inputs.value_cache.clone()]
    written = new.slot_mapping[new.slot_mapping >= 0]
    for pool in (inputs.key_cache, inputs.value_cache):
        pool.flatten(0, 1)[written] = torch.nan
    moved = replace(inputs, query=query).to(device)
    new = NewRows(*(None if part is None else part.to(device) for part in new))
    output = _attend(case, moved, new, is_latent=is_latent, backend=backend)
    torch.testing.assert_close(output.cpu().double(), expected, atol=TOLERANCES[dtype], rtol=0)
    # Half precision is rounded as in the reference; a GPU may fuse products and sums of float32.
    exact = new.cos is None or device == "cpu" or dtype.itemsize < torch.float32.itemsize
    pools = [moved.key_cache] if is_latent else [moved.key_cache, moved.value_cache]
    for pool, whole in zip(pools, stored, strict=False):
        atol = 0.0 if exact else 1e-6
        torch.testing.assert_close(pool.cpu(), whole, equal_nan=True, atol=atol, rtol=0)


def _new_rows(case: AttentionCase, inputs: AttentionInputs, *, is_latent: bool) -> NewRows:
    """The rows that the pages hold; those of slot -1, and padded rows, hold what no page does."""
    slots = torch.full((len(inputs.query),), -1)
    starts = inputs.query_start_loc.tolist()
    size = case.block_size
    for request, length in enumerate(case.seq_lens):
        first_row, end_row = starts[request], starts[request + 1]
        for row in range(first_row + 1, end_row):
            pos = length - end_row + row
            slots[row] = inputs.block_table[request, pos // size] * size + pos % size
    key, value = (
        pool.flatten(0, 1)[slots].masked_fill((slots < 0)[:, None, None], 99.0)
        for pool in (inputs.key_cache, inputs.value_cache)
    )
    if is_latent:
        key, value = key.split((case.value_dim, case.key_dim - case.value_dim), dim=-1)
    return NewRows(key, value, slots)


def _attend(
    case: AttentionCase, inputs: AttentionInputs, new: NewRows, *, is_latent: bool, backend: str
) -> Tensor:
    options = {"num_splits": case.num_splits, "new_rows": new, "backend": backend}
    if is_latent:
        arguments = latent_keywords(inputs, case)
        return attend_latents(arguments.pop("query_latent"), **arguments, **options)
    return attend_pages(inputs.query, **inputs.keywords(), **call_arguments(case), **options)
