"""Tables, warnings and stored figures of both studies, computed from the counters of their files.

    mtp tables seeds runs/matrix             `matrix.json`
    mtp tables fault results/fault_price     `fault_price.json`

Figures are stored beside the counters and held against them when they are read. Prices:

    share of a fault = slots with it / all slots <= p of all draft layers, prompt included, in %
    lost             = acceptance length of the clean form - that of the policy, same prompts
    lost per 1 %     = lost / share of WRONG + MIXED + HOLE

The price belongs to one kind of fault only where a policy leaves one kind. A second table splits it
by least squares, without intercept, over a head's unclean rows: lost = sum over kinds of price x
share. It takes prices to add up, which nothing here proves. Shares count as known; intervals are
over prompts. Letters: K drafts per step, N MTP modules, C conditions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mtp_research.evaluation.report.grids import Grid
from mtp_research.evaluation.report.notes import UNDEFINED, interval, number
from mtp_research.evaluation.report.stored import (
    mapping,
    printable,
    require_stored_figures,
    write_json,
)
from mtp_research.evaluation.report.terminal import markdown_table
from mtp_research.evaluation.stats import bootstrap, fault_study, matrix_seeds
from mtp_research.evaluation.stats.fault_study import FAULTS, FaultCondition, FaultStudy
from mtp_research.evaluation.stats.matrix_seeds import (
    GroupFigures,
    SeedMatrix,
    column_name,
    group_figures,
    match_pairs,
    row_name,
)
from mtp_research.evaluation.stats.statistics import MIN_PROMPTS, few_prompts
from mtp_research.heads.record import conventions_phrase
from mtp_research.policy.fields import MATCHING_POLICY

_NUM_LISTED = 5  # cells with other texts or rounds


def matrix_grids(matrix: SeedMatrix) -> list[Grid]:
    """The matrix over all prompts, matching cells, differences, positions, then each domain."""
    groups = group_figures(matrix)
    seeds = f"{len(matrix.done_seeds)} of {len(matrix.seeds)} seeds"
    grids = [
        _length_grid(groups, seeds, len(matrix.prompts)),
        _match_grid(matrix),
        _difference_grid(groups),
        _position_grid(groups),
    ]
    for domain, num_prompts in prompts_by_domain(matrix).items():
        own = group_figures(matrix, domain=domain)
        grids.append(_length_grid(own, f"{domain}, {seeds}", num_prompts))
    return [grid for grid in grids if grid.rows]


def matrix_warnings(matrix: SeedMatrix) -> list[str]:
    """What a reader must know before the figures; without a prefix."""
    done, warnings = matrix.done_seeds, []
    if len(done) < len(matrix.seeds):
        warnings.append(
            f"{len(done)} of {len(matrix.seeds)} seeds have all their cells; the others are in no "
            "figure"
        )
    warnings += few_prompts(len(matrix.prompts))
    sizes = prompts_by_domain(matrix).values()
    if len(sizes) > 1 and min(sizes) < MIN_PROMPTS <= len(matrix.prompts):
        least, most = min(sizes), max(sizes)
        warnings.append(
            f"a domain has {least if least == most else f'{least} to {most}'} prompts: intervals "
            f"over fewer than {MIN_PROMPTS} prompts are too narrow, those of a domain show no more "
            "than a tendency"
        )
    differing = [
        f"{row_name(c.key)} seed {c.seed} under {column_name(c.key)} "
        f"({c.num_other_texts} texts, {c.num_other_rounds} lists of rounds)"
        for c in matrix.cells
        if c.num_other_texts or c.num_other_rounds
    ]
    if differing:
        listed = ", ".join(differing[:_NUM_LISTED])
        more = f" and {len(differing) - _NUM_LISTED} more" * (len(differing) > _NUM_LISTED)
        warnings.append(f"{matrix_verdict(matrix)}; others in {listed}{more}")
    return warnings


def matrix_verdict(matrix: SeedMatrix) -> str:
    """How many texts and rounds are what they must be, over all cells."""
    total = len(matrix.cells) * len(matrix.prompts)
    texts = total - sum(cell.num_other_texts for cell in matrix.cells)
    rounds = total - sum(cell.num_other_rounds for cell in matrix.cells)
    return (
        f"{texts} of {total} texts are plain decoding's; "
        f"{rounds} of {total} lists of rounds are the replay walk's"
    )


def prompts_by_domain(matrix: SeedMatrix) -> dict[str, int]:
    """Number of prompts of each domain, by name."""
    domains = [prompt.domain for prompt in matrix.prompts]
    return {domain: domains.count(domain) for domain in sorted(set(domains))}


def prompt_counts(matrix: SeedMatrix) -> dict[str | None, int]:
    """The same, after that of all prompts by None."""
    return {None: len(matrix.prompts), **prompts_by_domain(matrix)}


def matrix_markdown(matrix: SeedMatrix) -> str:
    """Warnings and verdict, then every table as Markdown."""
    tables = [f"{g.title}\n\n{markdown_table(g.header, g.rows)}" for g in matrix_grids(matrix)]
    tables += [f"heads: {phrase}" for phrase in matrix_conventions(matrix)]
    return _markdown(matrix_warnings(matrix), matrix_verdict(matrix), tables)


def matrix_summary(matrix: SeedMatrix) -> dict[str, object]:
    """The figures of `matrix.json`, over all prompts and by domain."""
    domains = list(prompt_counts(matrix))
    figures = {domain: group_figures(matrix, domain=domain) for domain in domains}
    return {
        "done_seeds": list(matrix.done_seeds),
        "groups": [{**asdict(one), **_names(one.key)} for one in figures[None]],
        "heat_maps": [_heat_map(groups, domain=d) for d, groups in figures.items()],
        "match_pairs": [
            {"domain": d, **asdict(p), "ours": p.ours._asdict(), "theirs": p.theirs._asdict()}
            for d in domains
            for p in match_pairs(matrix, domain=d)
        ],
    }


def write_matrix(folder: Path, matrix: SeedMatrix, *, figures: bool) -> None:
    """Write `matrix.json`, whole or not at all: what was counted, and a summary of it or null."""
    content = {
        "schema_version": matrix_seeds.SCHEMA_VERSION,
        **asdict(matrix),
        "cells": [{**asdict(cell), "key": cell.key._asdict()} for cell in matrix.cells],
        "summary": matrix_summary(matrix) if figures else None,
    }
    write_json(folder / matrix_seeds.MATRIX_FILE, content)


def read_checked_matrix(folder: Path) -> SeedMatrix:
    """`read_matrix`, and the figures in the file must be those that its counters give.

    A file of an unfinished matrix may hold none, an older one fewer of them.
    """
    matrix, path = matrix_seeds.read_matrix(folder), folder / matrix_seeds.MATRIX_FILE
    stored = json.loads(path.read_text(encoding="utf8")).get("summary")
    if stored is not None:
        require_stored_figures(path, stored, matrix_summary(matrix))
    return matrix


def _length_grid(groups: Sequence[GroupFigures], what: str, num_prompts: int) -> Grid:
    """Acceptance length of each head (row) under each policy (column); `*` marks the match."""
    columns = list(dict.fromkeys(column_name(one.key) for one in groups))
    rows: dict[str, dict[str, str]] = {}
    for one in groups:
        text = interval(one.length) + "*" * one.is_match
        if one.clean_length is not None:
            text += f", {number(one.clean_length.value, '.3f')} if rerun"
        rows.setdefault(row_name(one.key), {})[column_name(one.key)] = text
    lines = [(head, *(row.get(name, UNDEFINED) for name in columns)) for head, row in rows.items()]
    title = f"Acceptance length, {what}, {num_prompts} prompts; * the match"
    return Grid(title, ("heads", *columns), tuple(lines))


def _difference_grid(groups: Sequence[GroupFigures]) -> Grid:
    lines = [
        (
            row_name(one.key),
            column_name(one.key),
            " ".join(number(value, ".3f") for value in one.by_seed),
            interval(one.minus_match, "+.3f") if one.minus_match else UNDEFINED,
        )
        for one in groups
    ]
    title = "Acceptance length minus that of the matching policy"
    return Grid(title, ("heads", "policy", "length by seed", "difference [95 %]"), tuple(lines))


def _match_grid(matrix: SeedMatrix) -> Grid:
    lines = [
        (
            f"{pair.ours.unroll} - {row_name(pair.theirs)}",
            domain or "all",
            str(num_prompts),
            interval(pair.ours_length),
            interval(pair.theirs_length),
            " ".join(number(value, "+.3f") for value in pair.by_seed),
            interval(pair.difference, "+.3f"),
        )
        for domain, num_prompts in prompt_counts(matrix).items()
        for pair in match_pairs(matrix, domain=domain)
    ]
    title = "Matching cells: trained for and decoded with training, minus the same with eagle"
    header = ("heads, each under its match", "domain", "prompts", "training", "eagle",
              "difference by seed", "difference [95 %]")  # fmt: skip
    return Grid(title, header, tuple(sorted(lines, key=lambda line: line[0])))


def _position_grid(groups: Sequence[GroupFigures]) -> Grid:
    """p_i of every cell over all prompts, hits at fixed anchors beside them; `*` is the match."""
    most = max((len(one.positions) for one in groups), default=0)
    lines = []
    for one in groups:
        cells = [*map(interval, one.positions), *[UNDEFINED] * (most - len(one.positions))]
        cells.append(" ".join(number(rate, ".3f") for rate in one.anchor_rates) or UNDEFINED)
        cells.append(number(one.repeated_share, ".1%"))
        lines.append((row_name(one.key), column_name(one.key) + "*" * one.is_match, *cells))
    header = ("heads", "policy", *(f"p_{i}" for i in range(1, most + 1)))
    header += ("the same at fixed anchors", "repeated rounds")
    return Grid("Acceptance by draft position; * the match", header, tuple(lines))


def _names(key: matrix_seeds.GroupKey) -> dict[str, object]:
    return {"key": key._asdict(), "row": row_name(key), "column": column_name(key)}


def _heat_map(groups: Sequence[GroupFigures], *, domain: str | None) -> dict[str, object]:
    """Lengths by head (row) and decode policy (column) for drawing; null where there is no cell."""
    names = [(row_name(one.key), column_name(one.key)) for one in groups]
    rows, columns = (list(dict.fromkeys(name[side] for name in names)) for side in (0, 1))
    at = dict(zip(names, groups, strict=True))
    table = [[at.get((row, column)) for column in columns] for row in rows]
    return {
        "domain": domain,
        "rows": rows,
        "columns": columns,
        "values": [[one and one.length.value for one in row] for row in table],
        "lows": [[one and one.length.low for one in row] for row in table],
        "highs": [[one and one.length.high for one in row] for row in table],
        "is_match": [[bool(one and one.is_match) for one in row] for row in table],
        "seed_values": [[one and list(one.by_seed) for one in row] for row in table],
    }


@dataclass(frozen=True)
class PriceRow:
    """One line of the first table; lengths and losses in tokens per round."""

    condition: FaultCondition
    length: bootstrap.Estimate
    reference_length: bootstrap.Estimate | None = None
    lost: bootstrap.Estimate | None = None
    lost_pct: bootstrap.Estimate | None = None  # of the reference's length
    lost_per_pct: bootstrap.Estimate | None = None  # None without faults


@dataclass(frozen=True)
class SplitPrices:
    """Tokens per round lost per 1 % of each fault, by least squares over a head's rows."""

    head: str
    num_rows: int
    prices: tuple[bootstrap.Estimate, ...]  # in the order of FAULTS


