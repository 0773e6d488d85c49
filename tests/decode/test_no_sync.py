"""What runs between a step's logits and its tokens never waits for the device.

On a CPU nothing waits, so the operations themselves are watched: the ones that read a value on the
host, whose result has a size that depends on values, or that copy a host list. Where tensors are
made from host values, the meta device stands for the GPU.
"""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mtp_research.config.schema import VerifyOptions
from mtp_research.decode.sampling.grammar import apply_bitmask
from mtp_research.decode.sampling.processors import process_logits
from mtp_research.decode.sampling.sampling import (
    BatchSampling,
    sampling_tensors,
    step_logprobs,
    target_probabilities,
)
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.batch import start_texts
from mtp_research.decode.schedule.request import Request
from mtp_research.decode.slot_state import SlotState, to_device
from mtp_research.decode.verify.verify_rules import RULES, text_is_thinking
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from tests.decode.test_verify import make_inputs

CPU, META = torch.device("cpu"), torch.device("meta")
FORBIDDEN = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
}


class NoSync(TorchDispatchMode):
    """Fails at the first operation that would wait for the device, which is also the host if CPU.

    Args:
        device: stands for the GPU.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert name not in FORBIDDEN, f"{name} waits for the device"
        if name == "aten::lift_fresh":  # the end of torch.tensor(LIST)
            assert args[0].device != self._device, f"{name} waits for the device"
        if name == "aten::_to_copy" and args[0].device != kwargs.get("device", args[0].device):
            assert kwargs.get("non_blocking"), f"{name} from the host waits for the device"
        if name in ("aten::index.Tensor", "aten::index_put_", "aten::index_put"):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, f"{name} with a mask has a size that depends on values"
        return func(*args, **(kwargs or {}))


class NoHostValues(TorchFunctionMode):
    """Fails at host values that go to META and would wait, of which a dispatch mode sees nothing.

    Those are `torch.tensor(LIST, device=META)` and a number that is assigned to a single element: a
    GPU gets it in a copy, while a row or more is filled by a kernel.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_waiting = func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == META
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor):
            is_waiting = args[0].device == META and args[0][args[1]].dim() == 0
        assert not is_waiting, f"torch.{func.__name__} of host values waits for the device"
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda x: x.sum().item(), id="item"),
        pytest.param(lambda x: x[x > 0], id="mask"),
        pytest.param(lambda x: torch.tensor([1.0, 2.0]), id="host-list"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: bool((x > 0).any()), id="bool"),
    ],
)
def test_watch_finds_operations_that_wait(operation) -> None:
    with pytest.raises(AssertionError, match=r"waits|depends"), NoSync():
        operation(torch.ones(3))


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(lambda: torch.tensor([1.0, 2.0], device=META), id="host-list"),
        pytest.param(lambda: torch.ones(2).to(META), id="copy"),
        pytest.param(lambda: torch.ones(2, device=META).__setitem__(1, 3), id="element"),
    ],
)
def test_watch_finds_copies_from_the_host_that_wait(operation) -> None:
    with pytest.raises(AssertionError, match="waits"), NoSync(META), NoHostValues():
        operation()
    with NoSync(META), NoHostValues():
        to_device([1.0, 2.0], dtype=torch.float32, device=META)
        torch.ones(2, 3, device=META)[1] = 3


OPTIONS = {
    "synthetic": VerifyOptions(synthetic_length=2.5, synthetic_schedule="geometric"),
    "relaxed": VerifyOptions(relaxed_thinking_token_ids=(4, 5)),
}


@pytest.mark.parametrize(
    "draft_probs", [None, torch.full((3, 2, 6), 1 / 6)], ids=["hot", "sampled"]
)
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.9, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_rule_does_not_wait(rule: str, fields: dict, draft_probs) -> None:
    inputs = make_inputs(
        torch.randn(3, 3, 6),
        [[1, 2], [7, -1], [0, 3]],
        draft_probs=draft_probs,
        options=OPTIONS.get(rule),
    )
    params = [SamplingParams(temperature=t, **fields) for t in (0.0, 0.5, 1.0)]
    inputs = inputs._replace(params=sampling_tensors(params, device=CPU))
    text, num_tokens = torch.zeros(3, 9, dtype=torch.int64), torch.tensor([2, 3, 4])
    with NoSync():
        thinking = text_is_thinking(text, num_tokens=num_tokens, begin=4, end=5)
        RULES[rule].function(inputs._replace(is_thinking=thinking))


