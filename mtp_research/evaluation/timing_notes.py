"""What a reader of the speeds has to know: passes, order, drift, interruptions, the cost model.

Letter: K drafts per step.
"""

from collections.abc import Iterator, Sequence

from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.speed import MAX_DRIFT
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.evaluation.tables import printable

_MAX_CHARACTERS = 200  # of a line from a results file


def timing_notes(
    conditions: Sequence[ConditionResult], summaries: Sequence[ConditionSummary]
) -> list[str]:
    """Paragraphs for under the tables, warnings first."""
    return [
        *_resumed(conditions),
        *_drift_warnings(summaries),
        *_order(conditions, summaries),
        *_captures(conditions),
        *_full(summaries),
        *_model(summaries),
    ]


def skipped_conditions(lines: object) -> list[str]:
    """Combinations of a grid that were left out, from the run record."""
    known = lines if isinstance(lines, list | tuple) else ()
    return [f"skipped: {printable(str(line), limit=_MAX_CHARACTERS)}" for line in known]


def _resumed(conditions: Sequence[ConditionResult]) -> Iterator[str]:
    labels = [
        printable(condition.label)
        for condition in conditions
        if condition.is_resumed or any(repeat.wall_s is None for repeat in condition.repeats)
    ]
    if labels:
        yield (
            f"warning: interrupted and resumed: {', '.join(labels)}; the passes that were "
            "interrupted have no times"
        )


def _drift_warnings(summaries: Sequence[ConditionSummary]) -> Iterator[str]:
    for summary in summaries:
        drift = summary.speed.drift
        if drift is not None and abs(drift) > MAX_DRIFT:
            yield (
                f"warning: {printable(summary.label)} drifted by {drift:+.1%} from the first half "
                f"of its passes to the second, more than {MAX_DRIFT:.0%}; measure on a quiet "
                "machine, or with more timing.passes"
            )


def _order(
    conditions: Sequence[ConditionResult], summaries: Sequence[ConditionSummary]
) -> Iterator[str]:
    num_passes = max((summary.speed.num_passes for summary in summaries), default=1)
    if num_passes == 1:
        yield (
            "timing: one pass, conditions one after the other; no ABBA order and no drift check "
            "(timing.passes=2 has both)"
        )
        return
    warm_ups = [condition.num_warm_ups for condition in conditions]
    drifts = [s.speed.drift for s in summaries if s.speed.drift is not None]
    shown = ", ".join(f"{drift:+.1%}" for drift in drifts) or "not measured"
    yield (
        f"timing: {num_passes} passes in ABBA order, tokens/s as median [least, most] of a pass; "
        f"{min(warm_ups)} to {max(warm_ups)} warm-ups until the median step was stable; baseline "
        f"drift from the first half of the passes to the second: {shown}"
    )


def _captures(conditions: Sequence[ConditionResult]) -> Iterator[str]:
    seconds = {c.label: c.capture_s for c in conditions if c.capture_s is not None}
    if seconds:
        longest = max(seconds, key=lambda label: seconds[label])
        yield (
            f"timing: steps were compiled and captured before the clocks started: "
            f"{sum(seconds.values()):.0f} s in all, at most {seconds[longest]:.0f} s a condition "
            f"({printable(longest)})"
        )


def _full(summaries: Sequence[ConditionSummary]) -> Iterator[str]:
    if any(summary.speed.tokens_per_s_full is not None for summary in summaries):
        yield (
            "batch full = of the steps without prompt rows (decode only), those that took every "
            "place of the batch; decode only has the tail too, in which requests have ended and "
            "places stay empty: where texts end at different times, it can lie far below"
        )


def _model(summaries: Sequence[ConditionSummary]) -> Iterator[str]:
    if any(summary.cost is not None for summary in summaries):
        yield (
            "tau / (1 + K c + v): tau = acceptance length; unit = target + verify of a K = 0 step; "
            "c = one draft pass, v = target + verify beyond the unit; host time is in neither"
        )
