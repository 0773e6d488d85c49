"""What ranks agree on, with ranks that take turns: the second call gathers what all have sent."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from mtp_research.decode.sampling.sampling import keep_top, top_candidates
from mtp_research.models import rank_parts
from mtp_research.models.rank_parts import (
    RankParts,
    RowExchange,
    best_of,
    best_probability,
    whole_of,
)

NUM_RANKS = 4


@pytest.fixture
def on_every_rank(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Calls a function of a rank's columns and its `RankParts`; it may gather once."""

    def call(function: Callable[[Tensor, RankParts], object], whole: Tensor) -> list:
        sent: list[Tensor] = []

        def gather(part: Tensor, num_ranks: int) -> Tensor:
            sent.append(part.clone())
            return (
                torch.stack(sent[:num_ranks])
                if len(sent) > num_ranks
                else part.expand(num_ranks, *part.shape)
            )

        monkeypatch.setattr(rank_parts, "gather_ranks", gather)
        parts = [RankParts(rank, NUM_RANKS, {}) for rank in range(NUM_RANKS)]
        columns = whole.chunk(NUM_RANKS, dim=-1)
        for _ in range(2):
            found = [function(own, one) for own, one in zip(columns, parts, strict=True)]
        return found

    return call


def rows(num_rows: int = 60, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits `[60, 2, 16]` of a few values, so that most rows have ties; some broken, some flat."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (num_rows, 2, 16), generator=generator).to(dtype)
    logits[0, 0, 5] = logits[0, 1, 15] = logits[1, 0, 7] = logits[1, 0, 11] = torch.nan
    logits[2, 0, 9] = logits[2, 0, 12] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 1.0
    return logits


@pytest.mark.parametrize("size", [1 << 15, 40_000, (1 << 15) + 1, 64])
def test_compiled_search_of_a_long_row_finds_the_first_of_the_best(size: int) -> None:
    logits = torch.randint(-3, 4, (7, 1, size), generator=torch.Generator().manual_seed(0)).float()
    logits[0] = -torch.inf
    logits[1, 0, [size // 3, size - 1]] = torch.nan
    logits[2, 0, [size // 2 + 1, size - 2]] = torch.inf
    logits[3, 0, size - 1] = 9.0
    logits[4] = 1.0
    torch.compiler.reset()
    found = torch.compile(best_of, backend="eager", fullgraph=True)(logits, None)
    expected = logits.argmax(dim=-1)
    assert torch.equal(found.index, expected)
    assert torch.equal(found.value.nan_to_num(5.0), logits.amax(dim=-1).nan_to_num(5.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_best_token_of_ranks_is_the_argmax_of_the_whole_row(on_every_rank, dtype) -> None:
    logits = rows(dtype=dtype)
    expected = logits.argmax(dim=-1)
    assert len(set((logits == logits.amax(-1, keepdim=True)).sum(-1).flatten().tolist())) > 3
    for index, value in on_every_rank(best_of, logits):
        assert torch.equal(index, expected)
        largest = logits.gather(-1, expected[..., None])[..., 0]
        assert value.dtype == dtype
        torch.testing.assert_close(value, largest, rtol=0, atol=0, equal_nan=True)


def test_probability_of_the_best_token_is_that_of_the_whole_row(on_every_rank) -> None:
    logits = rows()[3:] * 1.7  # the first row is all -inf: NaN
    expected = torch.softmax(logits.double(), dim=-1).amax(dim=-1)
    for found in on_every_rank(best_probability, logits):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_best", [1, 2, 4, 16])
def test_candidates_of_ranks_keep_what_a_top_k_keeps_of_the_whole_row(
    on_every_rank, num_best: int
) -> None:
    logits = rows()[4:]
    ones = torch.ones(len(logits), dtype=torch.float64)
    laws = (ones, torch.full((len(logits),), num_best), ones * 0.8, num_best)
    expected = keep_top(logits, *laws)
    for found in on_every_rank(lambda own, parts: top_candidates(own, num_best, parts), logits):
        kept = keep_top(found, *laws)
        assert torch.equal(kept, expected)
        assert torch.equal(found[kept], logits[kept])


def test_candidates_of_a_broken_row_show_that_it_is_broken(on_every_rank) -> None:
    logits = rows()[:3]
    for found in on_every_rank(lambda own, parts: top_candidates(own, 1, parts), logits):
        expected = torch.isfinite(logits.amax(dim=-1))
        assert torch.equal(torch.isfinite(found.amax(dim=-1)), expected)


def test_whole_of_parts_is_the_whole(on_every_rank) -> None:
    logits = rows()[4:]
    assert all(torch.equal(found, logits) for found in on_every_rank(whole_of, logits))
    assert whole_of(logits, None) is logits


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rows_reach_experts_as_they_were_and_padding_has_none(
    dtype: torch.dtype, weights_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_parts, "gather_ranks", lambda part, n: torch.stack([part] * n))
    monkeypatch.setattr(
        rank_parts, "scatter_sums", lambda all_rows, n: all_rows[: len(all_rows) // n]
    )
    seen: list[tuple[Tensor, ...]] = []

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 1, 1, dtype=dtype))

        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            seen.append((hidden, index, weights))
            return 2 * hidden

    exchange, experts = RowExchange(num_ranks=2, hidden_size=6, top_k=2), Experts()
    exchange.surround(experts)
    exchange.num_rows = 4
    hidden = torch.randn(3, 6, dtype=torch.float64).to(dtype)
    index, weights = torch.tensor([[7, 0], [1, 2], [300, 3]]), torch.rand(3, 2).to(weights_dtype)
    assert torch.equal(experts(hidden, index, weights), 2 * hidden)
    exchange.join(nn.Sequential(experts))
    (rows_seen, index_seen, weights_seen), joined = seen
    assert rows_seen.dtype == dtype
    assert torch.equal(rows_seen.view(2, 4, 6)[:, :3], hidden.expand(2, 3, 6))
    none = torch.full((1, 2), -1)
    assert torch.equal(index_seen, torch.cat([index, none, index, none]))
    assert torch.equal(weights_seen.view(2, 4, 2)[0, :3], weights.to(weights_seen.dtype))
    assert [part.dtype for part in joined] == [part.dtype for part in seen[0]]
    assert torch.equal(joined[1], none.expand(8, 2))


def test_exchange_is_traced_once_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are compiled once for all batch sizes, see `rewrites.regions`."""

    def gather(output: Tensor, part: Tensor) -> None:
        output.copy_(torch.cat([part, part]))

    def scatter(own: Tensor, all_rows: Tensor) -> None:
        own.copy_(all_rows[: len(own)] + all_rows[len(own) :])

    monkeypatch.setattr(rank_parts, "_all_gather", gather)
    monkeypatch.setattr(rank_parts, "_reduce_scatter", scatter)

    class Experts(nn.Module):
        def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return hidden * weights.sum(dim=1, keepdim=True) + index[:, :1]

    exchange, experts = RowExchange(num_ranks=2, hidden_size=6, top_k=2), Experts()
    exchange.surround(experts)
    counter = CompileCounter()
    traced = torch.compile(
        lambda *rows: experts(*rows), dynamic=False, fullgraph=True, backend=counter
    )
    for num_rows in (5, 9, 4):
        hidden, weights = torch.randn(num_rows, 6), torch.rand(num_rows, 2)
        index = torch.randint(8, (num_rows, 2))
        for tensor in (hidden, weights, index):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        expected = 2 * (hidden * weights.sum(dim=1, keepdim=True) + index[:, :1])
        assert torch.allclose(traced(hidden, index, weights), expected)
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_ranks_on_a_gpu_agree_with_the_cpu(on_every_rank) -> None:
    logits, finite = rows().cuda(), rows()[4:].cuda()
    for index, _ in on_every_rank(best_of, logits):
        assert torch.equal(index.cpu(), rows().argmax(dim=-1))
    candidates = on_every_rank(lambda own, parts: top_candidates(own, 2, parts), finite)
    expected = on_every_rank(lambda own, parts: top_candidates(own, 2, parts), finite.cpu())
    for found, wanted in zip(candidates, expected, strict=True):
        assert torch.equal(found.cpu(), wanted)
