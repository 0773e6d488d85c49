"""What one rank, or one process, decodes of a split target, what it sends and what it holds.

`test_tensor_parallel.py` calls `observe` in the ranks that it starts anyhow, and alone.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from mtp_research.config.schema import EngineConfig, VerifyOptions
from mtp_research.decode import pool_size
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.draft import drafter
from mtp_research.decode.draft.draft_length import ConfidenceLength
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.draft_vocabulary import restrict_vocabulary
from mtp_research.models import rank_parts
from mtp_research.models.rewrites import regions
from mtp_research.models.target import Target, load_target
from mtp_research.policy.fields import POLICIES
from mtp_research.runtime.errors import ConfigError, EnvironmentFault
from tests.decode.loops import draft_rightly, run, texts_of
from tests.decode.test_captured_loop import stand_in_for_graphs
from tests.tiny import tiny_heads

ENGINE: dict[str, Any] = {
    "max_num_requests": 4,
    "block_size": 4,
    "max_prefill_chunk": 6,
    "max_model_len": 32,
}
DRAWS = {"temperature": 1.0, "seed": 5}
TOP = DRAWS | {"top_k": 5, "top_p": 0.9}
MODELS = {"glm4_moe": "tensor", "glm4_moe-experts": "experts"}  # recipe -> plan
VOCABULARY = tuple(range(0, 128, 2))  # that is drafted
# Name -> settings of speculation and of sampling. K = 0 first: drafts are made from its text.
CASES: dict[str, tuple[dict, dict]] = {
    "plain": ({"num_speculative_tokens": 0}, {}),
    **{policy: ({"policy": policy}, {}) for policy in sorted(POLICIES)},
    "top plain": ({"num_speculative_tokens": 0}, TOP),
    **{f"top {policy}": ({"policy": policy}, TOP) for policy in ("eagle", "training")},
    "all plain": ({"num_speculative_tokens": 0}, DRAWS),
    "all block": ({"verify": "block"}, DRAWS),
    "min_p sampled drafts": ({"draft_sampling": "sample"}, DRAWS | {"min_p": 0.05}),
    "top_k sampled drafts": ({"draft_sampling": "sample", "policy": "eagle"}, DRAWS | {"top_k": 9}),
    "penalties": ({"draft_sampling": "processed"}, {"repetition_penalty": 1.4, "logprobs": 2}),
    "confidence": ({"draft_length": ConfidenceLength(0.05)}, {}),
    "vocabulary": ({"draft_token_ids": VOCABULARY}, {}),
    "relaxed": ({"verify": "relaxed"}, {}),
    "synthetic": (
        {"verify": "synthetic", "verify_options": VerifyOptions(synthetic_rates=[0.8, 0.6, 0.4])},
        {"seed": 5},
    ),
}
OF_EXPERTS = ("plain", "eagle", "top training")  # cases of whole experts by rank
EXACT = {"min_p sampled drafts", "top_k sampled drafts", "confidence", "vocabulary", "synthetic"}


def observe(folder: Path, *, plan: str | None = None) -> dict[str, object]:
    """Texts of every model by case, with a plan's ranks also what they send, hold and refuse."""
    found: dict[str, object] = {}
    for name, tp_plan in MODELS.items():
        how = {"tp_plan": tp_plan} if plan is None else {}
        target = load_target(folder / name, dtype="float32", device="cpu", **how)
        cases = CASES if tp_plan == "tensor" else OF_EXPERTS
        found[name] = decode_cases(target, list(cases))
        found[f"{name} held"] = held(target.model) | held(split_heads(target))
    if target.parts is not None:
        found |= {"refused": refusals(target), "blocks": blocks_of_scarce_memory(target)}
        found["compiled"] = decode_compiled(target)
    return found


def decode_cases(target: Target, names: list[str]) -> dict[str, object]:
    """Text, accepted counts and log-probabilities of every case, and the bytes that it sends."""
    found: dict[str, object] = {}
    texts: dict[str, dict] = {}
    for name in names:
        spec, sampled = CASES[name]
        heads = tiny_heads(target)
        decoder = SpecDecoder(
            target, heads, spec=SpecSettings(**spec), engine=EngineConfig(**ENGINE)
        )
        params = SamplingParams(max_new_tokens=6, **sampled)
        with pytest.MonkeyPatch.context() as patch, counting_bytes() as sent:
            drafts = recorded_drafts(patch)
            basis = texts.get("top plain" if name.startswith("top") else "plain")
            if basis is not None and name not in EXACT:
                draft_rightly(patch, basis, chance=0.7)
            records = run(decoder, sampling=params)
        texts[name] = texts_of(records)
        found[name] = {
            "texts": texts[name],
            "accepted": [record.num_accepted_per_round for record in records.values()],
            "drafted": [record.num_drafted_per_round for record in records.values()],
            "drafts": drafts,
        }
        found[f"{name} sent"] = sent
        found[f"{name} logprobs"] = [
            one.logprob for record in records.values() for one in record.token_logprobs or ()
        ]
    return found


