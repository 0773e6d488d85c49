"""The price of faulty draft slots, computed from the counters of `fault_price.json`.

    python -m mtp_research tables fault results/fault_price

    share of a fault = slots with it / all slots <= p of all draft layers, prompt included, in %
    lost             = acceptance length of the clean form - that of the policy, same prompts
    lost per 1 %     = lost / share of WRONG + MIXED + HOLE

The price belongs to one kind of fault only where a policy leaves one kind. A second table splits it
by least squares, without intercept, over a head's unclean rows: lost = sum over kinds of price x
share. It takes prices to add up, which nothing here proves. Shares count as known; intervals are
over prompts. Letters: K drafts per step, N MTP modules, P prompts, C conditions.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from mtp_research.evaluation.report.stored import require_stored_figures
from mtp_research.evaluation.report.terminal import UNDEFINED, Grid, interval, markdown_table
from mtp_research.evaluation.stats.bootstrap import (
    Estimate,
    Lengths,
    difference,
    estimate_of,
    interval_of,
    lengths,
    make_draws,
)
from mtp_research.evaluation.stats.fault_study import (
    FAULTS,
    SCHEMA_VERSION,
    STUDY_FILE,
    UNFINISHED,
    FaultCondition,
    FaultStudy,
    read_study,
    study_warnings,
    verdict,
)
from mtp_research.runtime.files import write_atomically


@dataclass(frozen=True)
class PriceRow:
    """One line of the first table; lengths and losses in tokens per round."""

    condition: FaultCondition
    length: Estimate
    reference_length: Estimate | None = None
    lost: Estimate | None = None
    lost_pct: Estimate | None = None  # of the reference's length
    lost_per_pct: Estimate | None = None  # None without faults


@dataclass(frozen=True)
class SplitPrices:
    """Tokens per round lost per 1 % of each fault, by least squares over a head's rows."""

    head: str
    num_rows: int
    prices: tuple[Estimate, ...]  # in the order of FAULTS


def price_rows(study: FaultStudy) -> list[PriceRow]:
    """A line for each condition, in order."""
    found = _all_lengths(study)
    rows = []
    for condition in study.conditions:
        own = found[condition.key]
        reference = found.get((*condition.key[:2], condition.reference or ""))
        if reference is None:
            rows.append(PriceRow(condition, estimate_of(own)))
            continue
        lost, share = difference(reference, own), condition.shares.sum()
        rows.append(
            PriceRow(
                condition,
                estimate_of(own),
                estimate_of(reference),
                lost,
                interval_of(
                    100 * (1 - own.value / reference.value),
                    100 * (1 - own.draws / reference.draws),
                ),
                _scaled(lost, 1 / share) if share else None,
            )
        )
    return rows


def split_prices(study: FaultStudy) -> list[SplitPrices]:
    """Least-squares prices of each head whose rows tell the three kinds apart."""
    found = _all_lengths(study)
    made = []
    for head in dict.fromkeys(condition.head for condition in study.conditions):
        rows = [c for c in study.conditions if c.head == head and c.reference is not None]
        pairs = [(found[(*c.key[:2], str(c.reference))], found[c.key]) for c in rows]
        shares = np.array([c.shares for c in rows]).reshape(-1, len(FAULTS))  # [C, 3]
        if np.linalg.matrix_rank(shares) < len(FAULTS):
            continue
        solve = np.linalg.pinv(shares)  # [3, C]
        values = solve @ np.array([ref.value - own.value for ref, own in pairs])
        draws = np.array([ref.draws - own.draws for ref, own in pairs]).T @ solve.T
        prices = (interval_of(v, d) for v, d in zip(values, draws.T, strict=True))
        made.append(SplitPrices(head, len(rows), tuple(prices)))
    return made


def price_grids(study: FaultStudy) -> list[Grid]:
    """Both tables; the second only where some head's rows tell the kinds apart."""
    header = ("head", "N", "K", "policy", *(f"{fault} %" for fault in FAULTS))
    header += ("acceptance length", "clean form", "lost", "lost %", "lost per 1 %")
    rows = tuple(map(_cells, price_rows(study)))
    grids = [Grid("Price of faulty draft slots", header, rows)]
    if split := split_prices(study):
        header = ("head", "rows", *(f"lost per 1 % {fault}" for fault in FAULTS))
        rows = tuple(
            (s.head, str(s.num_rows), *(interval(p, "+.4f") for p in s.prices)) for s in split
        )
        grids.append(Grid("Price by kind of fault, least squares", header, rows))
    return grids


def markdown_tables(study: FaultStudy) -> str:
    """Warnings and verdict, then both tables as Markdown; intervals are 95 %."""
    lines = [f"warning: {text}" for text in study_warnings(study)]
    tables = (markdown_table(grid.header, grid.rows) for grid in price_grids(study))
    return "\n\n".join([*lines, verdict(study), *tables])


def summary(study: FaultStudy) -> dict[str, object]:
    """The figures of `fault_price.json`."""
    rows = [asdict(replace(row, condition=_without_counters(row))) for row in price_rows(study)]
    return {"rows": rows, "split": [asdict(one) for one in split_prices(study)]}


def write_study(folder: Path, study: FaultStudy) -> None:
    """Write `fault_price.json`, whole or not at all, with the figures of its counters."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": SCHEMA_VERSION, **asdict(study), "summary": summary(study)}
    write_atomically(
        folder / STUDY_FILE, json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"
    )


def read_checked_study(folder: Path) -> FaultStudy:
    """`read_study`, and the figures in the file must be those that its counters give."""
    study, path = read_study(folder), folder / STUDY_FILE
    stored = json.loads(path.read_text(encoding="utf8")).get("summary")
    require_stored_figures(path, stored, summary(study))
    return study


def _all_lengths(study: FaultStudy) -> dict[tuple[str, int, str], Lengths]:
    # A prompt that did not end somewhere counts nowhere: differences are over the same prompts.
    indices = range(len(study.prompts))
    whole = [
        index
        for index in indices
        if all(one.text_sha256[index] != UNFINISHED for one in study.conditions)
    ]
    whole = whole or list(indices)  # a condition of which nothing ended has no figure anyway
    draws = make_draws(1, max(len(whole), 1), seed=study.seed)
    return {
        condition.key: lengths(
            [[sum(condition.accepted_per_round[index]) for index in whole]],
            [[len(condition.accepted_per_round[index]) for index in whole]],
            draws,
        )
        for condition in study.conditions
    }


def _without_counters(row: PriceRow) -> FaultCondition:
    return replace(row.condition, accepted_per_round=(), text_sha256=())


def _scaled(one: Estimate, factor: float) -> Estimate:
    return Estimate(*(None if x is None else x * factor for x in one))


def _cells(row: PriceRow) -> tuple[str, ...]:
    one = row.condition
    return (
        one.head,
        str(one.num_mtp_modules),
        str(one.num_speculative_tokens),
        one.policy,
        *(f"{share:.2f}" for share in one.shares),
        interval(row.length),
        UNDEFINED if row.reference_length is None else str(one.reference),
        UNDEFINED if row.lost is None else interval(row.lost, "+.3f"),
        UNDEFINED if row.lost_pct is None else interval(row.lost_pct, "+.1f"),
        UNDEFINED if row.lost_per_pct is None else interval(row.lost_per_pct, "+.4f"),
    )
