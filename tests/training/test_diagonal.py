"""On the diagonal, training logits equal the logits the decode loop drafts from, in float64.

The training graph runs over the committed text and the drafts behind it, and is read at the
frontier. `eagle` and `training` hold the same rows after any history. `target_roll` leaves rows of
rejected drafts behind, as its engine does, so it is held to whole prompts and histories without a
rejection.
"""

import random

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.models.attention.attention import DenseContext
from mtp_research.policy.fields import MATCHING_POLICY, POLICIES, module_index
from mtp_research.training.unroll import MEASURED_UNROLL, UNROLLS, RowInputs, unroll
from tests import oracle, tiny
from tests.decode.test_exactness import VOCAB, DictatedLoop

NUM_DRAFTS = 3


class KeepAll(random.Random):
    """Histories in which every draft is accepted."""

    def randint(self, low: int, high: int) -> int:
        return high


@torch.no_grad()
def unrolled_drafts(heads, text, num_drafts, *, kind):
    """Drafts and their logits at the frontier of `text`, from the training graph alone."""
    known, logits = list(text), []
    for depth in range(1, num_drafts + 1):
        input_ids = torch.tensor([known])
        position_ids = torch.arange(len(known))[None]
        hidden = heads.target.forward(input_ids, position_ids=position_ids, context=DenseContext())
        documents = torch.zeros_like(input_ids)
        outputs = unroll(
            heads,
            RowInputs(input_ids, heads.source(hidden), position_ids, documents),
            num_depths=depth,
            kind=MEASURED_UNROLL.get(kind, kind),
        )
        last = module_index("cycle", depth - 1, heads.spec.num_mtp_modules)
        logits.append(heads.logits(outputs[-1].post_norm[0, len(text) - 2], module_idx=last))
        known.append(int(logits[-1].argmax()))
    return known[len(text) :], logits


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("num_modules", [1, 3])
@pytest.mark.parametrize("kind", UNROLLS)
def test_training_logits_equal_decode_logits(kind, num_modules, chunk, monkeypatch):
    if kind == "ttt" and num_modules > 1:
        pytest.skip("with several modules it is shared_context")
    if not POLICIES[MATCHING_POLICY[kind]].clean and chunk < 7:
        pytest.skip("a chunk's last rows wait for the next chunk's tokens, and are not run again")
    target = tiny.tiny_target("qwen3")
    heads = tiny.tiny_heads(target, num_mtp_modules=num_modules)
    policy = MATCHING_POLICY[kind]
    decoder = SpecDecoder(
        target,
        heads,
        spec=SpecSettings(policy=policy, num_speculative_tokens=NUM_DRAFTS),
        engine=EngineConfig(max_num_requests=2, max_prefill_chunk=chunk),
    )
    loop = DictatedLoop(decoder, seed=0)
    if not POLICIES[policy].clean:
        loop.rng = KeepAll(0)
    monkeypatch.setitem(
        oracle.DRAFTS, kind, lambda *arguments: unrolled_drafts(*arguments, kind=kind)
    )
    words = random.Random(1)
    for length in (2, 7):
        decoder.add_request(
            [words.randrange(VOCAB) for _ in range(length)],
            sampling=SamplingParams(max_new_tokens=14),
        )
    num_steps, worst = 0, 0.0
    while decoder.scheduler.has_work:
        worst = max(worst, loop.step_and_compare(kind))
        num_steps += 1
    loop.close()
    assert worst < 1e-10
    assert num_steps >= 4


def test_target_roll_after_a_rejection_differs_from_its_unroll(monkeypatch):
    # The rows of rejected drafts stay behind: this is what makes the policy an ablation.
    target = tiny.tiny_target("qwen3")
    heads = tiny.tiny_heads(target, num_mtp_modules=3)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy="target_roll", num_speculative_tokens=NUM_DRAFTS)
    )
    loop = DictatedLoop(decoder, seed=0)
    loop.rng.randint = lambda low, high: 0
    decoder.add_request([5, 9, 17, 33], sampling=SamplingParams(max_new_tokens=6))
    monkeypatch.setitem(
        oracle.DRAFTS,
        "independent",
        lambda heads, text, num: (
            decoder.scheduler.running[0].draft_token_ids,
            unrolled_drafts(heads, text, num, kind="independent")[1],
        ),
    )
    differences = []
    while decoder.scheduler.has_work:
        differences.append(loop.step_and_compare("independent"))
    loop.close()
    assert max(differences) > 1e-3
