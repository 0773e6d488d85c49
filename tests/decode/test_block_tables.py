"""Device tables that are updated entry by entry equal tables built anew."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule import batch as block_tables
from mtp_research.decode.schedule.batch import BlockTables
from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import Request
from mtp_research.decode.slot_state import to_device

NUM_SLOTS, WIDTH, SPARE = 3, 4, 99


def _tables() -> BlockTables:
    return BlockTables(
        NUM_SLOTS, num_table_blocks=WIDTH, spare_block=SPARE, device=torch.device("cpu")
    )


def _read(tables: BlockTables, slots: list[int]) -> list[list[int]]:
    out = torch.zeros(len(slots), WIDTH, dtype=torch.int32)
    tables.read(torch.tensor(slots), out=out)
    return out.tolist()


def _request(name: str, slot: int) -> Request:
    return Request(name, (1,), SamplingParams(), slot=slot)


@given(st.lists(st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, 2)), max_size=30))
def test_tables_are_those_of_their_tenants_after_any_growth_preemption_and_return(events) -> None:
    """Event 0 frees a request, whose slot it or another one takes; the others let one grow."""
    blocks = BlockManager(NUM_SLOTS * WIDTH, block_size=1)
    running = [_request(str(slot), slot) for slot in range(NUM_SLOTS)]
    tables = _tables()
    for slot, growth in events:
        request = running[slot]
        if growth == 0:
            num_before = len(request.block_ids)
            blocks.free(request)
            other = running[(slot + 1) % NUM_SLOTS]
            blocks.reserve(other, min(len(other.block_ids) + 1, WIDTH))
            blocks.reserve(request, num_before)  # as many as before, but not the same ones
        else:
            blocks.reserve(request, min(len(request.block_ids) + growth, WIDTH))
        batch = [running[index] for index in range(NUM_SLOTS) if index != (slot + 2) % NUM_SLOTS]
        tables.update(batch)
        assert not tables.update(batch), "nothing has changed"
        found = _read(tables, [*(one.slot for one in batch), NUM_SLOTS])
        wanted = [one.block_ids + [SPARE] * (WIDTH - len(one.block_ids)) for one in batch]
        assert found == [*wanted, [SPARE] * WIDTH]


def test_a_block_more_is_one_entry_and_a_new_tenant_leaves_nothing_of_the_former_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    uploads: list[list[list[int]]] = []

    def recorded(values: list, **kind: Any) -> torch.Tensor:
        uploads.append(values)
        return to_device(values, **kind)

    monkeypatch.setattr(block_tables, "to_device", recorded)
    tables, blocks = _tables(), BlockManager(20, block_size=1)
    first, second = _request("first", 0), _request("second", 1)
    blocks.reserve(first, 3)
    blocks.reserve(second, 2)
    assert tables.update([first, second])
    blocks.reserve(second, 3)
    assert tables.update([first, second])
    assert uploads[1] == [[WIDTH + 2], [5]]
    blocks.free(first)
    heir = _request("heir", 0)
    blocks.reserve(heir, 1)
    assert tables.update([heir])
    assert _read(tables, [0, 1]) == [[6, SPARE, SPARE, SPARE], [3, 4, 5, SPARE]]