def recorded_drafts(patch: pytest.MonkeyPatch) -> list[list[int]]:
    """What modules draft from here on, before it is replaced by what is right."""
    plain, found = drafter.choose_drafts, []

    def choose(*args: Any, **how: Any) -> torch.Tensor:
        drafts = plain(*args, **how)
        found.append(drafts.tolist())
        return drafts

    patch.setattr(drafter, "choose_drafts", choose)
    return found


@contextlib.contextmanager
def counting_bytes() -> Iterator[dict[str, int]]:
    """The most bytes that a gathering took from this rank, and the most that were added up."""
    most = {"gathered": 0, "added": 0}
    gather, add = rank_parts._all_gather, distributed.all_reduce

    def gathering(output: torch.Tensor, part: torch.Tensor) -> None:
        most["gathered"] = max(most["gathered"], part.nbytes)
        gather(output, part)

    def adding(part: torch.Tensor) -> None:
        most["added"] = max(most["added"], part.nbytes)
        add(part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_parts, "_all_gather", gathering)
        patch.setattr(distributed, "all_reduce", adding)
        yield most


def split_heads(target: Target) -> nn.Module:
    """Modules as a decoder leaves them, with output heads of their own."""
    heads = tiny_heads(target, num_mtp_modules=1, owns_lm_head=True)
    heads.split()
    return heads


def held(model: nn.Module) -> dict[str, int]:
    """Numbers of each parameter that lie here; a tied one under both names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.numel() for name, parameter in named}


def refusals(target: Target) -> list[str]:
    """What cannot be done with parts."""
    heads = split_heads(target)
    decoder = SpecDecoder(target, spec=SpecSettings(0), engine=EngineConfig(**ENGINE))
    calls = (
        lambda: restrict_vocabulary(heads, [1, 2, 3]),
        lambda: heads.save_pretrained("unused"),
        lambda: decoder.add_request([5], sampling=SamplingParams(temperature=1.0, seed=None)),
    )
    found = []
    for call in calls:
        with pytest.raises(ConfigError) as fault:
            call()
        found.append(str(fault.value))
    return found


def blocks_of_scarce_memory(target: Target) -> int:
    """Blocks of the pool where the second rank has less memory than the first."""
    free = 40_000 if os.environ["RANK"] == "0" else 30_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_size, "free_bytes", lambda _: free)
        engine = EngineConfig(**ENGINE)
        return SpecDecoder(target, spec=SpecSettings(0), engine=engine).num_blocks


def decode_compiled(target: Target) -> dict[str, tuple[int, ...]]:
    """Texts of steps that are compiled in regions and called again in the place of graphs."""

    def traced(function, **_: object):
        return torch_compile(function, dynamic=False, backend=lambda graph, _: graph.forward)

    torch_compile = torch.compile
    flags = {"cuda_graphs": True, "compile": True, "deferred_output": True}
    flags |= {"graph_batch_sizes": [4]}
    engine = EngineConfig(**ENGINE, **flags, audit=False)
    regions.compiled_once.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traced)
        stand_in_for_graphs(patch)
        heads = tiny_heads(target, num_mtp_modules=1)
        decoder = SpecDecoder(target, heads, spec=SpecSettings(1), engine=engine)
        records = run(decoder, sampling=SamplingParams(max_new_tokens=6))
    regions.compiled_once.cache_clear()
    return texts_of(records)


def lose_a_rank(folder: Path) -> dict[str, object]:
    """The second rank ends in a step; what the first one then says, and after how many seconds."""
    target = load_target(folder / "qwen3", dtype="float32", device="cpu", tp_plan="tensor")
    decoder = SpecDecoder(target, spec=SpecSettings(0), engine=EngineConfig(**ENGINE))
    if os.environ["RANK"] == "1":
        os._exit(0)
    started = time.perf_counter()
    with pytest.raises(EnvironmentFault) as fault:
        run(decoder)
    return {"said": str(fault.value), "seconds": time.perf_counter() - started}
