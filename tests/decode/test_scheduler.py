"""Who runs, who waits, who is preempted: the scheduler alone, with results dictated by the test."""

import random

import pytest

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.ledger import commit_entry
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.schedule.blocks import BlockManager
from mtp_research.decode.schedule.request import FinishReason, Request, Status
from mtp_research.decode.schedule.scheduler import Schedule, Scheduler
from mtp_research.policy.fields import POLICIES
from mtp_research.policy.plan import DraftPlan
from mtp_research.runtime.errors import ConfigError


def _scheduler(**changes: int) -> Scheduler:
    settings = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_requests": 4,
        "max_num_batched_tokens": 32,
        "max_prefill_chunk": 8,
        "max_model_len": 64,
    } | changes
    engine = EngineConfig(**settings)
    assert engine.num_blocks is not None
    assert engine.max_model_len is not None
    return Scheduler(
        BlockManager(engine.num_blocks, block_size=engine.block_size),
        DraftPlan(POLICIES["eagle"], 3, 1),
        engine=engine,
        max_model_len=engine.max_model_len,
    )


def _request(name: str, *, prompt: int = 3, priority: int = 0, **sampling) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(**sampling),
        priority=priority,
    )


def _commit(
    scheduler: Scheduler, schedule: Schedule, *, emitted: dict[str, list[int]] | None = None
) -> None:
    """Every scheduled request emits one token (or what `emitted` says) and gets K drafts."""
    for entry in schedule.entries:
        commit_entry(
            scheduler,
            entry,
            emitted=(emitted or {}).get(entry.request.request_id, [7]),
            drafts=[5] * scheduler.plan.num_speculative_tokens,
            is_finite=True,
        )
    scheduler.check_integrity()


def _rows(schedule: Schedule) -> dict[str, int]:
    return {entry.request.request_id: entry.num_scheduled_tokens for entry in schedule.entries}


def _finished_order(scheduler: Scheduler, requests: list[Request]) -> list[str]:
    order: list[str] = []
    while scheduler.has_work:
        _commit(scheduler, scheduler.schedule())
        done = {request.request_id for request in requests if request.status is Status.FINISHED}
        order += sorted(done - set(order))
    return order


def test_schedule_same_priority_is_first_come_first_served() -> None:
    scheduler = _scheduler(max_num_requests=1)
    requests = [_request(name, max_new_tokens=2) for name in "cab"]
    for request in requests:
        scheduler.add(request)
    assert _finished_order(scheduler, requests) == ["c", "a", "b"]


def test_schedule_smaller_priority_number_is_served_first() -> None:
    scheduler = _scheduler(max_num_requests=1)
    requests = [
        _request(name, priority=priority, max_new_tokens=2)
        for name, priority in (("late", 5), ("soon", 1), ("first", -3), ("too", 1))
    ]
    for request in requests:
        scheduler.add(request)
    assert _finished_order(scheduler, requests) == ["first", "soon", "too", "late"]


def test_add_after_others_finished_keeps_order_of_arrival() -> None:
    scheduler = _scheduler(max_num_requests=1)
    early = [_request(name, max_new_tokens=1) for name in "abc"]
    for request in early:
        scheduler.add(request)
    _commit(scheduler, scheduler.schedule())  # a is done; b and c wait
    late = [_request(name, max_new_tokens=1) for name in "de"]
    for request in late:
        scheduler.add(request)
    assert _finished_order(scheduler, [*early[1:], *late]) == ["b", "c", "d", "e"]


def test_schedule_prompt_is_read_in_chunks_and_samples_at_its_end() -> None:
    scheduler = _scheduler(max_prefill_chunk=4)
    request = _request("a", prompt=10, max_new_tokens=4)
    scheduler.add(request)
    counts = []
    while not request.output_token_ids:
        schedule = scheduler.schedule()
        counts += [entry.num_scheduled_tokens for entry in schedule.entries]
        _commit(scheduler, schedule)
    assert counts == [4, 4, 2]
    assert _rows(scheduler.schedule()) == {"a": 4}  # the newest token and three drafts


