"""The target pass of a decoding step computes no index tensor: all were made before it."""

import torch

from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.models.attention.paged import PagedContext
from mtp_research.models.family import LayerGeometry
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan


def test_every_layer_reads_index_tensors_that_the_inputs_hold() -> None:
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
    inputs = StepInputs.decoding(slots, table, slot_state=slot_state, block_size=16, num_drafts=1)
    context = inputs.target_context(cache, backend="auto")
    assert isinstance(context, PagedContext)
    assert context.slot_mapping is inputs.row_slots
    assert context.seq_lens is inputs.seq_lens
    assert context.query_start_loc is inputs.query_start_loc
    # Rows 19 and 20 of slot 1, whose blocks are 3 and 1, and rows 6 and 7 of slot 0, in block 2.
    assert context.slot_mapping.tolist() == [16 + 3, 16 + 4, 32 + 6, 32 + 7]
    assert context.seq_lens.tolist() == [21, 8]
    assert context.query_start_loc.tolist() == [0, 2, 4]
