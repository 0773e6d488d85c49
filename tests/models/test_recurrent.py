"""Recurrent targets in packed passes: states follow the accepted rows, whatever the batch."""

import copy
import random
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch
from torch import Tensor

from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.family import KVPages
from mtp_research.models.recurrent import RecurrentStates, with_states
from mtp_research.models.target import Target
from tests import tiny, tiny_recurrent

NUM_DRAFTS = 3
NUM_SLOTS = 4
BLOCK_SIZE = 8
BLOCKS_PER_SLOT = 6
VOCAB = 128
EXACT = 1e-10


@pytest.fixture(scope="module", params=sorted(tiny_recurrent.RECIPES))
def target(request: pytest.FixtureRequest) -> Target:
    return tiny_recurrent.tiny_target(request.param)


@pytest.fixture(scope="module")
def one_target() -> Target:
    return tiny_recurrent.tiny_target("qwen3_next")


class Rows:
    """Rows of one request in a pass: its slot, the text so far, the first row and their number."""

    def __init__(self, slot: int, text: list[int], *, first: int, count: int) -> None:
        self.slot, self.text, self.first, self.count = slot, text, first, count


@dataclass
class Passes:
    """Runs packed passes of a target: each slot owns the pages of its text."""

    target: Target
    num_drafts: int = NUM_DRAFTS
    states: RecurrentStates = field(init=False)

    def __post_init__(self) -> None:
        self.states = RecurrentStates(
            self.target.mixers, num_slots=NUM_SLOTS, num_speculative_tokens=self.num_drafts
        )
        config = self.target.config
        shape = (NUM_SLOTS * BLOCKS_PER_SLOT, BLOCK_SIZE)
        shape = (*shape, config.num_key_value_heads, config.head_dim)
        self.kv = torch.zeros(config.num_hidden_layers, 2, *shape, dtype=self.target.dtype)

    def pages(self, layer: int) -> KVPages:
        return KVPages(*self.kv[layer], kind="heads")

    def run(self, parts: list[Rows]) -> list[Tensor]:
        """Logits `[count, V]` of every part's rows; all rows count as run, none as kept."""
        slots = torch.tensor([part.slot for part in parts])
        counts = [part.count for part in parts]
        position = torch.cat([torch.arange(part.first, part.first + part.count) for part in parts])
        owner = torch.repeat_interleave(slots, torch.tensor(counts))
        block_table = slots[:, None] * BLOCKS_PER_SLOT + torch.arange(BLOCKS_PER_SLOT)
        paged = PagedContext(
            pool=self,
            slot_mapping=owner * BLOCKS_PER_SLOT * BLOCK_SIZE + position,
            block_table=block_table.int(),
            seq_lens=torch.tensor([part.first + part.count for part in parts]).int(),
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            max_query_len=max(counts),
        )
        context = with_states(
            paged,
            states=self.states,
            slots=slots,
            first_position=torch.tensor([part.first for part in parts]),
            num_rows=counts,
        )
        tokens = [part.text[part.first : part.first + part.count] for part in parts]
        with torch.no_grad():
            hidden = self.target.forward(
                torch.tensor([list(chain.from_iterable(tokens))]),
                position_ids=position[None],
                context=context,
            )
            return list(self.target.logits(hidden.post_norm[0]).split(counts))

    def keep(self, parts: list[Rows], num_kept: list[int]) -> None:
        self.states.select(
            torch.tensor([part.slot for part in parts]),
            num_rows=torch.tensor([part.count for part in parts]),
            num_kept=torch.tensor(num_kept),
        )

    def prefill(self, parts: list[tuple[int, list[int]]]) -> None:
        rows = [Rows(slot, text, first=0, count=len(text)) for slot, text in parts]
        self.run(rows)
        self.keep(rows, [row.count for row in rows])


def dense_logits(target: Target, text: list[int]) -> Tensor:
    """The library's own forward over the whole text, `[L, V]`."""
    with torch.no_grad():
        hidden = target.forward(
            torch.tensor([text]), position_ids=torch.arange(len(text))[None], context=DenseContext()
        )
        return target.logits(hidden.post_norm[0])


