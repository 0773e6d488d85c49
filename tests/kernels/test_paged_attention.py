from dataclasses import replace

import pytest
import torch
from mtp_research.kernels.attention import paged_attention as pages
from mtp_research.kernels.attention.attention_rows import AttentionRows, PagedKV, Scoring
from mtp_research.kernels.bench.bench_attention import (
    paged_attention,
    paged_attention_ref,
)

from tests.kernels.append_cases import APPEND_CASES, check_new_rows
from tests.kernels.kernel_cases import (
    ATTENTION_CASES,
    MIXED,
    AttentionCase,
    call_arguments,
    make_inputs,
    random_case,
    slow_arguments,
)
from tests.kernels.slow import slow_paged_attention

# Largest absolute difference to the float64 loop over the same rounded inputs.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-2,
    torch.bfloat16: 5e-2,
}


def _expected(case, inputs):
    return slow_paged_attention(inputs.query, **inputs.keywords(), **slow_arguments(case))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_paged_attention_ref_matches_slow_loop_in_poisoned_pool(case, dtype):
    inputs = make_inputs(case, dtype=dtype)
    out = paged_attention_ref(inputs.query, **inputs.keywords(), **call_arguments(case))
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), _expected(case, inputs), atol=TOLERANCES[dtype], rtol=0
    )


@pytest.mark.parametrize("seed", range(12))
def test_paged_attention_ref_random_batch_matches_slow_loop(seed):
    case = random_case(seed)
    inputs = make_inputs(case, dtype=torch.float64, seed=seed)
    out = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case))
    torch.testing.assert_close(out, _expected(case, inputs), atol=1e-12, rtol=0)


@pytest.mark.parametrize("case", APPEND_CASES, ids=lambda case: case.name)
def test_reference_attention_that_stores_new_rows_matches_stored_pages(case):
    check_new_rows(case, torch.float32, device="cpu", backend="auto")


def test_paged_attention_foreign_pages_change_nothing():
    case = MIXED
    inputs = make_inputs(case, dtype=torch.float32)
    poisoned = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case))
    inputs.key_cache.nan_to_num_(7.0)
    inputs.value_cache.nan_to_num_(-3.0)
    clean = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case))
    assert torch.equal(poisoned, clean)


def test_paged_attention_table_entries_past_the_request_are_not_followed():
    inputs = make_inputs(MIXED, dtype=torch.float32)
    expected = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(MIXED))
    for request, seq_len in enumerate(MIXED.seq_lens):
        inputs.block_table[request, -(-seq_len // MIXED.block_size) :] = -1
    out = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(MIXED))
    assert torch.equal(out, expected)


def test_paged_attention_permuted_requests_permute_rows():
    inputs = make_inputs(MIXED, dtype=torch.float64)
    out = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(MIXED))
    order = [2, 0, 3, 1]
    starts = inputs.query_start_loc.tolist()
    rows = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in order])
    query_lens = [MIXED.query_lens[r] for r in order]
    permuted = paged_attention(
        inputs.query[rows],
        **{
            **inputs.keywords(),
            "block_table": inputs.block_table[order],
            "seq_lens": inputs.seq_lens[order],
            "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32),
        },
        **call_arguments(MIXED),
    )
    torch.testing.assert_close(permuted, out[rows], atol=1e-13, rtol=0)


def test_paged_attention_chunks_equal_the_whole_prompt():
    whole = AttentionCase("whole", query_lens=(40,), seq_lens=(40,), sliding_window=19)
    inputs = make_inputs(whole, dtype=torch.float64)
    expected = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(whole))
    parts = []
    for begin, end in ((0, 7), (7, 8), (8, 40)):
        chunk = replace(whole, query_lens=(end - begin,), seq_lens=(end,))
        keywords = {
            **inputs.keywords(),
            "seq_lens": torch.tensor([end], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
        }
        parts.append(paged_attention(inputs.query[begin:end], **keywords, **call_arguments(chunk)))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-13, rtol=0)


def test_paged_attention_no_requests_gives_zero_rows():
    case = AttentionCase("none", query_lens=(), seq_lens=(), num_padded_rows=2)
    inputs = make_inputs(case, dtype=torch.float32)
    out = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case))
    assert torch.equal(out, torch.zeros(2, 4, 16))


