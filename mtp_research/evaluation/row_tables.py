"""Tables with one row per condition: the form for a grid, and the split of a step's time.

`tables.py` has the form with one column per condition, which shows every figure but holds three.
"""

from collections.abc import Sequence

from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.speed import StepCost, decode_rate, end_to_end_rate, full_rate
from mtp_research.evaluation.stats.summary import ConditionSummary, PairedComparison
from mtp_research.evaluation.tables import (
    MAX_LABEL_CHARACTERS,
    UNDEFINED,
    Grid,
    audit_cell,
    interval,
    number,
    printable,
)


def grid_tables(
    summaries: Sequence[ConditionSummary], pairs: Sequence[PairedComparison], *, title: str
) -> list[Grid]:
    """Length and speed, decoding alone, positions and audit, domains, paired differences.

    Empty ones are left out.
    """
    drafting = [summary for summary in summaries if summary.num_speculative_tokens > 0]
    grids = [
        _length_grid(summaries, title),
        _decode_grid(summaries),
        _position_grid(drafting),
        _domain_grid(drafting),
        _paired_grid(pairs),
    ]
    return [grid for grid in grids if grid.rows]


def cost_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    """Where a step without prompt rows spends its time, and the speed-up that this predicts."""
    rows = [_cost_row(summary, summary.cost) for summary in summaries if summary.cost is not None]
    header = "condition target verify draft host c v predicted measured"
    return Grid(
        title="Step without prompt rows [ms], and speed-up = tau / (1 + K c + v)",
        header=tuple(header.split()),
        rows=tuple(rows),
    )


def label_cell(summary: ConditionSummary) -> str:
    """The condition's name as a table shows it."""
    return printable(summary.label, limit=MAX_LABEL_CHARACTERS)


def _length_grid(summaries: Sequence[ConditionSummary], title: str) -> Grid:
    rows = [
        (
            label_cell(summary),
            interval(summary.acceptance.acceptance_length_micro),
            number(summary.acceptance.acceptance_rate.value, ".3f"),
            _rate(end_to_end_rate(summary.speed), summary.speed.num_passes),
            number(summary.speed.ratio_end_to_end, ".3f"),
            printable(summary.lossless),
        )
        for summary in summaries
    ]
    header = ("condition", "acceptance length", "rate", "tokens/s", "ratio", "lossless")
    return Grid(title, header, tuple(rows))


def _decode_grid(summaries: Sequence[ConditionSummary]) -> Grid:
    """Speed without prompt rows, and of it with a full batch; empty where nobody had one."""
    speeds = [(label_cell(summary), summary.speed) for summary in summaries]
    if all(speed.tokens_per_s_full is None for _, speed in speeds):
        speeds = []
    rows = [
        (
            label,
            _rate(decode_rate(speed), speed.num_passes),
            number(speed.ratio_decode, ".3f"),
            _rate(full_rate(speed), speed.num_passes),
            number(speed.ratio_full, ".3f"),
        )
        for label, speed in speeds
    ]
    header = ("condition", "decode only", "ratio, decode", "batch full", "ratio, full")
    return Grid("Tokens/s of steps without prompt rows", header, tuple(rows))


def _rate(tokens_per_s: Estimate, num_passes: int) -> str:
    """Tokens per second; with several passes the least and the most of one."""
    if num_passes == 1:
        return number(tokens_per_s.value, ".1f")
    return interval(tokens_per_s, ".1f")


def _position_grid(drafting: Sequence[ConditionSummary]) -> Grid:
    most = max((summary.num_speculative_tokens for summary in drafting), default=0)
    rows = []
    for summary in drafting:
        rates = [
            number(rate.value, ".3f") for rate in summary.acceptance.acceptance_rate_per_position
        ]
        rates += [UNDEFINED] * (most - len(rates))
        rounds = summary.acceptance.num_rounds_two_rejected
        rows.append((label_cell(summary), *rates, str(rounds), audit_cell(summary)))
    positions = (f"p_{i}" for i in range(1, most + 1))
    return Grid(
        title="Acceptance by draft position, and audit",
        header=("condition", *positions, "rounds with r >= 2", "WRONG/MIXED/HOLE"),
        rows=tuple(rows),
    )


def _domain_grid(drafting: Sequence[ConditionSummary]) -> Grid:
    domains = sorted({domain for summary in drafting for domain in summary.per_domain})
    rows = []
    for summary in drafting:
        found = [summary.per_domain.get(domain) for domain in domains]
        cells = (
            UNDEFINED if f is None else number(f.acceptance_length_micro.value, ".3f")
            for f in found
        )
        rows.append((label_cell(summary), *cells))
    return Grid(
        title="Acceptance length (micro) by domain",
        header=("condition", *map(printable, domains)),
        rows=tuple(rows),
    )


def _paired_grid(pairs: Sequence[PairedComparison]) -> Grid:
    """Differences to a reference of equal K, batch size and temperature, named by what differs."""
    rows = []
    for pair in pairs:
        shared = set(pair.condition.split())
        other = " ".join(word for word in pair.reference.split() if word not in shared)
        rows.append(
            (
                printable(pair.condition, limit=MAX_LABEL_CHARACTERS),
                printable(other, limit=MAX_LABEL_CHARACTERS),
                interval(pair.differences["acceptance_length_micro"], "+.3f"),
                interval(pair.differences["acceptance_rate"], "+.3f"),
            )
        )
    return Grid(
        title="Paired difference over the same prompts",
        header=("condition", "minus", "acceptance length (micro)", "acceptance rate"),
        rows=tuple(rows),
    )


def _cost_row(summary: ConditionSummary, cost: StepCost) -> tuple[str, ...]:
    is_baseline = summary.num_speculative_tokens == 0
    parts = (cost.target_s, cost.verify_s, cost.draft_s, cost.host_s)
    model = (cost.draft_cost, cost.verify_cost, cost.predicted_ratio, summary.speed.ratio_decode)
    return (
        label_cell(summary),
        *(number(part, ".2f", scale=1e3) for part in parts),
        *(UNDEFINED if is_baseline else number(figure, ".3f") for figure in model),
    )