def price_rows(study: FaultStudy) -> list[PriceRow]:
    """A line for each condition, in order."""
    found = _all_lengths(study)
    rows = []
    for condition in study.conditions:
        own = found[condition.key]
        reference = found.get((*condition.key[:2], condition.reference or ""))
        if reference is None:
            rows.append(PriceRow(condition, bootstrap.estimate_of(own)))
            continue
        length, clean = bootstrap.estimate_of(own), bootstrap.estimate_of(reference)
        lost, share = bootstrap.difference(reference, own), condition.shares.sum()
        kept, draws = own.value / reference.value, own.draws / reference.draws
        percent = bootstrap.interval_of(100 * (1 - kept), 100 * (1 - draws))
        each = _scaled(lost, 1 / share) if share else None
        rows.append(PriceRow(condition, length, clean, lost, percent, each))
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
        prices = (bootstrap.interval_of(v, d) for v, d in zip(values, draws.T, strict=True))
        made.append(SplitPrices(head, len(rows), tuple(prices)))
    return made


@dataclass(frozen=True)
class PolicyLoss:
    """What the other clean policy costs heads that were trained for one of the two."""

    lost: bootstrap.Estimate  # length under the other minus that under their own, paired
    percent: bootstrap.Estimate  # the same, of their own


def policy_losses(study: FaultStudy) -> dict[tuple[str, int], PolicyLoss]:
    """By head and K; heads trained for neither `training` nor `eagle` are left out."""
    found, made = _all_lengths(study), {}
    others = {"training": "eagle", "eagle": "training"}
    for head in study.heads:
        own = MATCHING_POLICY.get(str(head.get("unroll")), "")
        for name, num_drafts, policy in found:
            if name == head["name"] and policy == own and own in others:
                ours, theirs = found[name, num_drafts, own], found[name, num_drafts, others[own]]
                kept, draws = theirs.value / ours.value, theirs.draws / ours.draws
                percent = bootstrap.interval_of(100 * (kept - 1), 100 * (draws - 1))
                lost = bootstrap.difference(theirs, ours)
                made[name, num_drafts] = PolicyLoss(lost, percent)
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


