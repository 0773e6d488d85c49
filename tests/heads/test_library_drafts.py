"""Our `training` drafts against those of transformers' own MTP decoding, on published checkpoints.

The library runs one module per draft, refreshes rows after a rejection and reads post-norm states:
the `training` policy with as many drafts as modules. A vocabulary of six makes drafts right often
enough to see every number of accepted ones.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.candidate_generator import MTPCandidateGenerator

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from tests import tiny
from tests.heads.release import write_release

PROMPT = [3, 1, 4, 1, 5, 2]
NUM_NEW = 40
LIBRARY_FAMILIES = ("deepseek_v3", "glm4_moe")
Drafts = dict[tuple[int, ...], list[int]]  # text so far -> its drafts


def library_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Drafts:
    drafts: Drafts = {}
    get_candidates = MTPCandidateGenerator.get_candidates

    def record(self, input_ids: torch.Tensor, *args: object, **kwargs: object):
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        text, longer = input_ids[0].tolist(), candidates[0].tolist()
        if len(longer) > len(text):
            drafts[tuple(text)] = longer[len(text) :]
        return candidates, logits

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", record)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # The library knows the modules of the releases by their layer number only.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\."]
    model.generation_config.eos_token_id = None
    input_ids = torch.tensor([PROMPT])
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        use_mtp=True,
    )
    return drafts


def own_drafts(folder: Path, *, num_modules: int) -> tuple[Drafts, set[int]]:
    """Drafts by text, and the numbers of accepted ones that were met."""
    target = load_target(folder, dtype="float32", device="cpu")
    decoder = SpecDecoder(
        target,
        load_heads(folder, target),
        spec=SpecSettings(policy="training", num_speculative_tokens=num_modules),
        engine=EngineConfig(deferred_output=False),
    )
    request = decoder.add_request(PROMPT, sampling=SamplingParams(max_new_tokens=NUM_NEW))
    drafts: Drafts = {}
    while decoder.scheduler.has_work:
        decoder.step()
        drafts[tuple(request.token_ids)] = list(request.draft_token_ids)
    (record,) = decoder.stats.records
    return drafts, set(record.num_accepted_per_round)


@pytest.mark.parametrize("num_modules", [1, 3])
@pytest.mark.parametrize("family", LIBRARY_FAMILIES)
def test_training_drafts_equal_the_library_s(
    family: str, num_modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny.tiny_target(family, dtype=torch.float32, seed=23, vocab_size=6)
    write_release(target, tmp_path, num_modules=num_modules)
    expected = library_drafts(tmp_path, monkeypatch)
    drafts, num_accepted = own_drafts(tmp_path, num_modules=num_modules)
    assert {0, 1} <= num_accepted
    # Drafts that hardly vary would be met by wrong states as well.
    firsts = [draft[0] for draft in expected.values()]
    assert max(firsts.count(token) for token in set(firsts)) <= len(firsts) / 2
    common = expected.keys() & drafts.keys()
    assert len(common) >= len(expected) - 1 >= 10  # the last one may be cut by the length
    for text in common:
        assert drafts[text][: len(expected[text])] == expected[text], len(text)
