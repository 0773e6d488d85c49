"""One draft pass's choice: broken logits propose nothing, variants choose as they say."""

from types import SimpleNamespace

import pytest
import torch

from mtp_research.decode.draft.drafter import DRAFT_SAMPLINGS, choose_drafts
from mtp_research.decode.sampling.processors import processor_tensors
from mtp_research.decode.sampling.sampling import sampling_tensors
from mtp_research.decode.sampling.sampling_params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 5


def _choose(kind: str, logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Second draft of texts `2 2 | 4`: token 4 is the first draft."""
    num_requests = len(params)
    processors = processor_tensors(
        params, num_prompt_tokens=[1] * num_requests, vocab_size=VOCAB, device=CPU
    )
    step = SimpleNamespace(
        params=sampling_tensors(params, device=CPU)._replace(processors=processors),
        inputs=SimpleNamespace(slots=torch.arange(num_requests)),
        state=SimpleNamespace(num_known_tokens=torch.full((num_requests,), 2)),
    )
    slot_state = SimpleNamespace(
        text=torch.tensor([[2, 2, 4, 0, 0]] * num_requests),
        write_draft_probs=lambda slots, *, draft_step, probs: None,
    )
    return choose_drafts(
        logits, step, draft_step=1, slot_state=slot_state, sampling=kind, vocabulary=None
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("where", ["one", "all"])
@pytest.mark.parametrize("kind", DRAFT_SAMPLINGS)
def test_broken_draft_logits_propose_nothing(kind: str, where: str, bad: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 2 if where == "one" else slice(None)] = bad
    params = [SamplingParams(temperature=0.5, presence_penalty=0.5, seed=row) for row in range(3)]
    token_ids = _choose(kind, logits, params)
    is_mask = kind == "greedy" and where == "one" and bad == -torch.inf  # as in verification
    assert bool(token_ids[1] == -1) is not is_mask
    assert token_ids[[0, 2]].min() >= 0


def test_variants_choose_as_they_say() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0, 2.0]])
    params = [SamplingParams(bad_words=((4, 4), (2, 4, 1)))]  # the first draft was 4
    assert _choose("greedy", logits, params).tolist() == [4]
    assert _choose("sample", logits, params).tolist() == [4]  # temperature 0
    assert _choose("processed", logits, params).tolist() == [2]


def test_processed_choice_without_processors_is_greedy() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5, 0.0, 2.0]])
    assert _choose("processed", logits, [SamplingParams()]).tolist() == [4]
