"""Inductor's kernels for a step's verification and bookkeeping compile for sm_90, GPU or not."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mtp_research.decode import step as step_module
from mtp_research.decode.graphs import capture
from mtp_research.decode.sampling.sampling import SamplingTensors, batch_tensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import StepInputs
from mtp_research.decode.slot_state import KVCache, SlotState
from mtp_research.decode.step import DeviceStep, StepResult
from mtp_research.decode.verify.verify_rules import RULES
from mtp_research.models.rewrites.regions import mark_any_size
from mtp_research.models.target import Target, TargetHidden
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from tests.inductor_kernels import (
    are_spelled_alike,
    compile_kernel,
    generated_kernels,
    watch_sizes,
)

CPU = torch.device("cpu")
HIDDEN_SIZE = 64
BLOCK_SIZE = 16
GREEDY = SamplingParams()


class _Rows:
    """A target without layers: embedding and lm_head."""

    parts = None  # no ranks

    def __init__(self, vocab_size: int) -> None:
        self.weight = torch.empty(vocab_size, HIDDEN_SIZE, dtype=torch.bfloat16)

    def forward(self, input_ids: Tensor, **_: object) -> TargetHidden:
        hidden = self.weight[input_ids]
        return TargetHidden(pre_norm=hidden, post_norm=hidden)

    def own_logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


def _step(
    vocab_size: int,
    *,
    num_drafts: int,
    num_requests: int,
    sampling: SamplingParams = GREEDY,
    rule: str = "standard",
    keep_draft_probs: bool = False,
) -> tuple[DeviceStep, Callable[[Tensor, Tensor], StepInputs], SamplingTensors]:
    """A step without drafter, what makes its inputs of slots and pages, and its sampling."""
    slot_state = SlotState(
        num_requests,
        max_model_len=2048,
        plan=DraftPlan(POLICIES["eagle"], num_drafts, 1),
        hidden_size=HIDDEN_SIZE,
        vocab_size=vocab_size,
        keep_draft_probs=keep_draft_probs,
        dtype=torch.bfloat16,
        device=CPU,
    )
    step = DeviceStep(
        target=cast(Target, _Rows(vocab_size)),
        drafter=None,
        cache=cast(KVCache, SimpleNamespace(recurrent=None)),
        slot_state=slot_state,
        plan=DraftPlan(POLICIES["eagle"], num_drafts, 1),
        rule=RULES[rule],
    )

    def inputs_of(slots: Tensor, block_table: Tensor) -> StepInputs:
        return StepInputs.decoding(
            slots,
            block_table,
            slot_state=slot_state,
            block_size=BLOCK_SIZE,
            num_drafts=num_drafts,
        )

    params = batch_tensors(
        [sampling] * num_requests,
        num_prompt_tokens=[1] * num_requests,
        num_speculative_tokens=num_drafts,
        vocab_size=vocab_size,
        device=CPU,
    )
    return step, inputs_of, params


def _requests(num_requests: int) -> tuple[Tensor, Tensor]:
    """Slots and pages."""
    pages = torch.zeros(num_requests, 2048 // BLOCK_SIZE + 1, dtype=torch.int32)
    return torch.zeros(num_requests, dtype=torch.int64), pages


def _kernels(vocab_size: int, **settings: Any) -> dict[str, str]:
    """Kernels of a step without draft passes, between the target's layers and the drafter."""
    step, inputs_of, params = _step(vocab_size, **settings)

    def run(slots: Tensor, block_table: Tensor, params: SamplingTensors) -> StepResult:
        inputs = inputs_of(slots, block_table)
        return step.run(inputs, params, draft_limit=settings["num_drafts"])

    return generated_kernels(run, *_requests(settings["num_requests"]), params)


@pytest.mark.parametrize(
    ("vocab_size", "num_drafts"),
    [
        pytest.param(8192, 0, id="lab_small-0", marks=pytest.mark.every_case),
        pytest.param(16384, 3, id="lab_base-3"),
    ],
)
def test_kernels_of_verification_and_bookkeeping_compile(
    vocab_size: int, num_drafts: int, tmp_path: Path
) -> None:
    kernels = _kernels(vocab_size, num_drafts=num_drafts, num_requests=8)
    over_vocabulary = [name for name in kernels if "argmax" in name]
    # `index_put` writes the text. Triton 3.6 fails on that in one kernel with a reduction.
    assert [name for name in kernels if "index_put" in name]
    assert [name for name in over_vocabulary if "index_put" in name] == []
    # The largest logit is looked up, not looked for: Inductor splits that search at V = 16384.
    assert len(over_vocabulary) == 1
    assert not [name for name in kernels if "amax" in name]
    for name, source in kernels.items():
        assert compile_kernel(name, source, folder=tmp_path) >= 1


def test_of_long_rows_of_logits_only_the_parts_best_are_left_to_compare(tmp_path: Path) -> None:
    kernels = _kernels(151_680, num_drafts=3, num_requests=1)
    (best,) = (source for name, source in kernels.items() if "max" in name)
    assert "r0_numel = 13\n" in best
    for name, source in kernels.items():
        assert compile_kernel(name, source, folder=tmp_path) >= 1


def test_sizes_of_code_for_any_number_of_requests_are_spelled_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = watch_sizes(monkeypatch)
    step, inputs_of, params = _step(49_152, num_drafts=3, num_requests=2)
    inputs = inputs_of(*_requests(2))
    target = step.parts.target(inputs)
    capture._mark((inputs, target, params))
    mark_any_size(inputs.draft_token_ids, dim=1)  # torch marks what code for any K makes
    generated_kernels(step_module._decide, step, inputs, target, params)
    assert found
    assert are_spelled_alike(found)


def test_kernels_of_a_sampled_step_compile(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=0)
    kernels = _kernels(8192, num_drafts=0, num_requests=8, sampling=sampling)
    assert kernels
    for name, source in kernels.items():
        assert compile_kernel(name, source, folder=tmp_path) >= 1


# Not `synthetic`, which wants rates: test_compiled_choices compiles it on a GPU.
@pytest.mark.parametrize(
    "rule",
    [
        "block",
        *(pytest.param(name, marks=pytest.mark.every_case) for name in ("typical", "relaxed")),
    ],
)
def test_kernels_of_other_rules_compile(rule: str, tmp_path: Path) -> None:
    temperature = 0.0 if rule == "relaxed" else 0.8
    kernels = _kernels(
        8192,
        num_drafts=3,
        num_requests=8,
        sampling=SamplingParams(temperature=temperature, seed=0),
        rule=rule,
        keep_draft_probs=rule == "block",
    )
    assert kernels
    for name, source in kernels.items():
        assert compile_kernel(name, source, folder=tmp_path) >= 1


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.every_case), 1.0])
def test_kernels_of_a_step_with_processors_and_logprobs_compile(
    temperature: float, tmp_path: Path
) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.2,
        dry_multiplier=0.5,
        logit_bias=((1, 1.0),),
        bad_words=((1, 2), (3,)),
        logprobs=2,
        logprobs_kind="processed",
    )
    kernels = _kernels(8192, num_drafts=3, num_requests=8, sampling=sampling)
    assert kernels
    for name, source in kernels.items():
        assert compile_kernel(name, source, folder=tmp_path) >= 1
