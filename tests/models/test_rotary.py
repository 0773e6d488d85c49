"""Rotary embeddings left to the attention launch: which layers, and that nothing else changes."""

import pickle
import sys

import pytest
import torch
from mtp_research.kernels.attention.store_kv import MAX_STORED_ROWS
from torch import Tensor

from mtp_research.decode.slot_state import KVCache
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.rewrites.rotary import leave_rotary_to_attention
from mtp_research.models.target import Target
from tests import tiny

BLOCK_SIZE = 16
IDS = torch.arange(9)[None] + 3  # two requests: 4 rows of a text of 4, 5 of a text of 5
ROTATES_QUERIES_ALONE = """
def forward(self, hidden_states, position_embeddings, **others):
    return apply_rotary_pos_emb(self.q_proj(hidden_states), *position_embeddings), None
"""
POSITIONS = torch.tensor([[*range(4), *range(5)]])


@pytest.mark.parametrize(
    ("recipe", "num_layers", "num_in_heads"),
    [
        pytest.param("mimo", 2, 1, id="bias"),
        pytest.param("qwen3", 2, 1, id="norm_before"),
        pytest.param("glm4_moe", 2, 1, id="half_of_the_dims"),
        pytest.param("gemma3", 3, 1, id="angles_by_layer_type"),
        pytest.param("exaone_moe", 1, 0, id="some_layers_without_positions"),
        pytest.param("ernie4_5_moe", 0, 0, id="pairs"),
        pytest.param("deepseek_v3", 0, 0, id="latents_in_pairs"),
        pytest.param("glm4_moe_lite", 0, 0, id="latents"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_are_taken_by_what_they_compute(
    recipe: str, num_layers: int, num_in_heads: int, dtype: torch.dtype
) -> None:
    target = tiny.tiny_target(recipe, dtype=dtype)
    heads = tiny.tiny_heads(target, num_mtp_modules=1)
    for _ in range(2):  # the second decoder on a model finds it changed
        assert leave_rotary_to_attention(target, target.model, enabled=True) == num_layers
        assert leave_rotary_to_attention(target, heads, enabled=True) == num_in_heads
    assert leave_rotary_to_attention(target, target.model, enabled=False) == 0


def test_rotation_of_other_numbers_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    attention = target.model.base_model.layers[0].self_attn
    module = sys.modules[type(attention).__module__]
    plain = module.apply_rotary_pos_emb

    def reversed_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return plain(q, k, cos, -sin)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", reversed_rotation)
    assert leave_rotary_to_attention(target, target.model, enabled=True) == 0


def test_layers_that_call_in_another_form_or_dtype_are_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    heads = tiny.tiny_heads(target, num_mtp_modules=1).to(torch.bfloat16)
    assert leave_rotary_to_attention(target, heads, enabled=True) == 0
    kind = type(target.model.base_model.layers[0].self_attn)
    names = dict(vars(sys.modules[kind.__module__]))
    exec(ROTATES_QUERIES_ALONE, names)  # a forward that finds it by name
    monkeypatch.setattr(kind, "forward", names["forward"])
    assert leave_rotary_to_attention(target, target.model, enabled=True) == 0


def test_changed_layers_are_copied_as_the_library_s() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    layer = target.model.base_model.layers[0].self_attn
    kind = type(layer)
    assert leave_rotary_to_attention(target, target.model, enabled=True) == 2
    assert type(layer) is not kind
    copy = pickle.loads(pickle.dumps(layer))
    assert type(copy) is kind
    assert all(map(torch.equal, copy.state_dict().values(), layer.state_dict().values()))


def test_layer_with_a_replaced_forward_is_left_alone() -> None:
    target = tiny.tiny_target("qwen3", dtype=torch.float32)
    attention = target.model.base_model.layers[0].self_attn
    attention.forward = attention.forward  # as a library's hook does
    assert leave_rotary_to_attention(target, target.model, enabled=True) == 1


class _Pass:
    """Packed passes over pages of their own, and the angles that each call of the op got."""

    def __init__(self, target: Target, *, max_query_len: int = 5) -> None:
        self.target = target
        self.max_query_len = max_query_len
        self.cache = KVCache(
            target.kv_layers,
            num_blocks=2,
            block_size=BLOCK_SIZE,
            dtype=target.dtype,
            device=target.device,
        )
        self.cache.fill(0.0)
        self.angle_dims: list[int | None] = []
        self.angles: set[torch.fx.Node | None] = set()

    def run(self) -> Tensor:
        """Hidden states `[1, T, D]`."""
        context = PagedContext(
            pool=self.cache,
            slot_mapping=torch.tensor([*range(4), *range(BLOCK_SIZE, BLOCK_SIZE + 5)]),
            block_table=torch.tensor([[0], [1]], dtype=torch.int32),
            seq_lens=torch.tensor([4, 5], dtype=torch.int32),
            query_start_loc=torch.tensor([0, 4, 9], dtype=torch.int32),
            max_query_len=self.max_query_len,
        )
        return self.target.forward(IDS, position_ids=POSITIONS, context=context).post_norm

    def compiled(self) -> Tensor:
        """The same, of compiled code."""
        return torch.compile(self.run, backend=self._look, dynamic=False, fullgraph=True)()

    def _look(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        for node in graph.graph.nodes:
            if "store_and_attend" in str(node.target):
                angles = node.args[3]
                size = None if angles is None else angles.meta["example_value"].shape[-1]
                self.angle_dims.append(size)
                self.angles.add(angles)
        return graph


@pytest.mark.parametrize(("recipe", "num_dims"), [("mimo", 16), ("glm4_moe", 8)])
@torch.inference_mode()
def test_compiled_pass_leaves_the_rotation_to_the_op(recipe: str, num_dims: int) -> None:
    torch._dynamo.reset()
    # Without experts, which a CPU runs in a loop of the library that no compiler follows.
    dense = {"first_k_dense_replace": 2} if recipe == "glm4_moe" else {}
    target = tiny.tiny_target(recipe, dtype=torch.float32, **dense)
    plain, changed = _Pass(target), _Pass(target)
    expected = plain.run()
    assert leave_rotary_to_attention(target, target.model, enabled=True) == 2
    torch.testing.assert_close(changed.compiled(), expected)
    assert changed.angle_dims == [num_dims] * 2
    assert len(changed.angles) == 1  # made once for all layers
    for layer in range(2):
        pages, wanted = changed.cache.pages(layer), plain.cache.pages(layer)
        torch.testing.assert_close(pages.keys, wanted.keys)
        torch.testing.assert_close(pages.values, wanted.values)
    assert torch.equal(_Pass(target).run(), expected)  # without the compiler nothing changes


@torch.inference_mode()
def test_other_compiled_passes_rotate_by_the_library() -> None:
    torch._dynamo.reset()
    target, other = (tiny.tiny_target("qwen3", dtype=torch.float32) for _ in range(2))
    module = sys.modules[type(target.model.base_model.layers[0].self_attn).__module__]
    function = module.apply_rotary_pos_emb

    def dense() -> Tensor:
        return target.forward(IDS, position_ids=POSITIONS, context=DenseContext()).post_norm

    expected, of_one_text = _Pass(target).run(), dense()
    leave_rotary_to_attention(target, target.model, enabled=True)
    assert module.apply_rotary_pos_emb is function
    torch.testing.assert_close(torch.compile(dense, backend="eager")(), of_one_text)
    # Rows that the launch does not store, and another model of the same class.
    for passes in (_Pass(target, max_query_len=MAX_STORED_ROWS + 1), _Pass(other)):
        torch.testing.assert_close(passes.compiled(), expected)
        assert passes.angle_dims == [None] * 2
    for enabled, num_dims in ((True, 16), (False, None)):  # two decoders on one model
        leave_rotary_to_attention(target, target.model, enabled=enabled)
        passes = _Pass(target)
        torch.testing.assert_close(passes.compiled(), expected)
        assert passes.angle_dims == [num_dims] * 2
    assert module.apply_rotary_pos_emb is function