def test_paged_attention_too_small_max_query_len_raises():
    inputs = make_inputs(MIXED, dtype=torch.float32)
    arguments = {**call_arguments(MIXED), "max_query_len": 18}
    with pytest.raises(ValueError, match=r"max_query_len must be >= .* got 18 for a request of 19"):
        paged_attention(inputs.query, **inputs.keywords(), **arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_cache": torch.zeros(2, 16, 3, 16)}, "H must be a multiple of the cache's Hkv"),
        ({"value_cache": torch.zeros(2, 16, 2, 16)}, "value_cache must have shape"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, r"seq_lens must have shape \[R\]"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int64)}, "seq_lens must have dtype torch.int32"),
        ({"query_start_loc": torch.zeros(4, dtype=torch.int32)}, r"\[R \+ 1\] = \[5\]"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[H\] = \[4\]"),
        ({"positions": torch.zeros(27, dtype=torch.int32)}, "positions must have dtype"),
        ({"kv_start": torch.zeros(3, dtype=torch.int32)}, "kv_start must have shape"),
        ({"sliding_window": 0}, "sliding_window must be >= 1 or None, got 0"),
        ({"num_splits": 129}, r"num_splits must be in \[1, 128\] or None, got 129"),
        ({"backend": "flash"}, "one of auto, invariant, reference, triton, got 'flash'"),
        ({"backend": "triton"}, "TRITON_INTERPRET=1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_paged_attention_wrong_input_names_it(change, message):
    inputs = make_inputs(MIXED, dtype=torch.float32)
    arguments = {**inputs.keywords(), **call_arguments(MIXED), **change}
    if change.get("key_cache") is not None:
        arguments["value_cache"] = change["key_cache"]
    with pytest.raises(ValueError, match=message):
        paged_attention(inputs.query, **arguments)


def _op_arguments(case, inputs):
    keywords = {**inputs.keywords(), **call_arguments(case)}
    order = (
        *("key_cache", "value_cache", "block_table", "seq_lens", "query_start_loc"),
        *("max_query_len", "scale", "sliding_window", "sinks", "positions", "kv_start"),
    )
    return (inputs.query, *(keywords[name] for name in order), "reference", None)


@pytest.mark.parametrize("name", ["verify", "sinks_window", "kv_start", "positions"])
def test_paged_attention_op_passes_opcheck(name):
    case = next(case for case in ATTENTION_CASES if case.name == name)
    inputs = make_inputs(case, dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.mtp_research.paged_attention.default, _op_arguments(case, inputs)
    )


def test_paged_attention_compiled_fullgraph_gives_the_same():
    case = ATTENTION_CASES[1]
    inputs = make_inputs(case, dtype=torch.float32)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(query, keywords):
        return paged_attention(query * 1, **keywords, **call_arguments(case)) + 1

    expected = paged_attention(inputs.query, **inputs.keywords(), **call_arguments(case)) + 1
    assert torch.equal(step(inputs.query, inputs.keywords()), expected)


def test_requests_of_few_rows_are_one_group_of_the_reference():
    starts = [0, 1, 5, 5, 7, 16, 28, 48]  # 1, 4, 0, 2, 9, 12 and 20 rows
    found = pages._group_by_query_len(starts, max_query_len=20)
    assert found == [[0, 1, 3], [4, 5], [6]]


def test_layers_of_a_pass_share_what_the_reference_made_of_its_rows(monkeypatch):
    inputs = make_inputs(MIXED, dtype=torch.float32)
    kv = PagedKV(inputs.key_cache, inputs.value_cache)
    one_head = PagedKV(*(cache[:, :, :1].contiguous() for cache in kv))
    tables = (inputs.block_table, inputs.seq_lens, inputs.query_start_loc)
    rows = AttentionRows(*tables, int(inputs.query_start_loc.diff().max()))
    layers = [(kv, None), (kv, None), (kv, 3), (one_head, None), (kv, 3), (kv, None)]
    expected = [
        pages.paged_attention_ref(inputs.query, cache, rows, Scoring(0.25, window))
        for cache, window in layers
    ]
    groups, made = {}, []
    make = pages.group_rows
    monkeypatch.setattr(pages, "group_rows", lambda *of, **how: made.append(1) or make(*of, **how))

    def attend(cache, window):
        return pages.attend_pages(
            inputs.query, cache, rows, Scoring(0.25, window), backend="auto", groups=groups
        )

    for layer, output in zip(layers, expected, strict=True):
        assert torch.equal(attend(*layer), output)
    assert len(made) == 3
    for name in ("keys", "values"):
        with pytest.raises(ValueError, match="dtype"):
            attend(kv._replace(**{name: getattr(kv, name).double()}), None)
