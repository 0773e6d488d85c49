"""Pages of the pool: what fits into free memory, what is refused, and batches above a bucket."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig
from mtp_research.decode import build, pool_size
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.graphs.capture import split_batch
from mtp_research.decode.pool_size import (
    PoolNeeds,
    bytes_per_block,
    plan_num_blocks,
    plan_side_by_side,
)
from mtp_research.decode.settings import SpecSettings
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.decode.loops import run, texts_of

MIB = 1 << 20


def plan(**changes: object) -> int:
    needs = {"block_bytes": MIB, "num_enough": 1000, "num_least": 100}
    arguments = {"asked": None, "free": 4000 * MIB, "memory_fraction": 0.5}
    needs |= {name: changes.pop(name) for name in list(changes) if name in needs}
    return plan_num_blocks(PoolNeeds(**needs), **(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1000),  # never more than all requests can own
        ({"free": 800 * MIB}, 400),
        ({"free": 800 * MIB, "memory_fraction": 1.0}, 800),
        ({"free": 200 * MIB}, 100),  # just one longest request
        ({"free": None}, 1000),
        ({"free": None, "asked": 7}, 7),
        ({"asked": 7}, 7),
        ({"asked": 1500}, 1500),  # more than enough may be asked for, for prefix caching
        ({"block_bytes": 0}, 1000),  # recurrent layers only
    ],
    ids=str,
)
def test_pool_gets_what_is_enough_as_far_as_memory_goes(changes: dict, expected: int) -> None:
    assert plan(**changes) == expected


def test_pool_that_cannot_hold_one_request_is_refused_with_needed_and_available() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(free=512 * MIB, num_least=300)
    assert "at least 300 blocks = 0.29 GiB, got 256 = 0.25 GiB available" in str(refused.value)
    assert "lower engine.max_model_len" in str(refused.value)
    with pytest.raises(ConfigError, match=r"needs at least 3000 blocks .* lower engine.num_blocks"):
        plan(asked=3000)


def test_pools_side_by_side_are_planned_once_for_all_of_them() -> None:
    small, large = PoolNeeds(MIB, 1000, 100), PoolNeeds(3 * MIB, 1010, 101)
    both = {"needs": (small, large), "memory_fraction": 0.5}
    assert plan_side_by_side(**both, free=None) is None
    assert plan_side_by_side(**both, free=9000 * MIB) == 1010  # enough for either
    assert plan_side_by_side(**both, free=1600 * MIB) == 200  # 800 MiB for 4 MiB a block
    with pytest.raises(ConfigError, match=r"needs at least 101 blocks = 0\.39 GiB, got 100"):
        plan_side_by_side(**both, free=800 * MIB)


def test_pool_that_was_cut_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan()
        plan(free=800 * MIB)
    whole, cut = caplog.records
    assert (whole.levelname, cut.levelname) == ("INFO", "WARNING")
    assert "400 of 1000 blocks that would be enough, 0.39 GiB; 0.39 GiB of 0.78" in cut.message


@pytest.mark.parametrize("recipe", ["qwen3", "deepseek_v3", "mimo_v2"])
def test_bytes_per_block_are_those_of_the_allocated_pool(recipe: str) -> None:
    target = tiny.tiny_target(recipe, dtype=torch.float32)
    decoder = SpecDecoder(
        target, spec=SpecSettings(num_speculative_tokens=0), engine=EngineConfig(num_blocks=4)
    )
    block_bytes = bytes_per_block(target.kv_layers, block_size=16, dtype=torch.float32)
    assert decoder.cache.num_bytes == 5 * block_bytes  # one block belongs to the padding


def test_loop_in_a_pool_cut_to_the_free_memory_decodes_the_same(monkeypatch) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    engine = EngineConfig(max_model_len=64, block_size=4, max_num_requests=4)
    expected = texts_of(
        run(SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine))
    )
    block_bytes = bytes_per_block(target.kv_layers, block_size=4, dtype=torch.float32)
    monkeypatch.setattr(build, "free_for_pool", lambda _: 20 * block_bytes)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    assert decoder.scheduler.blocks.num_blocks == 17  # 0.9 x 20, less the block for padding
    assert texts_of(run(decoder)) == expected


def test_pool_on_a_cpu_takes_no_more_than_half_of_the_memory_that_is_there(
    monkeypatch, tmp_path
) -> None:
    """A model of many positions must not ask for terabytes when it is decoded with the defaults."""
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    spec = SpecSettings(num_speculative_tokens=0)
    engine = EngineConfig(max_model_len=4096, max_num_requests=16)
    block_bytes = bytes_per_block(target.kv_layers, block_size=16, dtype=torch.float32)
    memory = tmp_path / "meminfo"
    memory.write_text(f"MemFree: 1 kB\nMemAvailable:   {1000 * block_bytes // 1024} kB\n")
    monkeypatch.setattr(pool_size, "_MEMORY_FILE", memory)
    decoder = SpecDecoder(target, spec=spec, engine=engine)
    assert 440 <= decoder.cache.num_bytes / block_bytes <= 450  # 0.9 x 500, of 4,097 wanted
    monkeypatch.setattr(pool_size, "_MEMORY_FILE", tmp_path / "absent")
    assert SpecDecoder(target, spec=spec, engine=engine).cache.num_bytes == 4097 * block_bytes


@given(num_requests=st.integers(1, 500), largest=st.integers(1, 64))
def test_batch_above_the_largest_bucket_is_split_into_batches_that_fit(num_requests, largest):
    parts = split_batch(num_requests, largest)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(
        range(num_requests)
    )
    assert all(0 < part.stop - part.start <= largest for part in parts)
    assert len(parts) == -(-num_requests // largest)
