"""Texts of captured, compiled and prefix-sharing loops are the plain loop's, by kind of target.

One helper decodes; on the CPU a stand-in for CUDA graphs checks that it sees a fault, and under
`-m gpu` it runs the kernels.
"""

from collections.abc import Sequence

import pytest
import torch

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.drafter import DraftSampling
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.draft_vocabulary import most_frequent
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.experts import route_experts
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.provenance import REPOSITORY_ROOT as ROOT
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of
from tests.decode.test_captured_loop import stand_in_for_graphs

EXPERTS, LATENT = "glm4_moe", ("deepseek_v3", "glm4_moe_lite")
FAMILIES = [EXPERTS, *LATENT]
SAMPLING = [
    SamplingParams(max_new_tokens=count, temperature=temperature, seed=count)
    for count, temperature in ((18, 0.0), (7, 0.0), (12, 0.8), (20, 0.0))
]
TRUNK = [(7 * index) % 120 + 3 for index in range(40)]
LAB, NUM_DRAFTED = ROOT / "assets" / "lab_tiny", 64
SHARING = [[*TRUNK, *prompt] for prompt in PROMPTS]


def _models(family: str, device: str, *, num_mtp_modules: int = 2) -> tuple[Target, MTPHeads]:
    """Target and heads in float32, made on the CPU; experts run without the host on a GPU."""
    target = tiny.tiny_target(family, dtype=torch.float32)
    target.model.to(device)
    route_experts(target.model)
    target.model.to("cpu")
    heads = tiny.tiny_heads(target, num_mtp_modules=num_mtp_modules)
    target.model.to(device)
    return target, heads.to(device)


def _decode(
    models: tuple[Target, MTPHeads],
    policy: str,
    prompts=PROMPTS,
    *,
    drafted: Sequence[int] | None = None,
    draft_sampling: DraftSampling = "greedy",
    **changes: object,
):
    settings = {
        "max_num_requests": 3,
        "max_prefill_chunk": 24,
        "max_model_len": 96,
        "deferred_output": True,
        "audit": False,
    }
    decoder = SpecDecoder(
        *models,
        spec=SpecSettings(policy=policy, draft_token_ids=drafted, draft_sampling=draft_sampling),
        engine=EngineConfig(**(settings | changes)),
    )
    return decoder, run(decoder, prompts, sampling=SAMPLING)


def assert_captured_texts(
    models: tuple[Target, MTPHeads],
    policy: str,
    *,
    drafted: Sequence[int] | None = None,
    draft_sampling: DraftSampling = "greedy",
    **changes: object,
) -> None:
    """Captured steps, those with prompt rows too, give texts and rounds of the plain loop."""
    changes |= {"cuda_graphs": True, "capture_mixed": True}
    (_, plain), (decoder, captured) = (
        _decode(models, policy, drafted=drafted, draft_sampling=draft_sampling, **how)
        for how in ({}, changes)
    )
    assert texts_of(captured) == texts_of(plain)
    assert {name: one.num_accepted_per_round for name, one in captured.items()} == {
        name: one.num_accepted_per_round for name, one in plain.items()
    }
    assert decoder.graphs is not None
    assert decoder.graphs.num_graphs >= 2


def assert_texts_of_part_of_the_vocabulary(device: str, policy: str, **changes: object) -> None:
    """Trained heads draft from few tokens: fewer are accepted, and no text changes."""
    target = load_target(LAB / "target", dtype="float32", device=device)
    models = target, load_heads(LAB / "heads" / "chain_n3", target)
    drafted = most_frequent(LAB / "heads" / "chain_n3", num_tokens=NUM_DRAFTED, target=target)
    (_, whole), (_, part) = (_decode(models, policy, drafted=ids) for ids in (None, drafted))
    greedy = [str(index) for index, how in enumerate(SAMPLING) if how.temperature == 0]
    assert [texts_of(whole)[name] for name in greedy] == [texts_of(part)[name] for name in greedy]
    accepted = [
        sum(sum(found[name].num_accepted_per_round) for name in greedy) for found in (whole, part)
    ]
    assert accepted[0] > accepted[1] > 0
    assert_captured_texts(models, policy, drafted=drafted, **changes)


def assert_shared_texts(models: tuple[Target, MTPHeads], policy: str, **changes: object) -> None:
    """Prompts with one beginning give their texts when its blocks are taken from the cache."""
    _, plain = _decode(models, policy, SHARING)
    decoder, shared = _decode(models, policy, SHARING, prefix_caching=True, **changes)
    assert texts_of(shared) == texts_of(plain)
    assert decoder.stats.num_cached_tokens >= decoder.engine.block_size
    decoder.stats.records.clear()
    again = run(decoder, SHARING, sampling=SAMPLING)  # now the whole prompts are there
    assert texts_of(again) == texts_of(plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_stand_in_captured_steps_give_the_plain_texts(family: str, monkeypatch) -> None:
    stand_in_for_graphs(monkeypatch)
    assert_captured_texts(_models(family, "cpu"), "training")


def test_stand_in_captured_steps_draft_from_part_of_the_vocabulary(monkeypatch) -> None:
    stand_in_for_graphs(monkeypatch)
    assert_texts_of_part_of_the_vocabulary("cpu", "training")


@pytest.mark.parametrize("captured", [False, True])
def test_stand_in_shared_prefixes_give_the_plain_texts(captured: bool, monkeypatch) -> None:
    stand_in_for_graphs(monkeypatch)
    changes = {"cuda_graphs": captured, "capture_mixed": captured}
    assert_shared_texts(_models("qwen3", "cpu"), "eagle", **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_step", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("policy", ["eagle", "training"])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_experts_and_latents_give_the_plain_texts(
    family: str, policy: str, compile_step: bool
) -> None:
    assert_captured_texts(_models(family, "cuda"), policy, compile=compile_step)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_step", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_captured_steps_that_sample_their_drafts_give_the_plain_texts(
    policy: str, compile_step: bool
) -> None:
    models = _models("qwen3", "cuda")
    assert_captured_texts(models, policy, draft_sampling="sample", compile=compile_step)


@pytest.mark.gpu
@pytest.mark.parametrize("compile_step", [False, True], ids=["captured", "compiled"])
@pytest.mark.parametrize("policy", ["eagle", "training"])
def test_part_of_the_vocabulary_on_the_gpu_gives_the_plain_texts(
    policy: str, compile_step: bool
) -> None:
    assert_texts_of_part_of_the_vocabulary("cuda", policy, compile=compile_step)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("policy", ["eagle", "training"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_shared_prefixes_on_the_gpu_give_the_plain_texts(
    family: str, policy: str, captured: bool
) -> None:
    changes = {"cuda_graphs": captured, "capture_mixed": captured}
    assert_shared_texts(_models(family, "cuda"), policy, **changes)