def random_text(length: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def largest_difference(passes: Passes, parts: list[Rows]) -> float:
    """Of a pass from the library's forward over each text up to the pass's last row."""
    differences = []
    for part, logits in zip(parts, passes.run(parts), strict=True):
        end = part.first + part.count
        expected = dense_logits(passes.target, part.text[:end])[part.first :]
        differences.append((logits - expected).abs().max())
    return float(torch.stack(differences).max())  # NaN if any is


def test_dense_context_equals_the_library_itself(target: Target) -> None:
    model = copy.deepcopy(target.model)
    model.set_attn_implementation("eager")
    text = random_text(19, seed=1)
    with torch.no_grad():
        expected = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(dense_logits(target, text), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_packed_chunks_equal_the_library_for_each_request(target: Target, chunk: int) -> None:
    passes = Passes(target)
    texts = {slot: random_text(length, seed=slot) for slot, length in enumerate((13, 1, 20, 6))}
    done = dict.fromkeys(texts, 0)
    while pending := [slot for slot in texts if done[slot] < len(texts[slot])]:
        parts = [
            Rows(s, texts[s], first=done[s], count=min(chunk + s, len(texts[s]) - done[s]))
            for s in reversed(pending)
        ]
        assert largest_difference(passes, parts) < EXACT
        passes.keep(parts, [part.count for part in parts])
        done |= {part.slot: part.first + part.count for part in parts}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.2)])
def test_unchanged_library_agrees_to_its_rounding(dtype: str, tolerance: float) -> None:
    target = tiny_recurrent.tiny_target("qwen3_5", dtype=getattr(torch, dtype))
    passes = Passes(target)
    passes.prefill([(2, random_text(9, seed=3))])
    text = random_text(9, seed=3) + random_text(4, seed=4)
    assert largest_difference(passes, [Rows(2, text, first=9, count=4)]) < tolerance


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS + 1))
def test_next_step_starts_from_the_accepted_row(target: Target, num_accepted: int) -> None:
    passes = Passes(target)
    assert _difference_after_rejection(passes, num_accepted, num_kept=num_accepted + 1) < EXACT


@pytest.mark.parametrize("num_accepted", range(NUM_DRAFTS))
def test_keeping_the_last_row_instead_is_noticed(target: Target, num_accepted: int) -> None:
    passes = Passes(target)
    assert _difference_after_rejection(passes, num_accepted, num_kept=NUM_DRAFTS + 1) > 1e-2


def _difference_after_rejection(passes: Passes, num_accepted: int, *, num_kept: int) -> float:
    """Of the step after one whose drafts beyond `num_accepted` were wrong."""
    prompt, rest = random_text(9, seed=3), random_text(2 * NUM_DRAFTS + 2, seed=4)
    passes.prefill([(2, prompt)])
    wrong = random_text(NUM_DRAFTS - num_accepted, seed=5)
    drafted = [*prompt, *rest[: num_accepted + 1], *wrong]
    step = [Rows(2, drafted, first=len(prompt), count=NUM_DRAFTS + 1)]
    passes.run(step)
    passes.keep(step, [num_kept])
    first = len(prompt) + num_accepted + 1
    return largest_difference(passes, [Rows(2, prompt + rest, first=first, count=NUM_DRAFTS + 1)])


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
def test_mixed_random_histories_equal_the_library(one_target: Target, num_drafts: int) -> None:
    passes, rng = Passes(one_target, num_drafts=num_drafts), random.Random(num_drafts)
    texts = {slot: random_text(4 + slot, seed=slot) for slot in range(NUM_SLOTS)}
    passes.prefill(list(texts.items()))
    for _ in range(5):
        parts, kept = [], []
        for slot in rng.sample(range(NUM_SLOTS), k=3):  # one request sits out
            drafted = texts[slot] + random_text(rng.randint(1, num_drafts + 1), seed=rng.random())
            count = len(drafted) - len(texts[slot])
            parts.append(Rows(slot, drafted, first=len(texts[slot]), count=count))
            kept.append(rng.randint(0, count))  # 0: the step is undone
        assert largest_difference(passes, parts) < EXACT
        passes.keep(parts, kept)
        for part, num_kept in zip(parts, kept, strict=True):
            texts[part.slot] = part.text[: part.first + num_kept]


