"""Prompt rows whose latents are expanded against the same rows absorbed; when expanding pays."""

import pytest
import torch
from mtp_research.kernels.attention.attention_rows import AttentionRows
from mtp_research.kernels.attention.store_kv import NewRows
from mtp_research.kernels.latent import expanded_attention
from mtp_research.kernels.latent.expanded_attention import (
    LatentDims,
    Prompts,
    Span,
    attend_latent_rows,
    expanded_rows,
    pays_expanded,
)
from torch import Tensor

from tests.kernels.slow import slow_paged_attention

GLM_FLASH, DEEPSEEK = LatentDims(512, 64, 192, 256), LatentDims(512, 64, 128, 128)
DIMS, BLOCK = LatentDims(latent=24, rope=8, nope=12, value=16), 4
# Rows that decode, then prompts: (tokens of context, rows) of each request.
CASES = {
    "one": ([], [(0, 5)]),
    "several": ([], [(0, 5), (0, 1), (0, 9)]),
    "chunk_behind_context": ([], [(7, 6)]),
    "beside_decoding": ([(9, 3), (0, 1), (16, 3)], [(0, 6), (11, 5)]),
    "with_padding_requests": ([(5, 2)], [(3, 4), (0, 0), (0, 7), (0, 0)]),
}


class Case:
    """Inputs of a pass; pages hold NaN where nobody has written."""

    def __init__(self, others, prompts, *, dtype, device="cpu", dims=DIMS, heads=3, block=BLOCK):
        spans = [Span(*span) for span in (*others, *prompts)]
        draw = torch.Generator().manual_seed(3)
        counts = [span.num_rows for span in spans]
        total, width = sum(counts), dims.latent + dims.rope
        num_blocks = max(-(-max(span.num_keys for span in spans) // block), 1)
        count = len(spans) * num_blocks
        tables = torch.randperm(count, generator=draw).int().view(len(spans), -1)

        def rand(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype).to(device)

        self.query = rand(heads, total, dims.nope + dims.rope)
        self.weight = rand(heads, dims.nope + dims.value, dims.latent) / dims.latent**0.5
        self.cache = torch.full((count, block, width), torch.nan, dtype=dtype, device=device)
        slots = []
        for span, table in zip(spans, tables, strict=True):
            at = torch.arange(span.num_keys)
            slot = table.long()[at // block] * block + at % block
            self.cache.view(-1, width)[slot[: span.first]] = rand(span.first, width)
            slots.append(slot[span.first :])
        new, self.scale = rand(total, 1, width), (dims.nope + dims.rope) ** -0.5
        latent, rope = new.split((dims.latent, dims.rope), dim=-1)
        self.new_rows = NewRows(latent, rope, torch.cat(slots).to(device))
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        lens = torch.tensor([span.num_keys for span in spans], dtype=torch.int32)
        arrays = (tensor.to(device) for tensor in (tables, lens, starts))
        self.rows = AttentionRows(*arrays, max(counts))
        self.others, self.spans, self.block = others, spans[len(others) :], block

    def prompts(self, *, num_launched: int | None = None) -> Prompts:
        counts = [count for _, count in self.others]
        launched = sum(counts) if num_launched is None else num_launched
        return Prompts(tuple(self.spans), sum(counts), max(counts, default=1), launched)

    def attend(self, prompts: Prompts | None, backend: str = "auto") -> Tensor:
        plan = None
        if prompts is not None:
            plan = expanded_rows(self.rows, prompts, block_size=self.block)
        return attend_latent_rows(
            self.query,
            self.weight,
            self.cache.clone(),
            self.rows,
            scale=self.scale,
            new_rows=self.new_rows,
            backend=backend,
            expanded=plan,
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", CASES)
def test_expanded_prompts_equal_absorbed_ones(name, dtype, tolerance) -> None:
    case = Case(*CASES[name], dtype=dtype)
    absorbed, expanded = case.attend(None), case.attend(case.prompts())
    assert expanded.shape == absorbed.shape == (case.query.shape[1], 3, DIMS.value)
    torch.testing.assert_close(expanded, absorbed, atol=tolerance, rtol=0)
    more = case.attend(case.prompts(num_launched=min(9, case.query.shape[1])))
    torch.testing.assert_close(more, absorbed, atol=tolerance, rtol=0)


def test_heads_are_expanded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(*CASES["beside_decoding"], dtype=torch.float64, heads=5)
    absorbed = case.attend(None)
    num_keys = sum(span.num_keys for span in case.spans)
    head_bytes = 2 * num_keys * (DIMS.nope + DIMS.rope) * 8
    monkeypatch.setattr(expanded_attention, "_CHUNK_BYTES", 2 * head_bytes)
    shapes = []
    attend = expanded_attention._attend

    def noting(query, *rest, **options):
        shapes.append(query.shape[1])
        return attend(query, *rest, **options)

    monkeypatch.setattr(expanded_attention, "_attend", noting)
    torch.testing.assert_close(case.attend(case.prompts()), absorbed, atol=1e-12, rtol=0)
    assert shapes == [2, 2, 1]


def test_expanded_prompts_equal_a_loop_over_rows() -> None:
    case = Case(*CASES["with_padding_requests"], dtype=torch.float64)
    found = case.attend(case.prompts())
    cache = case.cache.clone()
    latent, rope, slots = case.new_rows[:3]
    cache.view(-1, cache.shape[2])[slots] = torch.cat((latent, rope), dim=-1)[:, 0]
    keys = torch.einsum("bsl,hnl->bshn", cache[..., : DIMS.latent], case.weight)
    shared = cache[:, :, None, DIMS.latent :].expand(-1, -1, keys.shape[2], -1)
    expected = slow_paged_attention(
        case.query.transpose(0, 1),
        key_cache=torch.cat((keys[..., : DIMS.nope], shared), dim=-1),
        value_cache=keys[..., DIMS.nope :],
        block_table=case.rows.block_table,
        seq_lens=case.rows.seq_lens,
        query_start_loc=case.rows.query_start_loc,
        scale=case.scale,
    )
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("spans", "dims", "pays"),
    [
        ([(0, 1)], GLM_FLASH, True),  # without context always
        ([(0, 4096)], DEEPSEEK, True),
        ([(100_000, 390)], GLM_FLASH, False),
        ([(100_000, 400)], GLM_FLASH, True),
        ([(100_000, 170)], DEEPSEEK, False),
        ([(100_000, 173)], DEEPSEEK, True),
        ([(8192, 4)], GLM_FLASH, False),
        ([(8192, 4), (0, 8000)], GLM_FLASH, True),  # a pass decides for all of them
        ([(8192, 0)], GLM_FLASH, False),  # nobody reads this context
        ([(0, 64)], LatentDims(16, 4, 16, 16), False),  # nothing is saved a pair
    ],
)
def test_expanding_pays_behind_little_context_or_for_many_rows(spans, dims, pays) -> None:
    assert pays_expanded([Span(*span) for span in spans], dims) is pays


def test_rule_is_the_difference_of_counted_products() -> None:
    for dims in (GLM_FLASH, DEEPSEEK, DIMS):
        for first, count in ((0, 7), (50, 7), (900, 180), (900, 420), (5000, 500)):
            width, pairs = dims.nope + dims.value, sum(first + row + 1 for row in range(count))
            absorbed = count * dims.latent * width + pairs * (2 * dims.latent + dims.rope)
            expanded = (first + count) * dims.latent * width + pairs * (width + dims.rope)
            assert pays_expanded([Span(first, count)], dims) is (expanded < absorbed)