def test_schedule_budget_serves_decoding_before_prompts() -> None:
    scheduler = _scheduler(max_num_batched_tokens=16, max_prefill_chunk=16)
    for name in "ab":
        scheduler.add(_request(name, max_new_tokens=9))
    _commit(scheduler, scheduler.schedule())
    scheduler.add(_request("long", prompt=20, priority=-1))
    scheduler.add(_request("next", prompt=20))
    assert _rows(scheduler.schedule()) == {"a": 4, "b": 4, "long": 8}


def test_separate_steps_take_turns_and_starve_nobody() -> None:
    scheduler = _scheduler(mixed_batches=False, max_prefill_chunk=4)
    decoding = _request("decoding", max_new_tokens=40)
    scheduler.add(decoding)
    _commit(scheduler, scheduler.schedule())
    long = _request("long", prompt=40, max_new_tokens=2)
    scheduler.add(long)
    steps: list[set[str]] = []
    while not long.output_token_ids:
        # Each of these ends with its prompt: were prompts always first, nobody would decode.
        scheduler.add(_request(f"short{len(steps)}", max_new_tokens=1))
        schedule = scheduler.schedule()
        kinds = {entry.is_prefill for entry in schedule.entries}
        assert len(kinds) == 1, "prompt rows and decoding rows in one step"
        steps.append(set(_rows(schedule)))
        _commit(scheduler, schedule)
    assert ["decoding" in names for names in steps] == [index % 2 == 0 for index in range(20)]
    assert ["long" in names for names in steps] == [index % 2 == 1 for index in range(20)]


def test_separate_steps_of_the_only_kind_follow_each_other() -> None:
    scheduler = _scheduler(mixed_batches=False, max_prefill_chunk=4)
    request = _request("a", prompt=12, max_new_tokens=4)
    scheduler.add(request)
    kinds = []
    while scheduler.has_work:
        schedule = scheduler.schedule()
        kinds += [entry.is_prefill for entry in schedule.entries]
        _commit(scheduler, schedule)
    assert kinds == [True] * 3 + [False] * 3


@pytest.mark.parametrize("mixed", [True, False])
def test_schedule_never_exceeds_budget_for_random_arrivals(mixed: bool) -> None:
    rng = random.Random(0)
    scheduler = _scheduler(
        max_num_requests=5, max_num_batched_tokens=21, num_blocks=24, mixed_batches=mixed
    )
    requests = [
        _request(str(i), prompt=rng.randint(1, 30), max_new_tokens=rng.randint(1, 12))
        for i in range(40)
    ]
    waiting = list(requests)
    while waiting or scheduler.has_work:
        for _ in range(min(rng.randint(0, 2), len(waiting))):
            scheduler.add(waiting.pop())
        if not scheduler.has_work:
            continue
        schedule = scheduler.schedule()
        assert sum(_rows(schedule).values()) <= 21
        assert all(count > 0 for count in _rows(schedule).values())
        rows = {
            entry.request.request_id: [7] * rng.randint(1, 1 + len(entry.request.draft_token_ids))
            for entry in schedule.entries
        }
        _commit(scheduler, schedule, emitted=rows)
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert len(request.output_token_ids) == request.sampling.max_new_tokens
    assert sum(request.num_preemptions for request in requests) > 0
    assert scheduler.blocks.num_free_blocks == 24


def test_schedule_budget_too_small_for_a_full_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r">= max_num_requests \* \(K \+ 1\) = 16, got 15"):
        _scheduler(max_num_batched_tokens=15)


def test_schedule_preempts_lowest_rank_first() -> None:
    # Three requests of ten slots fill the pool; growing by one block needs a victim.
    scheduler = _scheduler(num_blocks=9, max_num_requests=3)
    for name, priority in (("keep", 0), ("worst", 2), ("middle", 1)):
        scheduler.add(_request(name, prompt=4, priority=priority, max_new_tokens=20))
    _commit(scheduler, scheduler.schedule())
    assert len(scheduler.running) == 3
    preempted: list[str] = []
    while not preempted:
        schedule = scheduler.schedule()
        preempted = [request.request_id for request in schedule.preempted]
        _commit(scheduler, schedule)
    assert preempted == ["worst"]
    assert "worst" not in _rows(schedule)


