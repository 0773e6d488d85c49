"""The charts of a seed matrix: heat maps, matching cells against each other, every position.

Letters: K drafts per step, N MTP modules.
"""

import math
from collections.abc import Iterator, Sequence

from mtp_research.evaluation.figures import UNDEFINED_FIGURE, Figure, Missing
from mtp_research.evaluation.seed_tables import prompts_by_domain
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.stats.matrix_seeds import (
    GroupFigures,
    MatchPair,
    SeedMatrix,
    column_name,
    group_figures,
    match_pairs,
    row_name,
)
from mtp_research.evaluation.svg import Axes, Series, heat_map, interval_chart
from mtp_research.evaluation.svg_parts import MAX_SERIES

_INTERVAL = "Interval: 95 % two-level bootstrap over seeds and prompts."
_FRAMED = "Framed: the policy that shows the heads what they were trained on."


def matrix_figures(matrix: SeedMatrix) -> list[Figure | Missing]:
    """Differences of the matching cells, positions by N, then heat maps, all prompts first."""
    title = "Acceptance length by training unroll and decode policy"
    if not matrix.done_seeds:
        return [Missing(title, "no seed has all its cells")]
    overall, *by_domain = _heat_maps(matrix, title)
    return [overall, _differences(matrix), *_positions(group_figures(matrix)), *by_domain]


def _heat_maps(matrix: SeedMatrix, title: str) -> Iterator[Figure]:
    counts = {None: len(matrix.prompts)} | prompts_by_domain(matrix)
    for domain, num_prompts in counts.items():
        where = "" if domain is None else f", {domain}"
        markup = _heat_map(group_figures(matrix, domain=domain))
        note = f"n = {num_prompts} prompts. {_INTERVAL} {_FRAMED}"
        yield Figure(f"{title}{where}", markup, note)


def _heat_map(groups: Sequence[GroupFigures]) -> str:
    rows = list(dict.fromkeys(row_name(one.key) for one in groups))
    columns = list(dict.fromkeys(column_name(one.key) for one in groups))
    at = {(row_name(one.key), column_name(one.key)): one for one in groups}
    table = [[at.get((row, column)) for column in columns] for row in rows]
    values = [[one.length if one else UNDEFINED_FIGURE for one in row] for row in table]
    outlined = {
        (j, i) for j, row in enumerate(table) for i, one in enumerate(row) if one and one.is_match
    }
    return heat_map(values, rows=rows, columns=columns, outlined=outlined)


def _differences(matrix: SeedMatrix) -> Figure | Missing:
    """Every pair of matching cells: the difference with its interval, and each seed's own."""
    title = "Heads for training under training minus heads for eagle under eagle"
    pairs = match_pairs(matrix)
    if not pairs:
        return Missing(title, "the matrix has no two matching cells of equal N")
    series = [Series("mean over seeds", tuple(pair.difference for pair in pairs))]
    for number, seed in enumerate(matrix.done_seeds[: MAX_SERIES - 1]):
        series.append(Series(f"seed {seed}", tuple(Estimate(p.by_seed[number]) for p in pairs)))
    figures = [figure for one in series for figure in one.points]
    least = min(low for f in figures for low in (f.value or 0.0, f.low or 0.0))
    # A tick holds 24 characters.
    ticks = tuple(f"N={p.theirs.num_mtp_modules} {p.theirs.unroll}{_norm(p)}" for p in pairs)
    axes = Axes("chain minus these heads", "difference, tokens per round", ticks)
    floor = min(0.0, math.floor(20 * least) / 20)
    markup = interval_chart(series, axes=axes, floor=floor, is_connected=False)
    note = "Above 0: training is ahead. Same seeds and prompts; by domain: in the table."
    return Figure(title, markup, f"n = {len(matrix.prompts)} prompts. {note} {_INTERVAL}")


def _norm(pair: MatchPair) -> str:
    norm = pair.ours.recycle_norm
    return f" {norm}" if norm != "post_norm" else ""


def _positions(groups: Sequence[GroupFigures]) -> Iterator[Figure | Missing]:
    """One chart for each N, of its matching cells."""
    title = "Acceptance by draft position of the matching cells"
    matches = [one for one in groups if one.is_match and one.positions]
    if not matches:
        yield Missing(title, "the matrix has no matching cell that drafts")
    for num_modules in dict.fromkeys(one.key.num_mtp_modules for one in matches):
        members = [one for one in matches if one.key.num_mtp_modules == num_modules]
        longest = max(len(one.positions) for one in members)
        series = [
            Series(
                f"{row_name(one.key)} {column_name(one.key)}",
                (*one.positions, *[UNDEFINED_FIGURE] * (longest - len(one.positions))),
            )
            for one in members
        ]
        ticks = tuple(str(i) for i in range(1, longest + 1))
        axes = Axes("draft position i", "acceptance p_i, share of rounds", ticks)
        note = f"p_i = rounds with at least i accepted drafts / rounds. {_INTERVAL}"
        yield Figure(f"{title}, N={num_modules}", interval_chart(series, axes=axes), note)
