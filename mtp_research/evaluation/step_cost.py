"""Where a step's time goes, and what speed-up a condition's acceptance and its own costs give.

    predicted ratio = tau / (1 + K c + v)

tau is the acceptance length. The unit is what a K = 0 step of the same batch size and temperature
spends on target and verification; c is one draft pass, v what a step with drafts spends on target
and verification beyond that unit. Host time is in neither, so it is the first thing to look at
where the measured ratio lies below the predicted one.

Source of the model: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, with the cost of
verification added. Letter: K drafts per step.
"""

from dataclasses import dataclass

from mtp_research.evaluation.speed import divide


@dataclass(frozen=True)
class StepParts:
    """Seconds of the steps without prompt rows, over all passes.

    Attributes:
        num_steps: how many there were.
        target_s: target forward and logits.
        verify_s: logit processors, verification, new frontier.
        draft_s: all draft passes.
        host_s: the rest of the steps' wall time.
    """

    num_steps: int
    target_s: float
    verify_s: float
    draft_s: float
    host_s: float


@dataclass(frozen=True)
class StepCost:
    """Mean seconds of a step without prompt rows by part, and the acceptance model.

    Attributes:
        target_s: see `StepParts`; all four per step.
        verify_s: likewise.
        draft_s: likewise.
        host_s: likewise.
        draft_cost: c, one draft pass in units of the baseline's target + verify; None without one.
        verify_cost: v, target + verify beyond one unit; None without a baseline.
        host_cost: host time in the same units; None without a baseline.
        predicted_ratio: tau / (1 + K c + v); None without a baseline or acceptance length.
    """

    target_s: float
    verify_s: float
    draft_s: float
    host_s: float
    draft_cost: float | None
    verify_cost: float | None
    host_cost: float | None
    predicted_ratio: float | None


def cost_of(
    parts: StepParts | None,
    baseline: StepParts | None,
    *,
    num_speculative_tokens: int,
    acceptance_length: float | None,
) -> StepCost | None:
    """Mean step by part and the acceptance model; None where the parts were not measured."""
    if parts is None or not parts.num_steps:
        return None
    target, verify, draft, host = (
        seconds / parts.num_steps
        for seconds in (parts.target_s, parts.verify_s, parts.draft_s, parts.host_s)
    )
    unit = None
    if baseline is not None:
        unit = divide(baseline.target_s + baseline.verify_s, baseline.num_steps)
    if not unit:
        return StepCost(target, verify, draft, host, None, None, None, None)
    draft_cost = draft / unit / num_speculative_tokens if num_speculative_tokens else 0.0
    verify_cost = (target + verify) / unit - 1
    step = 1 + num_speculative_tokens * draft_cost + verify_cost
    ratio = divide(acceptance_length, step)
    return StepCost(target, verify, draft, host, draft_cost, verify_cost, host / unit, ratio)