def matrix_conventions(matrix: SeedMatrix) -> list[str]:
    """How the heads of a matrix were trained to be run, each kind once; none if it is not known."""
    head = mapping(mapping(matrix.settings, "config"), "head")
    if not head:
        return []
    keys = [cell.key for cell in matrix.cells]
    kinds = dict.fromkeys((key.num_mtp_modules, key.recycle_norm) for key in keys)
    return [
        conventions_phrase({**head, "num_mtp_modules": count, "recycle_norm": norm})
        for count, norm in kinds
    ]


def price_head_lines(study: FaultStudy) -> list[str]:
    """Conventions of each head, where the study has them."""
    known = [head for head in study.heads if head.get("conventions")]
    return [f"{printable(str(head['name']))}: {head['conventions']}" for head in known]


def price_markdown(study: FaultStudy) -> str:
    """Warnings and verdict, then both tables as Markdown; intervals are 95 %."""
    tables = [markdown_table(grid.header, grid.rows) for grid in price_grids(study)]
    if lines := price_head_lines(study):
        tables.append("\n".join(f"heads {line}  " for line in lines))
    return _markdown(fault_study.study_warnings(study), fault_study.verdict(study), tables)


def price_summary(study: FaultStudy) -> dict[str, object]:
    """The figures of `fault_price.json`."""
    rows = [asdict(row) for row in price_rows(study)]
    for row in rows:
        row["condition"] |= {"accepted_per_round": (), "text_sha256": ()}
    return {"rows": rows, "split": [asdict(one) for one in split_prices(study)]}


