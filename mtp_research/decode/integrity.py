"""Invariants of live requests that hold between steps; `Scheduler.check_integrity` asks."""

from collections.abc import Iterable, Sequence

from mtp_research.decode.request import Request


def check_slots(running: Sequence[Request], *, free_slots: Sequence[int]) -> None:
    """Assert that every running request has a slot of its own, and that no slot is lost."""
    slots = [request.slot for request in running if request.slot is not None]
    assert len(slots) == len(running), "a running request has no slot"
    assert sorted([*slots, *free_slots]) == list(range(len(slots) + len(free_slots))), (
        f"slots in use: {slots}"
    )


def check_progress(running: Sequence[Request], *, block_size: int) -> None:
    """Assert that requests hold accepted tokens only, and pages for every row they computed."""
    for request in running:
        assert min(request.token_ids) >= 0, f"{request.request_id} holds a placeholder token"
        assert request.num_computed_tokens < request.num_tokens + request.num_in_flight, (
            f"{request.request_id} is ahead of its text"
        )
        covered = len(request.block_ids) * block_size
        assert covered >= request.num_computed_tokens, (
            f"{request.request_id} owns {covered} slots, too few"
        )


def check_waiting(waiting: Iterable[Request]) -> None:
    """Assert that requests that wait hold nothing."""
    for request in waiting:
        assert not request.block_ids, f"{request.request_id} waits and holds blocks"
        assert request.slot is None, f"{request.request_id} waits and holds a slot"
