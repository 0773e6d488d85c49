"""The order of service: how far priorities reach, and that everybody's turn comes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.ledger import commit_entry
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import Request, Status
from mtp_research.decode.schedule.scheduler import Schedule, Scheduler, WaitingQueue
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan

STEPS = 5


def _request(name: str, *, prompt: int = 3, priority: int = 0, wanted: int = 2) -> Request:
    sampling = SamplingParams(max_new_tokens=wanted)
    return Request(
        request_id=name, prompt_token_ids=(1,) * prompt, sampling=sampling, priority=priority
    )


def _scheduler(*, num_blocks: int = 32, num_slots: int = 2, budget: int = 8) -> Scheduler:
    engine = EngineConfig(
        max_num_requests=num_slots,
        max_num_batched_tokens=budget,
        max_prefill_chunk=8,
        steps_per_priority=STEPS,
    )
    return Scheduler(
        BlockManager(num_blocks, block_size=4),
        DraftPlan(POLICIES["eagle"], 1, 1),
        engine=engine,
        max_model_len=64,
    )


def _step(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.schedule()
    for entry in schedule.entries:
        commit_entry(scheduler, entry, emitted=[7], drafts=[5], is_finite=True)
    scheduler.check_integrity()
    return schedule


@settings(max_examples=60)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-2, 2), st.integers(1, 20), st.integers(1, 6)),
        min_size=2,
        max_size=25,
    ),
    num_blocks=st.integers(9, 24),
    num_slots=st.integers(1, 3),
)
def test_schedule_overtaking_ends_with_the_head_start(
    arrivals: list[tuple[int, int, int, int]], num_blocks: int, num_slots: int
) -> None:
    scheduler = _scheduler(num_blocks=num_blocks, num_slots=num_slots)
    arrived: dict[str, int] = {}
    requests: dict[str, Request] = {}
    admitted: set[str] = set()
    step, todo = 0, list(arrivals)
    while todo or scheduler.has_work:
        while todo and todo[0][0] <= 0:
            _, priority, prompt, wanted = todo.pop(0)
            name = str(len(requests))
            requests[name] = _request(name, prompt=prompt, priority=priority, wanted=wanted)
            arrived[name] = step
            scheduler.add(requests[name])
        if todo:
            todo[0] = (todo[0][0] - 1, *todo[0][1:])
        if not scheduler.has_work:
            step, scheduler._num_steps = step + 1, scheduler._num_steps + 1
            continue
        schedule = _step(scheduler)
        step += 1
        for request in schedule.admitted:
            for other in scheduler.waiting:
                if other.request_id in admitted:
                    continue  # it was preempted: it has been served before
                levels = other.priority - request.priority
                lead = arrived[request.request_id] - arrived[other.request_id]
                assert lead < max(levels * STEPS, 0) or lead == levels == 0 or lead < 0
            admitted.add(request.request_id)
    assert all(request.status is Status.FINISHED for request in requests.values())


def test_schedule_stream_of_urgent_requests_cannot_starve_another() -> None:
    scheduler = _scheduler(num_slots=1)
    patient = _request("patient", priority=2)
    scheduler.add(_request("0", priority=0))
    scheduler.add(patient)
    num_steps = 0
    while patient.status is Status.WAITING:
        num_steps += 1
        scheduler.add(_request(str(num_steps), priority=0))
        _step(scheduler)
    # Two levels below: those that come within 2 * 5 steps go first, two steps each.
    assert num_steps <= 2 * (2 * STEPS + 1) + 1
    assert num_steps > 2 * STEPS


def test_schedule_short_requests_do_not_overtake_a_long_one_that_must_wait_for_room() -> None:
    scheduler = _scheduler(num_blocks=12, num_slots=4, budget=64)
    scheduler.add(_request("running", prompt=20, wanted=3))
    _step(scheduler)
    scheduler.add(_request("long", prompt=24))  # needs more blocks than are free
    scheduler.add(_request("short", prompt=1))
    order = []
    while scheduler.has_work:
        order += [request.request_id for request in _step(scheduler).admitted]
    assert order == ["long", "short"]


def test_schedule_long_prompt_neither_stops_decoding_nor_is_stopped_by_it() -> None:
    scheduler = _scheduler(num_blocks=64, num_slots=3, budget=6)
    for name in "ab":
        scheduler.add(_request(name, wanted=40))
    while any(request.is_prefilling for request in scheduler.requests()):
        _step(scheduler)
    long = _request("long", prompt=40)
    scheduler.add(long)
    num_steps = 0
    while long.is_prefilling:
        rows = {e.request.request_id: e.num_scheduled_tokens for e in _step(scheduler).entries}
        assert (rows["a"], rows["b"]) == (2, 2)  # K + 1 rows each, in every step
        assert rows["long"] >= 2  # the K + 1 rows that its own slot stands for
        num_steps += 1
    assert num_steps == 20


def test_queue_left_by_a_waiting_request_goes_on_with_the_next() -> None:
    queue = WaitingQueue(steps_per_priority=3)
    requests = [_request(name) for name in "abc"]
    for request in requests:
        queue.arrive(request, step=0)
    queue.leave(requests[0])
    queue.leave(requests[1])
    assert [request.request_id for request in queue] == ["c"]
    assert queue.pop() is requests[2]
    assert len(queue) == 0
    assert queue.knows("c")
    assert not queue.knows("a")


def test_queue_id_used_again_does_not_meet_its_former_self() -> None:
    queue = WaitingQueue(steps_per_priority=3)
    old, new = _request("a"), _request("a")
    queue.arrive(old, step=0)
    queue.leave(old)
    queue.arrive(new, step=0)
    assert queue.pop() is new
    with pytest.raises(IndexError):
        queue.pop()