def test_preempted_request_holds_nothing_and_is_recomputed_from_the_start() -> None:
    scheduler = _scheduler(num_blocks=9, max_num_requests=3, max_prefill_chunk=32)
    victim = _request("victim", prompt=4, priority=2, max_new_tokens=20)
    for request in (_request("a", max_new_tokens=20), _request("b", max_new_tokens=20), victim):
        scheduler.add(request)
    while not victim.num_preemptions:
        _commit(scheduler, scheduler.schedule())
    assert victim.status is Status.WAITING
    assert victim.block_ids == []
    assert victim.slot is None
    assert victim.num_computed_tokens == 0
    assert victim.draft_token_ids == []
    while victim.status is Status.WAITING:
        schedule = scheduler.schedule()
        if victim.status is Status.WAITING:
            _commit(scheduler, schedule)
    # Its newest token is not run with the prompt: it gets drafts again, as if nothing had been.
    assert _rows(schedule)["victim"] == victim.num_tokens - 1
    num_tokens = victim.num_tokens
    _commit(scheduler, schedule)
    assert victim.num_tokens == num_tokens
    assert victim.draft_token_ids == [5, 5, 5]
    assert victim.num_target_forwards == len(victim.output_token_ids) - 1


def test_add_text_that_can_never_fit_names_needed_and_available_blocks() -> None:
    scheduler = _scheduler(num_blocks=8)
    needed = -(-DraftPlan(POLICIES["eagle"], 3, 1).num_slots_needed(12 + 20) // 4)
    with pytest.raises(ConfigError, match=f"needs {needed} blocks, the pool has 8"):
        scheduler.add(_request("a", prompt=12, max_new_tokens=20))
    scheduler.add(_request("a", prompt=7, max_new_tokens=20))  # needs exactly eight
    assert _finished_order(scheduler, scheduler.requests()) == ["a"]


def test_add_empty_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one token"):
        _scheduler().add(_request("a", prompt=0))


@pytest.mark.parametrize("prompt", [64, 65])
def test_add_prompt_that_fills_the_context_is_refused(prompt: int) -> None:
    with pytest.raises(ConfigError, match=f"max_model_len=64, got {prompt} tokens"):
        _scheduler().add(_request("a", prompt=prompt))


@pytest.mark.parametrize("num_steps", [0, 1])
def test_add_id_in_use_is_refused_and_free_again_later(num_steps: int) -> None:
    scheduler = _scheduler()
    first = _request("a", max_new_tokens=9)
    scheduler.add(first)
    for _ in range(num_steps):
        _commit(scheduler, scheduler.schedule())
    with pytest.raises(ConfigError, match="'a' is taken"):
        scheduler.add(_request("a"))
    scheduler.finish(first, FinishReason.ABORT)
    scheduler.add(_request("a"))


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_finish_by_abort_gives_everything_back(num_steps: int) -> None:
    scheduler = _scheduler(max_prefill_chunk=4)
    request, other = _request("a", prompt=6, max_new_tokens=9), _request("b", max_new_tokens=9)
    scheduler.add(request)
    scheduler.add(other)
    for _ in range(num_steps):
        _commit(scheduler, scheduler.schedule())
    scheduler.finish(request, FinishReason.ABORT)
    scheduler.check_integrity()
    assert scheduler.requests() == [other]
    assert request.block_ids == []
    scheduler.finish(other, FinishReason.ABORT)
    assert scheduler.blocks.num_free_blocks == scheduler.blocks.num_blocks


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_commit_more_tokens_than_wanted_are_cut(max_new_tokens: int) -> None:
    scheduler = _scheduler()
    request = _request("a", max_new_tokens=max_new_tokens)
    scheduler.add(request)
    _commit(scheduler, scheduler.schedule())
    if max_new_tokens > 1:
        _commit(scheduler, scheduler.schedule(), emitted={"a": [5, 5, 5, 9]})
        assert request.num_accepted_per_round == [3]  # as the verifier saw it
    assert request.output_token_ids == (7, 5, 5)[:max_new_tokens]
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("emitted", "kept"), [([5, 9, 5, 7], (7, 5, 9)), ([9, 5, 5, 7], (7, 9)), ([5, 9], (7, 5, 9))]
)
def test_commit_stop_token_inside_drafts_cuts_after_it(
    emitted: list[int], kept: tuple[int, ...]
) -> None:
    scheduler = _scheduler()
    request = _request("a", max_new_tokens=20, stop_token_ids=(9,))
    scheduler.add(request)
    _commit(scheduler, scheduler.schedule())
    _commit(scheduler, scheduler.schedule(), emitted={"a": emitted})
    assert request.output_token_ids == kept
    assert request.finish_reason is FinishReason.STOP
    assert request.num_accepted_per_round == [len(emitted) - 1]


