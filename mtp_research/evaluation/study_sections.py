"""The sections of a page for the two studies that are no `results.json`: seed matrix, fault prices.

Every number is computed from the counters of `matrix.json` and `fault_price.json`, by the modules
that wrote them. Letters: K drafts per step, N MTP modules.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.fault_study import read_study
from mtp_research.evaluation.fault_table import PriceRow, price_grids, price_rows
from mtp_research.evaluation.figures import UNDEFINED_FIGURE, Figure, Missing
from mtp_research.evaluation.sections import Section, command_of, machine_of, record_facts
from mtp_research.evaluation.seed_figures import (
    GroupFigures,
    column_name,
    group_figures,
    matrix_grids,
    row_name,
)
from mtp_research.evaluation.seed_matrix import SeedMatrix, read_matrix
from mtp_research.evaluation.statistics import MIN_PROMPTS
from mtp_research.evaluation.svg import Axes, Series, heat_map, interval_chart

_SEED_NOTE = "Interval: 95 % two-level bootstrap over seeds and prompts. Framed: the policy that "
_SEED_NOTE += "shows the heads what they were trained on."
_PRICE_NOTE = "Tokens per round that a policy loses against its clean form, same prompts; 95 %."


def matrix_section(folder: Path, *, name: str) -> Section:
    """The policy matrix over training seeds in `folder`.

    Raises:
        IntegrityError: see `read_matrix`.
    """
    matrix = read_matrix(folder)
    done = matrix.done_seeds
    warnings = _few_prompts(len(matrix.prompts))
    if len(done) < len(matrix.seeds):
        warnings.append(f"warning: {len(done)} of {len(matrix.seeds)} seeds have all their cells")
    return Section(
        name=name,
        title=f"{name}: heads by training unroll and seed, under each decode policy",
        figures=list(_heat_maps(matrix)),
        grids=matrix_grids(matrix) if done else [],
        caption=f"{len(done)} of {len(matrix.seeds)} training seeds, "
        f"{matrix.settings.get('dtype')}, {machine_of(matrix.run)}",
        command=command_of(matrix.run),
        facts=record_facts(matrix.run) | {"seeds": ", ".join(map(str, done))},
        warnings=warnings,
    )


def fault_section(folder: Path, *, name: str) -> Section:
    """The price of faulty draft slots in `folder`.

    Raises:
        IntegrityError: see `read_study`.
    """
    study = read_study(folder)
    rows = price_rows(study)
    return Section(
        name=name,
        title=f"{name}: what faulty draft slots cost",
        figures=[_lost(rows)],
        grids=price_grids(study),
        caption=f"n = {len(study.prompts)} prompts, {study.dtype}, {machine_of(study.run)}",
        command=command_of(study.run),
        facts=record_facts(study.run) | {"new tokens": str(study.max_new_tokens)},
        warnings=_few_prompts(len(study.prompts)),
        prompts=study.prompts,
    )


def _few_prompts(num_prompts: int) -> list[str]:
    if num_prompts >= MIN_PROMPTS:
        return []
    return [
        f"warning: only {num_prompts} prompts: intervals over fewer than {MIN_PROMPTS} prompts "
        "are too narrow"
    ]


def _heat_maps(matrix: SeedMatrix) -> Iterator[Figure | Missing]:
    title = "Acceptance length by training unroll and decode policy"
    if not matrix.done_seeds:
        yield Missing(title, "no seed has all its cells")
        return
    for domain in (None, *sorted({prompt.domain for prompt in matrix.prompts})):
        where = "" if domain is None else f", {domain}"
        num_prompts = sum(domain in (None, prompt.domain) for prompt in matrix.prompts)
        markup = _heat_map(group_figures(matrix, domain=domain))
        yield Figure(f"{title}{where}", markup, f"n = {num_prompts} prompts. {_SEED_NOTE}")


def _heat_map(groups: Sequence[GroupFigures]) -> str:
    rows = list(dict.fromkeys(map(row_name, groups)))
    columns = list(dict.fromkeys(map(column_name, groups)))
    at = {(row_name(one), column_name(one)): one for one in groups}
    table = [[at.get((row, column)) for column in columns] for row in rows]
    values = [[one.length if one else UNDEFINED_FIGURE for one in row] for row in table]
    outlined = {
        (j, i) for j, row in enumerate(table) for i, one in enumerate(row) if one and one.is_match
    }
    return heat_map(values, rows=rows, columns=columns, outlined=outlined)


def _lost(rows: Sequence[PriceRow]) -> Figure | Missing:
    title = "Acceptance length lost to faulty slots"
    priced = [row for row in rows if row.lost is not None]
    if not priced:
        return Missing(title, "no policy was decoded beside its clean form")
    policies = list(dict.fromkeys(row.condition.policy for row in priced))
    by_head: dict[str, dict[str, Estimate]] = {}
    for row in priced:
        head = f"{row.condition.head} K={row.condition.num_speculative_tokens}"
        by_head.setdefault(head, {})[row.condition.policy] = row.lost or UNDEFINED_FIGURE
    series = [
        Series(head, tuple(found.get(policy, UNDEFINED_FIGURE) for policy in policies))
        for head, found in by_head.items()
    ]
    axes = Axes("policy", "tokens per round lost", tuple(policies))
    least = min((figure.low or 0.0 for one in series for figure in one.points), default=0.0)
    floor = min(0.0, math.floor(10 * least) / 10)
    markup = interval_chart(series, axes=axes, floor=floor, is_connected=False)
    return Figure(title, markup, _PRICE_NOTE)
