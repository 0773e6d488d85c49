"""Tensors of a batch: made once while the batch stays the same, masks made for every step."""

import pytest
import torch

from mtp_research.decode.graphs.capture import StaticParams
from mtp_research.decode.sampling.grammar import start_matcher
from mtp_research.decode.sampling.sampling import BatchSampling, LogprobTensors
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.request import Request
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from tests.decode.toy_grammar import PAIRS

CPU = torch.device("cpu")


def _request(name: str, **fields) -> Request:
    sampling = SamplingParams(**fields)
    request = Request(request_id=name, prompt_token_ids=(3, 4), sampling=sampling)
    if sampling.grammar is not None:
        request.matcher = start_matcher(sampling, vocab_size=128)
    return request


def _batch(**rule: bool) -> BatchSampling:
    return BatchSampling(DraftPlan(POLICIES["eagle"], 2, 1), vocab_size=128, device=CPU, **rule)


def test_tensors_follow_the_batch_and_are_kept_while_it_stays() -> None:
    batch, first, second = _batch(), _request("a", seed=1), _request("b", seed=2, temperature=1.0)
    together = batch.tensors([first, second])
    assert (together.processors, together.bitmask, together.logprobs) == (None, None, None)
    assert together.seed.tolist() == [1, 2]
    assert batch.tensors([first, second]) is together
    assert batch.tensors([second, first]).seed.tolist() == [2, 1]
    alone = batch.tensors([second])
    assert alone.seed.tolist() == [2]
    assert not alone.all_greedy
    assert batch.tensors([second, _request("a", seed=7)]).seed.tolist() == [2, 7]


def test_plain_greedy_requests_share_their_tensors_where_nothing_is_drawn() -> None:
    batch = _batch(draws_at_zero=False)
    names = [_request(name, seed=number) for number, name in enumerate("abcde", start=1)]
    three, five = batch.tensors(names[:3]), batch.tensors(names)
    assert batch.tensors(names[2:]) is not three  # made again for five
    four = batch.tensors(names[1:])
    for found, count in ((three, 3), (five, 5), (four, 4)):
        alike = _batch().tensors([_request(f"{i}", seed=0) for i in range(count)])
        for one, other in zip(found, alike, strict=True):
            same = one.equal(other) if isinstance(one, torch.Tensor) else one == other
            assert same
    for one, other in zip(four[:5], five[:5], strict=True):
        assert one.data_ptr() == other.data_ptr()
    assert batch.tensors([_request("f"), *names[:3]]) is four
    for other in ({"temperature": 1.0}, {"presence_penalty": 1.0}, {"logprobs": 2}):
        assert batch.tensors([*names[:1], _request("f", seed=9, **other)]).seed.tolist() == [1, 9]


def test_what_lies_in_place_is_not_copied_again_unless_there_is_more_of_it() -> None:
    batch, params = _batch(draws_at_zero=False), StaticParams(4, device=CPU)
    names = [_request(name) for name in "abcd"]
    batch.tensors(names)  # so that fewer of them share the memory
    for count in (2, 4, 3):
        tensors = batch.tensors(names[:count])
        params.upload(tensors)
        found = params.view(tensors, count)
        assert (found.temperature.tolist(), found.top_k.tolist()) == ([0.0] * count, [0] * count)
    held = set(map(id, params._copied.values()))
    params.upload(batch.tensors(names[:1]))
    assert set(map(id, params._copied.values())) == held
    sampled = batch.tensors([_request("e", temperature=0.5, top_k=3), *names[:3]])
    params.upload(sampled)
    assert params.view(sampled, 4).temperature.tolist() == [0.5, 0.0, 0.0, 0.0]
    tensors = batch.tensors(names[:3])
    params.upload(tensors)
    assert params.view(tensors, 3).temperature.tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("requests", "flags"),
    [
        ([{}, {"top_k": 5, "top_p": 0.5}], (True, True, 1, True)),  # greedy: nothing to truncate
        ([{}, {"temperature": 1.0}], (False, True, 1, False)),
        ([{"top_p": 0.5}, {"temperature": 1.0, "top_k": 5}], (False, False, 8, True)),
        ([{"temperature": 1.0, "top_p": 0.5}], (False, False, None, False)),
        ([{"temperature": 1.0, "min_p": 0.1}], (False, False, 1, False)),
    ],
)
def test_flags_say_what_is_truncated(
    requests: list[dict[str, float]], flags: tuple[bool, bool, int | None, bool]
) -> None:
    tensors = _batch().tensors([_request(f"{i}", **one) for i, one in enumerate(requests)])
    found = tensors.all_greedy, tensors.keeps_all, tensors.top_k_bound, tensors.every_top_k
    assert found == flags


def test_masks_follow_the_drafts_of_the_step() -> None:
    batch = _batch()
    request = _request("a", grammar=PAIRS, stop_token_ids=(1,))
    assert batch.tensors([request]).bitmask.tolist() == [[[-1] * 4] * 3]  # not made yet
    masks = []
    for drafts in ([10, 60], [10, 99], []):
        request.draft_token_ids = drafts
        masks.append(batch.bitmask([request])[0].tolist())
    unmasked = [-1] * 4
    assert masks[0][0] == masks[0][2] != masks[0][1]  # a pair ends where it began
    assert masks[1] == [masks[0][0], masks[0][1], unmasked]  # 99 is forbidden, nothing follows
    assert masks[2] == [masks[0][0], unmasked, unmasked]


def test_extras_are_asked_for_one_by_one() -> None:
    batch = _batch()
    assert batch.tensors([_request("a", presence_penalty=1.0)]).processors is not None
    tensors = batch.tensors([_request("a", logprobs=2), _request("b", logprobs=3)])
    assert tensors.processors is None
    assert tensors.logprobs is not None
    assert tensors.logprobs.num_top == 4  # 3 and 4 share a captured step


def test_logprobs_are_read_at_once_and_told_by_request() -> None:
    top = torch.arange(-1.0, -25.0, -1.0).view(2, 3, 4)  # 2 requests, 3 rows, 4 best tokens
    top[1, 1, 2:] = -torch.inf
    read = LogprobTensors(torch.arange(6.0).view(2, 3), torch.arange(24).view(2, 3, 4), top).read()
    assert read.of_request(0, num_tokens=0, num_top=4) == []
    assert read.of_request(0, num_tokens=1, num_top=2) == [(0.0, ((0, -1.0), (1, -2.0)))]
    first, second = read.of_request(1, num_tokens=2, num_top=3)
    assert first == (3.0, ((12, -13.0), (13, -14.0), (14, -15.0)))
    assert second == (4.0, ((16, -17.0), (17, -18.0)))  # the third has no probability
    assert read.of_request(1, num_tokens=3, num_top=0)[2] == (5.0, ())
