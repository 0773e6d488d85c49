"""Files of the hidden-state cache: order, resume, refusals."""

import dataclasses
import json

import pytest
import torch

from mtp_research.data.hidden_cache import (
    SHARD_ROWS,
    CacheHeader,
    HiddenCache,
    HiddenCacheWriter,
    shard_name,
)
from mtp_research.runtime.errors import ConfigError, IntegrityError

NUM_ROWS = SHARD_ROWS + 5
HEADER = CacheHeader(
    target_sha256="t",
    tokenizer_sha256="k",
    chat_template_sha256="c",
    dtype="torch.float32",
    hidden_source="post_norm",
    seq_len=3,
    num_rows=NUM_ROWS,
    documents_sha256="d",
    versions={"torch": "1"},
)
ROWS = torch.arange(NUM_ROWS * 3 * 2, dtype=torch.float32).view(NUM_ROWS, 3, 2)


def write(folder, *, numbers=(0, 1)):
    writer = HiddenCacheWriter(folder, header=HEADER)
    for number in numbers:
        part = ROWS[number * SHARD_ROWS : (number + 1) * SHARD_ROWS]
        writer.write(number, {"post_norm": part})
    return writer


def test_cache_gives_back_any_rows_in_the_order_asked(tmp_path):
    write(tmp_path)
    cache = HiddenCache(tmp_path, header=HEADER)
    indices = [NUM_ROWS - 1, 0, SHARD_ROWS, 3, 3]
    assert [cache.open_shard(index) for index in indices] == [True, True, False, False, False]
    assert torch.equal(cache.rows("post_norm", indices), ROWS[indices])


def test_cache_writer_goes_on_with_missing_shards(tmp_path):
    assert write(tmp_path, numbers=[1]).missing() == [0]
    (tmp_path / f".{shard_name(0)}.writing").write_bytes(b"half")
    again = HiddenCacheWriter(tmp_path, header=HEADER)
    assert again.missing() == [0]
    with pytest.raises(IntegrityError, match=r"1 of 2 shards are missing, the first shard_000000"):
        HiddenCache(tmp_path, header=HEADER)
    again.write(0, {"post_norm": ROWS[:SHARD_ROWS]})
    assert HiddenCacheWriter(tmp_path, header=HEADER).missing() == []
    assert torch.equal(HiddenCache(tmp_path, header=HEADER).rows("post_norm", [1]), ROWS[1:2])


@pytest.mark.parametrize(
    "change",
    [
        {"target_sha256": "x"},
        {"tokenizer_sha256": "x"},
        {"chat_template_sha256": "x"},
        {"dtype": "torch.bfloat16"},
        {"hidden_source": "pre_norm"},
        {"seq_len": 4},
        {"num_rows": 9},
        {"documents_sha256": "x"},
        {"schema": 2},
    ],
    ids=lambda change: next(iter(change)),
)
@pytest.mark.parametrize("kind", [HiddenCache, HiddenCacheWriter])
def test_cache_of_something_else_is_refused_naming_the_field(tmp_path, change, kind):
    write(tmp_path)
    with pytest.raises(IntegrityError, match=next(iter(change))) as fault:
        kind(tmp_path, header=dataclasses.replace(HEADER, **change))
    assert fault.value.exit_code == 3


def test_cache_of_another_library_version_is_read(tmp_path):
    write(tmp_path)
    HiddenCache(tmp_path, header=dataclasses.replace(HEADER, versions={"torch": "2"}))


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_cache_damaged_shard_is_named(tmp_path, damage):
    write(tmp_path)
    path = tmp_path / shard_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content if damage == "flip" else content[:-1])
    cache = HiddenCache(tmp_path, header=HEADER)
    assert torch.equal(cache.rows("post_norm", [0]), ROWS[:1])
    with pytest.raises(IntegrityError, match="shard_000001"):
        cache.rows("post_norm", [SHARD_ROWS])


@pytest.mark.parametrize("content", ["", "{}", '{"header": {}, "shards": {}}', "[1"])
def test_cache_damaged_index_is_refused(tmp_path, content):
    write(tmp_path)
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"index\.json"):
        HiddenCache(tmp_path, header=HEADER)


def test_cache_that_does_not_exist_names_the_command(tmp_path):
    with pytest.raises(ConfigError, match="task=cache"):
        HiddenCache(tmp_path / "none", header=HEADER)


def test_cache_index_lists_size_and_hash_of_each_shard(tmp_path):
    write(tmp_path)
    shards = json.loads((tmp_path / "index.json").read_text())["shards"]
    assert shards[shard_name(1)]["bytes"] == (tmp_path / shard_name(1)).stat().st_size
    assert not list(tmp_path.glob(".*"))
