"""Attention that stores the step's rows itself: cases for reference, interpreter and GPU."""

import torch
from mtp_research.kernels.latent_attention import attend_latents
from mtp_research.kernels.new_rows import NewRows
from mtp_research.kernels.paged_attention import attend_pages
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
APPEND_CASES += LATENT_APPEND_CASES


def check_new_rows(case: AttentionCase, dtype: torch.dtype, *, device: str, backend: str) -> None:
    """Rows that only the call stores are read by it, and are in their pages afterwards.

    The first row of each request is in its page already and not to be written (slot -1).
    """
    is_latent = case in LATENT_APPEND_CASES
    inputs = make_inputs(case, dtype=dtype, values_in_keys=is_latent)
    expected = slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))
    stored = [inputs.key_cache.clone(), inputs.value_cache.clone()]
    new = _new_rows(case, inputs, is_latent=is_latent)
    written = new.slot_mapping[new.slot_mapping >= 0]
    for pool in (inputs.key_cache, inputs.value_cache):
        pool.flatten(0, 1)[written] = torch.nan
    moved = inputs.to(device)
    new = NewRows(*(part.to(device) for part in new))
    output = _attend(case, moved, new, is_latent=is_latent, backend=backend)
    torch.testing.assert_close(output.cpu().double(), expected, atol=TOLERANCES[dtype], rtol=0)
    pools = [moved.key_cache] if is_latent else [moved.key_cache, moved.value_cache]
    for pool, whole in zip(pools, stored, strict=False):
        torch.testing.assert_close(pool.cpu(), whole, equal_nan=True, atol=0, rtol=0)


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
