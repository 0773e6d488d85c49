"""The whole loop at T > 0 with drafts that are right about half of the time: still the target.

Drafts that are nearly always rejected, or accepted, hide a verifier that shares noise with its
drafter. So the drafter here is a blurred copy of the target, and the rate is asserted.
"""

import functools
import itertools
from collections import Counter

import pytest
import torch
from torch import Tensor

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target
from mtp_research.policy.fields import POLICIES
from tests import tiny
from tests.decode.chi_square import chi_square_p_value, smallest_of

VOCAB, NUM_NEW, NUM_DRAFTS, NUM_REQUESTS = 6, 4, 3, 2000
PROMPT = [3, 1]
ENGINE = EngineConfig(
    max_num_requests=500, max_num_batched_tokens=4000, max_model_len=16, audit=False
)
# Chosen so that about half of the drafts are kept.
BLUR = {"greedy": 0.4, "sample": 1.0}
TEMPERATURE = {"greedy": 0.35, "sample": 0.6}


@pytest.fixture(scope="module")
def target() -> Target:
    return chain_target(VOCAB)


def chain_target(vocab_size: int, *, sharpness: float = 1.0) -> Target:
    """The next token follows the last one, as in a Markov chain, and the rest of the text a bit."""
    target = tiny.tiny_target(
        "qwen3", vocab_size=vocab_size, num_hidden_layers=1, bos_token_id=None, eos_token_id=None
    )
    with torch.no_grad():
        target.embed_tokens.weight.mul_(6)  # outweighs what the layer adds
        target.model.lm_head.weight.mul_(sharpness)
        for parameter in target.model.base_model.layers.parameters():
            parameter.mul_(0.5 if parameter.dim() > 1 else 1.0)
    return target


@pytest.fixture(scope="module")
def exact(target: Target) -> dict[str, Tensor]:
    """Probability of every continuation, `[V] * NUM_NEW`, by the way of drafting."""
    return {name: exact_texts(target, temperature=value) for name, value in TEMPERATURE.items()}


def exact_texts(target: Target, *, temperature: float) -> Tensor:
    """Probability of every continuation, `[V] * NUM_NEW`, from full recomputes."""
    every = torch.cartesian_prod(*[torch.arange(VOCAB)] * (NUM_NEW - 1))
    texts = torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every], dim=1)
    positions = torch.arange(texts.shape[1]).expand(texts.shape)
    with torch.no_grad():
        hidden = target.forward(texts, position_ids=positions, context=DenseContext())
    logits = target.logits(hidden.post_norm)[:, len(PROMPT) - 1 :]
    probs = torch.softmax(logits / temperature, dim=-1).detach()
    joint = probs[:, -1].reshape([VOCAB] * NUM_NEW)
    for step in range(NUM_NEW - 1):
        chance = probs[torch.arange(len(every)), step, every[:, step]]
        joint = joint * chance.reshape([VOCAB] * (NUM_NEW - 1))[..., None]
    return joint


def copied_heads(target: Target, *, blur: float) -> MTPHeads:
    """Modules that know the token they consume as the target does, and read hidden vectors too."""
    heads = tiny.tiny_heads(target, num_mtp_modules=2)
    own = target.model.base_model.layers[0].state_dict()
    width = target.config.hidden_size
    for module in heads.mtp_modules:
        module.block.load_state_dict(own, strict=False)
        for norm in (module.enorm, module.hnorm):
            norm.weight.fill_(1.0)
        module.shared_head.norm.weight.copy_(target.model.base_model.norm.weight)
        module.eh_proj.weight.mul_(blur)
        module.eh_proj.weight[:, :width] += torch.eye(width)
    return heads


@functools.cache
def seeded(temperature: float) -> list[SamplingParams]:
    """What the requests of a run ask for, each with its own seed."""
    return [
        SamplingParams(temperature=temperature, seed=seed, max_new_tokens=NUM_NEW)
        for seed in range(NUM_REQUESTS)
    ]


WAYS = [(drafts, verify) for drafts in ("greedy", "sample") for verify in ("standard", "block")]
# Every policy, and every way of drafting and verifying: neither knows of the other.
CASES = [(policy, *way) for policy, way in zip(sorted(POLICIES), itertools.cycle(WAYS))]
CASES += [("training", *way) for way in WAYS if ("training", *way) not in CASES]


@pytest.mark.parametrize(("policy", "draft_sampling", "verify"), CASES)
def test_sampled_text_is_the_targets_where_half_of_the_drafts_are_kept(
    target: Target, exact: dict[str, Tensor], policy: str, draft_sampling: str, verify: str
) -> None:
    decoder = SpecDecoder(
        target,
        copied_heads(target, blur=BLUR[draft_sampling]),
        spec=SpecSettings(
            num_speculative_tokens=NUM_DRAFTS,
            policy=policy,
            verify=verify,
            draft_sampling=draft_sampling,
        ),
        engine=ENGINE,
    )
    for sampling in seeded(TEMPERATURE[draft_sampling]):
        decoder.add_request(PROMPT, sampling=sampling)
    while decoder.scheduler.has_work:
        decoder.step()
    records = decoder.stats.records
    accepted = sum(sum(record.num_accepted_per_round) for record in records)
    rate = accepted / sum(sum(record.num_drafted_per_round) for record in records)
    assert 0.3 < rate < 0.7
    counts = Counter(record.output_token_ids for record in records)
    texts = torch.tensor(list(counts))
    observed = torch.zeros([VOCAB] * NUM_NEW, dtype=torch.float64)
    observed[texts.unbind(dim=1)] = torch.tensor(list(counts.values())).double()
    assert p_value(observed, exact[draft_sampling]) > 1e-3


def p_value(observed: Tensor, exact: Tensor) -> float:
    """Chance of counts this far off: the whole text, and every pair of neighbours."""
    expected = exact * observed.sum()
    found = [chi_square_p_value(observed.flatten(), expected.flatten())]
    for first in range(NUM_NEW - 1):
        others = [axis for axis in range(NUM_NEW) if axis not in (first, first + 1)]
        pair = [table.sum(dim=others).flatten() for table in (observed, expected)]
        found.append(chi_square_p_value(*pair))
    return smallest_of(found)
