"""A step's result in one request: accepted tokens, the next drafts, and whether it ends.

`Ledger.commit` calls this for every entry of a schedule; beside the scheduler nobody else moves a
request on.

Letters: K drafts per step.
"""

from mtp_research.decode.limits import cut_emitted
from mtp_research.decode.request import FinishReason, Request, Status
from mtp_research.decode.schedule import Scheduled
from mtp_research.decode.scheduler import Scheduler


def commit_entry(
    scheduler: Scheduler,
    entry: Scheduled,
    *,
    emitted: list[int],
    drafts: list[int],
    is_finite: bool,
) -> None:
    """Apply a step's result to one request; nothing if it ended while the step ran.

    Args:
        scheduler: whose schedule the entry is from.
        entry: what was scheduled.
        emitted: accepted drafts and the bonus token; ignored where nothing was sampled.
        drafts: proposals for the next step, at most K; ignored inside a prompt.
        is_finite: False where target logits were not finite; ends a request that had no drafts.
    """
    request = entry.request
    if request.status is Status.FINISHED:
        return
    request.num_target_forwards += not entry.is_prefill
    if not (entry.samples or entry.resumes):
        if request.status is Status.RUNNING:
            scheduler.blocks.publish(request, num_rows=entry.end_position)
        return
    request.num_in_flight -= 1
    had_drafts = bool(request.draft_token_ids)
    if not entry.samples:  # recomputed after a preemption: the next token is known
        _continue(scheduler, request, drafts)
        return
    if not is_finite and not had_drafts:
        if entry.is_prefill:
            request.num_computed_tokens = entry.first_position  # these rows broke
        scheduler.finish(request, FinishReason.NON_FINITE)
        return
    request.note_round(num_emitted=len(emitted))
    if not is_finite:
        # A draft can break the rows before it: attention weighs its value by 0, and 0 * NaN is
        # NaN. The newest token's row is run again alone; it ends the request if it breaks.
        _continue(scheduler, request, [])
        return
    kept, reason = cut_emitted(request, emitted, max_model_len=scheduler.max_model_len)
    request.token_ids.extend(kept)
    _continue(scheduler, request, drafts)
    if reason is not None:
        scheduler.finish(request, reason)


def _continue(scheduler: Scheduler, request: Request, drafts: list[int]) -> None:
    """Go on after the newest token, with the drafts whose rows stay inside the context."""
    if request.status is Status.WAITING:  # preempted while the step ran
        request.restart()
        return
    num_tokens = len(request.token_ids)
    request.num_computed_tokens = num_tokens - 1
    scheduler.blocks.publish(request, num_rows=num_tokens - 1)
    request.draft_token_ids = drafts[: scheduler.max_model_len - num_tokens]