def test_commit_stop_token_behind_the_length_limit_does_not_count() -> None:
    scheduler = _scheduler()
    request = _request("a", max_new_tokens=2, stop_token_ids=(9,))
    scheduler.add(request)
    _commit(scheduler, scheduler.schedule())
    _commit(scheduler, scheduler.schedule(), emitted={"a": [5, 9]})
    assert request.output_token_ids == (7, 5)
    assert request.finish_reason is FinishReason.LENGTH


def test_commit_drafts_never_reach_beyond_the_context() -> None:
    scheduler = _scheduler(max_model_len=8)
    request = _request("a", prompt=3, max_new_tokens=50)
    scheduler.add(request)
    while request.status is not Status.FINISHED:
        schedule = scheduler.schedule()
        for entry in schedule.entries:
            assert entry.first_position + entry.num_scheduled_tokens <= 8
        _commit(scheduler, schedule)
    assert request.num_tokens == 8
    assert request.finish_reason is FinishReason.LENGTH


def test_commit_non_finite_row_with_drafts_is_tried_again_without() -> None:
    scheduler = _scheduler()
    request = _request("a", max_new_tokens=9)
    scheduler.add(request)
    _commit(scheduler, scheduler.schedule())
    (entry,) = scheduler.schedule().entries
    commit_entry(scheduler, entry, emitted=[], drafts=[5, 5, 5], is_finite=False)
    assert request.status is Status.RUNNING
    assert request.num_accepted_per_round == [0]
    (entry,) = scheduler.schedule().entries
    assert entry.num_scheduled_tokens == 1
    commit_entry(scheduler, entry, emitted=[], drafts=[], is_finite=False)
    assert request.finish_reason is FinishReason.NON_FINITE
    assert request.output_token_ids == (7,)


def test_commit_non_finite_row_ends_only_that_request() -> None:
    scheduler = _scheduler()
    bad, good = _request("bad"), _request("good")
    scheduler.add(bad)
    scheduler.add(good)
    for entry in scheduler.schedule().entries:
        commit_entry(scheduler, entry, emitted=[7], drafts=[], is_finite=entry.request is good)
    assert bad.finish_reason is FinishReason.NON_FINITE
    assert bad.output_token_ids == ()
    assert good.output_token_ids == (7,)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("max_new_tokens", -1),
    ],
)
def test_sampling_params_out_of_range_name_the_field(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"sampling.{field} must be"):
        SamplingParams(**{field: value})


def test_free_places_are_given_away_together() -> None:
    scheduler = _scheduler(admit_together=3)
    requests = [_request(str(n), max_new_tokens=2 + n) for n in range(9)]
    for request in requests:
        scheduler.add(request)
    admitted = []
    while scheduler.has_work:
        schedule = scheduler.schedule()
        admitted.append([request.request_id for request in schedule.admitted])
        _commit(scheduler, schedule)
    # Places come free one a step; the last two who wait get theirs as soon as both have one.
    assert [names for names in admitted if names] == [
        ["0", "1", "2", "3"],
        ["4", "5", "6"],
        ["7", "8"],
    ]
    assert all(request.status is Status.FINISHED for request in requests)


def test_places_are_filled_over_several_steps_where_the_budget_ends_first() -> None:
    scheduler = _scheduler(admit_together=4, max_num_batched_tokens=16)
    for n in range(6):
        scheduler.add(_request(str(n), prompt=8, max_new_tokens=20))
    numbers = []
    for _ in range(3):
        schedule = scheduler.schedule()
        numbers.append(len(schedule.admitted))
        _commit(scheduler, schedule)
    assert numbers == [2, 1, 1]