@pytest.mark.parametrize("count", [3, 6])  # row by row, and as a chunk
def test_undone_step_leaves_no_trace_of_broken_rows(count: int) -> None:
    target = tiny_recurrent.tiny_target("qwen3_next")
    broken_token, text = 77, [5, 9, 31, 2, 64, 8, 12, 90]
    clean_row = target.embed_tokens.weight[broken_token].clone()
    passes = Passes(target)
    passes.prefill([(1, text[:4])])
    target.embed_tokens.weight[broken_token] = torch.nan
    step = [Rows(1, [*text[:5], broken_token, 3, 3, 3, 3], first=4, count=count)]
    assert passes.run(step)[0].isnan().any()
    passes.keep(step, [0])
    target.embed_tokens.weight[broken_token] = clean_row
    assert largest_difference(passes, [Rows(1, text, first=4, count=4)]) < EXACT


def test_first_row_of_a_text_forgets_who_used_the_slot(target: Target) -> None:
    passes = Passes(target)
    for state in passes.states.layers.values():
        for part in state:
            part.fill_(torch.nan)
    for seed in (1, 2):  # the second request takes the first one's slot, in mid-history
        text = random_text(9, seed=seed)
        for first, count in ((0, 5), (5, 4)):
            rows = [Rows(3, text, first=first, count=count)]
            assert largest_difference(passes, rows) < EXACT
            passes.keep(rows, [count if first == 0 else 2])


def test_other_slots_are_not_touched(one_target: Target) -> None:
    passes = Passes(one_target)
    passes.prefill([(0, random_text(6, seed=1))])
    before = copy.deepcopy(passes.states)
    passes.prefill([(2, random_text(9, seed=2))])
    for layer_idx, state in before.layers.items():
        for part, now in zip(state, passes.states.layers[layer_idx], strict=True):
            assert torch.equal(part[[0, 1, 3]], now[[0, 1, 3]])


def test_packed_documents_do_not_see_each_other(target: Target) -> None:
    texts = [random_text(length, seed=length) for length in (7, 1, 5)]
    row = [*chain.from_iterable(texts), 0, 0]  # two padding tokens
    index = [document for document, text in enumerate(texts) for _ in text] + [-1, -1]
    with torch.no_grad():
        hidden = target.forward(
            torch.tensor([row]),
            position_ids=torch.cat([torch.arange(7), torch.arange(1), torch.arange(7)])[None],
            context=DenseContext(torch.tensor([index])),
        )
        logits = target.logits(hidden.post_norm[0]).split([7, 1, 5, 2])
    for text, part in zip(texts, logits, strict=False):
        torch.testing.assert_close(part, dense_logits(target, text), rtol=0, atol=EXACT)


def test_pages_alone_are_refused(one_target: Target) -> None:
    bare = PagedContext(
        pool=Passes(one_target),
        slot_mapping=torch.tensor([0]),
        block_table=torch.tensor([[0]]).int(),
        seq_lens=torch.tensor([1]).int(),
        query_start_loc=torch.tensor([0, 1]).int(),
        max_query_len=1,
    )
    with pytest.raises(AssertionError, match="needs a RecurrentContext, got PagedContext"):
        one_target.forward(torch.tensor([[1]]), position_ids=torch.tensor([[0]]), context=bare)


def test_targets_say_whether_they_are_recurrent(target: Target) -> None:
    assert target.has_recurrent_state
    kinds = enumerate(target.config.layer_types)
    assert sorted(target.mixers) == [index for index, kind in kinds if kind == "linear_attention"]
    assert not tiny.tiny_target("qwen3").has_recurrent_state


def test_states_of_all_candidate_rows_are_kept(one_target: Target) -> None:
    states = Passes(one_target).states
    place = (NUM_SLOTS + 1, NUM_DRAFTS + 2)  # a slot for padding, a column for the start
    assert set(states.layers) == {0, 1}
    for state in states.layers.values():
        assert state.conv.shape == (*place, 2 * 2 * 16 + 4 * 16, 4)
        assert state.recurrent.shape == (*place, 4, 16, 16)
