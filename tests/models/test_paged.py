"""Packed passes over pages against the library's own attention, for every family.

The library runs its model unmodified with its own attention over one text at a time; ours runs
several requests in one row, over pages that are neither ordered nor owned alone, and forgets
rejected rows by nothing but a smaller length.
"""

import copy
import functools

import pytest
import torch
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.slot_state import KVCache
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError
from tests import tiny
from tests.recipes import RECIPES

BLOCK_SIZE = 4
TABLES = [[7, 2, 5, 11, 0], [1, 9, 3, 8, 6]]  # shuffled pages, two requests
FLOAT32 = 2e-4  # logits of about 5; a wrong slot, order or head moves them by more than 0.1
WITHOUT_SDPA = ("mimo_v2",)  # the library has no sinks there


@pytest.fixture(scope="module", params=sorted(RECIPES))
def target(request: pytest.FixtureRequest) -> Target:
    return tiny.tiny_target(request.param, dtype=torch.float32)


def library_logits(target: Target, text: list[int]) -> Tensor:
    """Logits `[L, V]` of the library's model with an attention of its own."""
    model = copy.deepcopy(target.model)
    for (
        module
    ) in model.modules():  # attention that we route elsewhere, see models/attention/paged.py
        if isinstance(vars(module).get("forward"), functools.partial):
            del module.forward
    name = "eager" if target.family_name in WITHOUT_SDPA else "sdpa"
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0]