def write_study(folder: Path, study: FaultStudy) -> None:
    """Write `fault_price.json`, whole or not at all, with the figures of its counters."""
    summary = price_summary(study)
    content = {"schema_version": fault_study.SCHEMA_VERSION, **asdict(study), "summary": summary}
    write_json(folder / fault_study.STUDY_FILE, content)


def read_checked_study(folder: Path) -> FaultStudy:
    """`read_study`, and the figures in the file must be those that its counters give."""
    study, path = fault_study.read_study(folder), folder / fault_study.STUDY_FILE
    stored = json.loads(path.read_text(encoding="utf8")).get("summary")
    require_stored_figures(path, stored, price_summary(study))
    return study


def _markdown(warnings: Sequence[str], verdict: str, tables: Sequence[str]) -> str:
    return "\n\n".join([*(f"warning: {text}" for text in warnings), verdict, *tables])


def _all_lengths(study: FaultStudy) -> dict[tuple[str, int, str], bootstrap.Lengths]:
    # A prompt that did not end somewhere counts nowhere: differences are over the same prompts.
    texts = [one.text_sha256 for one in study.conditions]
    indices = range(len(study.prompts))
    whole = [i for i in indices if all(own[i] != fault_study.UNFINISHED for own in texts)]
    whole = whole or list(indices)  # a condition of which nothing ended has no figure anyway
    draws = bootstrap.make_draws(1, max(len(whole), 1), seed=study.seed)
    return {
        one.key: bootstrap.lengths(
            [[sum(one.accepted_per_round[index]) for index in whole]],
            [[len(one.accepted_per_round[index]) for index in whole]],
            draws,
        )
        for one in study.conditions
    }


def _scaled(one: bootstrap.Estimate, factor: float) -> bootstrap.Estimate:
    return bootstrap.Estimate(*(None if x is None else x * factor for x in one))


def _cells(row: PriceRow) -> tuple[str, ...]:
    one, forms = row.condition, {"lost": "+.3f", "lost_pct": "+.1f", "lost_per_pct": "+.4f"}
    figures = ((getattr(row, name), form) for name, form in forms.items())
    return (
        *(one.head, str(one.num_mtp_modules), str(one.num_speculative_tokens), one.policy),
        *(f"{share:.2f}" for share in one.shares),
        interval(row.length),
        UNDEFINED if row.reference_length is None else str(one.reference),
        *(UNDEFINED if figure is None else interval(figure, form) for figure, form in figures),
    )
