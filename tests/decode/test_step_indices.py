"""Compiled steps hand the same kept index tensors to every layer."""

import torch

from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.family import LayerGeometry
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan


def test_compiled_target_pass_keeps_its_index_tensors_and_their_values() -> None:
    device = torch.device("cpu")
    slot_state = SlotState(
        2,
        max_model_len=64,
        plan=DraftPlan(POLICIES["eagle"], 3, 1),
        hidden_size=4,
        vocab_size=32,
        keep_draft_probs=False,
        dtype=torch.float32,
        device=device,
    )
    slot_state.num_tokens.copy_(torch.tensor([7, 20, 1]))
    layers = [LayerGeometry("heads", 1, 8, 8)]
    cache = KVCache(layers, num_blocks=5, block_size=16, dtype=torch.float32, device=device)
    slots, table = torch.tensor([1, 0]), torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    kept_by_graph = []

    def note(module, _):
        kept_by_graph.extend(
            node for node in module.graph.nodes if "mtp_research.materialised" in str(node.target)
        )
        return module.forward

    def indices() -> tuple[torch.Tensor, ...]:
        inputs = StepInputs.decoding(
            slots, table, slot_state=slot_state, block_size=16, num_drafts=3
        )
        context = inputs.target_context(cache, backend="auto")
        assert isinstance(context, PagedContext)
        return context.slot_mapping, context.seq_lens, context.query_start_loc

    expected = indices()
    compiled = torch.compile(indices, backend=note, fullgraph=True)()
    assert len(kept_by_graph) == 3
    for values, wanted in zip(compiled, expected, strict=True):
        assert torch.equal(values, wanted)
