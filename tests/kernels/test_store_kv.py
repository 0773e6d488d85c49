import pytest
import torch
from mtp_research.kernels.attention import store_kv as store_kv_module
from mtp_research.kernels.attention.store_kv import store_kv, store_kv_ref

from tests.kernels.kernel_cases import STORE_CASES, make_store_inputs
from tests.kernels.slow import slow_store_kv


@pytest.mark.parametrize("case", STORE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_store_kv_ref_matches_slow_copy(case, dtype):
    rows, pool = make_store_inputs(case, dtype=dtype)
    expected = slow_store_kv(*rows, **pool)
    store_kv_ref(*rows, **pool)
    assert torch.equal(pool["key_cache"], expected[0])
    assert torch.equal(pool["value_cache"], expected[1])


def test_store_kv_non_contiguous_cache_view_writes_only_its_layer():
    layers = torch.zeros(2, 4, 16, 2, 8)  # [layer, num_blocks, block_size, Hkv, D]
    interleaved = layers.permute(1, 0, 2, 3, 4).contiguous().permute(1, 0, 2, 3, 4)
    key = torch.ones(1, 2, 8)
    store_kv(
        key,
        key * 2,
        key_cache=interleaved[0],
        value_cache=interleaved[1],
        slot_mapping=torch.tensor([35]),
    )
    layers[0, 2, 3], layers[1, 2, 3] = 1, 2
    assert torch.equal(interleaved, layers)


def test_store_kv_slot_outside_pool_raises_on_cpu():
    rows, pool = make_store_inputs(STORE_CASES[0], dtype=torch.float32)
    pool["slot_mapping"][0] = pool["key_cache"].shape[0] * pool["key_cache"].shape[1]
    with pytest.raises(IndexError):
        store_kv(*rows, **pool)


def _broken(pool, rows, name):
    key, value = rows
    if name == "key_rank":
        return (key[0], value), pool
    if name == "value_heads":
        return (key, value[:, :1]), pool
    if name == "cache_dim":
        return rows, {**pool, "key_cache": pool["key_cache"][..., :-1]}
    if name == "cache_blocks":
        return rows, {**pool, "value_cache": pool["value_cache"][1:]}
    if name == "cache_dtype":
        return rows, {**pool, "key_cache": pool["key_cache"].double()}
    if name == "slot_dtype":
        return rows, {**pool, "slot_mapping": pool["slot_mapping"].int()}
    return rows, {**pool, "slot_mapping": pool["slot_mapping"][1:]}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("key_rank", r"key must have shape \[T, Hkv, Dk\]"),
        ("value_heads", "value must have shape"),
        ("cache_dim", "key_cache must have shape"),
        ("cache_blocks", "value_cache must have shape"),
        ("cache_dtype", "key_cache must have dtype torch.float32, got torch.float64"),
        ("slot_dtype", "slot_mapping must have dtype torch.int64"),
        ("slot_count", "slot_mapping must have shape"),
    ],
)
def test_store_kv_wrong_input_names_it(name, message):
    rows, pool = make_store_inputs(STORE_CASES[0], dtype=torch.float32)
    rows, pool = _broken(pool, rows, name)
    with pytest.raises(ValueError, match=message):
        store_kv(*rows, **pool)


def test_store_kv_op_passes_opcheck():
    rows, pool = make_store_inputs(STORE_CASES[0], dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.mtp_research.store_kv.default, (*rows, *pool.values(), "reference")
    )


def test_store_kv_compiled_fullgraph_writes_the_same():
    rows, pool = make_store_inputs(STORE_CASES[0], dtype=torch.float32)
    expected = slow_store_kv(*rows, **pool)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(key, value, key_cache, value_cache, slot_mapping):
        store_kv(
            key + 0,
            value,
            key_cache=key_cache,
            value_cache=value_cache,
            slot_mapping=slot_mapping,
        )
        return key_cache.sum()

    step(*rows, *pool.values())
    assert torch.equal(pool["key_cache"], expected[0])
    assert torch.equal(pool["value_cache"], expected[1])


def test_layers_of_a_pass_share_their_slots_and_misfits_are_refused(monkeypatch):
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots, kept, made = torch.tensor([5, -1, 17]), {}, []
    make = store_kv_module.kept_rows
    monkeypatch.setattr(
        store_kv_module, "kept_rows", lambda *of, **how: made.append(1) or make(*of, **how)
    )
    for layer in range(2):
        keys, values = torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8)
        arguments = {"key_cache": keys, "value_cache": values, "slot_mapping": slots, "kept": kept}
        store_kv_module.store_rows(key + layer, value - layer, **arguments)
        assert torch.equal(keys.flatten(0, 1)[[5, 17]], key[[0, 2]] + layer)
        assert torch.equal(values.flatten(0, 1)[[5, 17]], value[[0, 2]] - layer)
        assert len(made) == 1
    with pytest.raises(ValueError, match="dtype"):
        store_kv_module.store_rows(key, value.double(), **arguments)
    arguments["key_cache"] = torch.zeros(2, 16, 1, 8)
    with pytest.raises(ValueError, match="shape"):
        store_kv_module.store_rows(key, value, **arguments)