def _requests_that_use_everything() -> list[Request]:
    params = [
        SamplingParams(
            temperature=0.8,
            top_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.2,
            dry_multiplier=0.5,
            logit_bias=((1, 1.0),),
            allowed_token_ids=(1, 2, 3),
            bad_words=((1, 2), (3,)),
            stop_token_ids=(2,),
            min_tokens=3,
            logprobs=2,
            logprobs_kind=kind,
        )
        for kind in ("raw", "processed")
    ]
    return [
        Request(request_id=str(row), prompt_token_ids=(1, 2), sampling=p)
        for row, p in enumerate(params)
    ]


def _slot_state(device: torch.device) -> SlotState:
    sizes = {"max_model_len": 9, "hidden_size": 4, "vocab_size": 6, "keep_draft_probs": False}
    plan = DraftPlan(POLICIES["eagle"], 2, 1)
    return SlotState(3, plan=plan, **sizes, dtype=torch.float32, device=device)


def test_texts_of_admitted_requests_are_written_without_waiting() -> None:
    slot_state = _slot_state(META)
    requests = [Request(str(slot), (1, 2), SamplingParams(), slot=slot) for slot in (2, 0)]
    with NoSync(META), NoHostValues():
        start_texts(requests, slot_state=slot_state)


def test_texts_of_admitted_requests_lie_in_their_slots() -> None:
    slot_state = _slot_state(CPU)
    slot_state.text.fill_(7)
    slot_state.draft_token_ids.fill_(5)
    long = Request("long", (1, 2, 3), SamplingParams(), slot=2, num_cached_tokens=2)
    start_texts([long, Request("short", (4,), SamplingParams(), slot=0)], slot_state=slot_state)
    assert slot_state.text[2, :4].tolist() == [1, 2, 3, 7]
    assert slot_state.text[0, :2].tolist() == [4, 7]
    assert slot_state.num_tokens.tolist() == [1, 1, 3, 1]
    assert slot_state.first_row.tolist() == [0, 0, 2, 0]
    assert slot_state.draft_token_ids.tolist() == [[-1, -1], [5, 5], [-1, -1], [5, 5]]
    start_texts([], slot_state=slot_state)


def test_tensors_of_a_new_batch_are_made_without_waiting() -> None:
    batch = BatchSampling(DraftPlan(POLICIES["eagle"], 2, 1), vocab_size=6, device=META)
    # Every admission and every end of a request makes them again.
    with NoSync(META), NoHostValues():
        tensors = batch.tensors(_requests_that_use_everything())
    assert tensors.processors is not None
    assert tensors.logprobs is not None
    made = (tensors.temperature, tensors.logprobs.is_raw, *tensors.processors.penalties)
    made += (tensors.processors.bias, tensors.processors.bad_words.last, *tensors.processors.dry)
    assert {tensor.device for tensor in made} == {META}


def test_processors_masks_and_logprobs_do_not_wait() -> None:
    sampling = BatchSampling(DraftPlan(POLICIES["eagle"], 2, 1), vocab_size=6, device=CPU)
    tensors = sampling.tensors(_requests_that_use_everything())
    logits, text = torch.randn(2, 3, 6), torch.ones(2, 9, dtype=torch.int64)
    num_tokens = torch.tensor([[3, 4, 5], [2, 3, 4]])
    bitmask = torch.full((2, 3, 1), -1, dtype=torch.int32)
    sampled = torch.tensor([[1, 2, -1], [3, -1, -1]])
    with NoSync():
        processed = process_logits(logits, tensors.processors, text=text, num_tokens=num_tokens)
        processed = apply_bitmask(processed, bitmask)
        target_probabilities(processed, tensors)
        step_logprobs(logits, processed, sampled_token_ids=sampled, params=tensors)
