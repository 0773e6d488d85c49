"""Every way to draft, verify and sample in compiled steps: traced whole, texts of the plain loop.

On the CPU both front ends of the compiler run and captured steps are called again, as in
test_compiled_parts, which the usual run has for one choice; on a GPU steps are really compiled.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from mtp_research.config.schema import POLICIES, EngineConfig, VerifyOptions
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft.draft_length import BatchTableLength, ConfidenceLength
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.experts import route_experts
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.provenance import REPOSITORY_ROOT as ROOT
from tests import tiny
from tests.decode.loops import PROMPTS, run, texts_of
from tests.decode.test_loop_processors import PARAMS
from tests.decode.toy_grammar import PAIRS
from tests.models.test_regions import count_compilations

LAB = ROOT / "assets" / "lab_tiny"
DRAWN = {"temperature": 0.8, "top_p": 0.95}
SAMPLE = {"draft_sampling": "sample"}
RATES = VerifyOptions(synthetic_rates=[0.8, 0.6])
DENSE = "deterministic"  # compiled without experts, or with those of a bfloat16 target
# Name -> settings of speculation, of sampling and of the engine.
CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    **{policy: ({"policy": policy}, {}, {}) for policy in POLICIES},
    "sampled drafts": (SAMPLE, DRAWN, {}),
    "sampled drafts, block": (SAMPLE | {"verify": "block"}, DRAWN, {}),
    "sampled drafts, processors": (SAMPLE, DRAWN | PARAMS["all"], {}),
    "sampled drafts, few tokens": (SAMPLE | {"draft_token_ids": range(3, 200)}, DRAWN, {}),
    "processed drafts": ({"draft_sampling": "processed"}, DRAWN | PARAMS["all"], {}),
    "typical": ({"verify": "typical"}, DRAWN, {}),
    "relaxed": ({"verify": "relaxed"}, {}, {}),
    "synthetic": ({"verify": "synthetic", "verify_options": RATES}, {}, {}),
    "sure drafts": ({"draft_length": ConfidenceLength(0.3)}, {}, {}),
    "fewer drafts": ({"draft_length": BatchTableLength(((1, 2), (2, 1)))}, {}, {}),
    "log-probabilities": ({}, DRAWN | {"logprobs": 3, "logprobs_kind": "processed"}, {}),
    "grammar": ({}, {"grammar": PAIRS, "stop_token_ids": (1, 2)}, {}),
    "one request": (SAMPLE, DRAWN, {"max_num_requests": 1}),
    "prefixes": (SAMPLE, DRAWN, {"prefix_caching": True}),
    DENSE: (SAMPLE, DRAWN, {"deterministic": True}),
    "no drafts": ({"num_speculative_tokens": 0}, DRAWN | PARAMS["all"], {}),
}
ENGINE = {"max_num_requests": 3, "max_prefill_chunk": 16, "max_model_len": 64, "audit": False}
COMPILED = {"cuda_graphs": True, "compile": True, "capture_mixed": True, "deferred_output": True}


def _models(name: str, *, dtype: str, device: str) -> tuple[Target, MTPHeads]:
    if name == DENSE:
        target = tiny.tiny_target("qwen3", dtype=getattr(torch, dtype))
        heads = tiny.tiny_heads(target, num_mtp_modules=1)
        target.model.to(device)
        return target, heads.to(device)
    target = load_target(LAB / "target", dtype=dtype, device=device)
    if device == "cuda":
        route_experts(target.model)
    else:
        target.model.set_experts_implementation("batched_mm")  # traced whole, as those of a GPU
    return target, load_heads(LAB / "heads" / "chain_n3", target)


def assert_plain_texts(name: str, *, dtype: str, device: str) -> None:
    """Compiled steps give the texts and rounds of steps that are launched one by one."""
    spec, sampled, engine = CHOICES[name]
    target, heads = _models(name, dtype=dtype, device=device)
    settings = SpecSettings(**{"num_speculative_tokens": 2} | spec)
    sampling = [
        SamplingParams(max_new_tokens=count, seed=count, **sampled) for count in (18, 7, 12, 20)
    ]
    found = []
    for how in ({}, COMPILED):
        decoder = SpecDecoder(
            target,
            heads if settings.num_speculative_tokens else None,
            spec=settings,
            engine=EngineConfig(**ENGINE | engine | how),
        )
        found.append(run(decoder, PROMPTS, sampling=sampling))
    plain, compiled = found
    assert texts_of(compiled) == texts_of(plain)
    rounds = [[one.num_accepted_per_round for one in records.values()] for records in found]
    assert rounds[0] == rounds[1]
    if name not in ("no drafts", "grammar", DENSE):
        assert sum(map(sum, rounds[0])) > 0, "nothing was accepted"


@pytest.mark.every_case
@pytest.mark.parametrize("name", [name for name in CHOICES if name != DENSE])
def test_choice_is_traced_whole_and_gives_the_plain_texts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in count_compilations(monkeypatch, aot_eager):
        assert_plain_texts(name, dtype="float64", device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHOICES)
def test_compiled_choice_on_the_gpu_gives_the_plain_texts(name: str) -> None:
    assert_plain_texts(name, dtype="float32", device="cuda")