class PackedPasses:
    """Packed passes of two requests over one pool, poisoned with NaN."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = KVCache(
            target.kv_layers,
            num_blocks=12,
            block_size=BLOCK_SIZE,
            dtype=target.dtype,
            device=target.device,
        )
        self.cache.fill(torch.nan)

    def run(self, texts: list[list[int]], starts: list[int]) -> list[Tensor]:
        """Logits of rows `[start, end)` of each text, which the pass appends."""
        positions = [
            torch.arange(start, len(text)) for text, start in zip(texts, starts, strict=True)
        ]
        counts = torch.tensor([len(rows) for rows in positions])
        slots = [
            torch.tensor(table)[rows // BLOCK_SIZE] * BLOCK_SIZE + rows % BLOCK_SIZE
            for table, rows in zip(TABLES, positions, strict=True)
        ]
        context = PagedContext(
            pool=self.cache,
            slot_mapping=torch.cat(slots),
            block_table=torch.tensor(TABLES, dtype=torch.int32),
            seq_lens=torch.tensor([len(text) for text in texts], dtype=torch.int32),
            query_start_loc=torch.tensor([0, *counts.cumsum(0)], dtype=torch.int32),
            max_query_len=int(counts.max()),
        )
        ids = [token for text, start in zip(texts, starts, strict=True) for token in text[start:]]
        with torch.no_grad():
            hidden = self.target.forward(
                torch.tensor([ids]), position_ids=torch.cat(positions)[None], context=context
            )
            return list(self.target.logits(hidden.post_norm[0]).split(counts.tolist()))


def test_packed_pages_with_rollback_equal_the_library(target: Target) -> None:
    passes = PackedPasses(target)
    prompts = [[5, 9, 77, 31, 2, 64, 8, 100, 3, 12, 99, 1, 7], [44, 3, 8, 21, 90, 6]]
    rejected = [[*prompt, 11, 13, 17, 19] for prompt in prompts]
    kept = [[*prompt, 11, 13, 70, 71] for prompt in prompts]
    starts = [len(prompt) for prompt in prompts]
    worst = 0.0
    for texts, firsts in (
        (prompts, [0, 0]),
        (rejected, starts),  # verify rows, of which the last two are rejected
        (kept, [start + 2 for start in starts]),
    ):
        for text, first, logits in zip(texts, firsts, passes.run(texts, firsts), strict=True):
            worst = max(worst, float((logits - library_logits(target, text)[first:]).abs().max()))
    assert worst < FLOAT32


def test_dense_context_equals_the_library(target: Target) -> None:
    text = [5, 9, 77, 31, 2, 64, 8, 100, 3, 12]
    with torch.no_grad():
        hidden = target.forward(
            torch.tensor([text]), position_ids=torch.arange(10)[None], context=DenseContext()
        )
    difference = target.logits(hidden.post_norm[0]) - library_logits(target, text)
    assert float(difference.abs().max()) < FLOAT32


def test_dense_context_documents_with_sinks_do_not_see_each_other() -> None:
    target = tiny.tiny_target("mimo_v2")
    texts = [[5, 9, 77, 31, 2], [64, 8, 100]]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    document_index = torch.tensor([[0] * 5 + [1] * 3])
    with torch.no_grad():
        packed = target.forward(
            torch.tensor([texts[0] + texts[1]]),
            position_ids=positions,
            context=DenseContext(document_index),
        )
    logits = target.logits(packed.post_norm[0])
    expected = torch.cat([library_logits(target, text) for text in texts])
    assert float((logits - expected).abs().max()) < 1e-10


def test_latent_pages_hold_one_vector_a_token() -> None:
    target = tiny.tiny_target("deepseek_v3")
    config = target.config
    (geometry,) = set(target.kv_layers)
    assert geometry == target.draft_kv_layer
    assert geometry.key_dim == config.kv_lora_rank + config.qk_rope_head_dim
    pages = PackedPasses(target).cache.pages(0)
    assert pages.values.data_ptr() == pages.keys.data_ptr()


def test_sliding_layers_have_their_own_geometry() -> None:
    target = tiny.tiny_target("mimo_v2")
    assert [layer.num_kv_heads for layer in target.kv_layers] == [2, 4, 2]
    assert {(layer.key_dim, layer.value_dim) for layer in target.kv_layers} == {(24, 16)}
    assert target.draft_kv_layer == target.kv_layers[1]


ONE_DENSE_LAYER: dict[str, dict[str, object]] = {  # experts loop over those that were hit
    "deepseek_v3": {"first_k_dense_replace": 1},
    "mimo_v2": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}


@pytest.mark.parametrize("name", ONE_DENSE_LAYER)
def test_compiled_pass_is_one_graph_with_the_same_result(name: str) -> None:
    target = tiny.tiny_target(
        name, dtype=torch.float32, num_hidden_layers=1, **ONE_DENSE_LAYER[name]
    )
    texts, more = [[5, 9, 77, 31, 2], [64, 8]], [[5, 9, 77, 31, 2, 1, 2], [64, 8, 3, 4]]
    plain, compiled = PackedPasses(target), PackedPasses(target)
    expected = [plain.run(texts, [0, 0]), plain.run(more, [5, 2])]
    base = target.model.base_model
    original = base.forward
    base.forward = torch.compile(original, backend="aot_eager", dynamic=False, fullgraph=True)
    try:
        results = [compiled.run(texts, [0, 0]), compiled.run(more, [5, 2])]
    finally:
        base.forward = original
    for result, rows in zip(results, expected, strict=True):
        torch.testing.assert_close(torch.cat(result), torch.cat(rows), atol=1e-5, rtol=1e-5)


def test_sparse_attention_is_refused_where_dense_is_another_model() -> None:
    target = tiny.tiny_target("deepseek_v32", dtype=torch.float32)
    limit = target.max_exact_tokens
    assert limit == 24
    with pytest.raises(ConfigError, match=r"set engine\.max_model_len=24"):
        SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0))
    SpecDecoder(
        target, spec=SpecSettings(num_speculative_tokens=0), engine=EngineConfig(max_model_len=24)
    )
    ids = torch.arange(limit + 1)[None]
    with pytest.raises(ConfigError, match="got 25"), torch.no_grad():
        target.forward(ids, position_ids=ids, context=DenseContext())
