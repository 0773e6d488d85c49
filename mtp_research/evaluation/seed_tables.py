"""The tables of a seed matrix, and what has to be said before them.

Letters: K drafts per step, N MTP modules.
"""

from collections.abc import Sequence

from mtp_research.evaluation.markdown import markdown_table
from mtp_research.evaluation.stats.matrix_seeds import (
    GroupFigures,
    MatchPair,
    SeedMatrix,
    column_name,
    group_figures,
    match_pairs,
    row_name,
)
from mtp_research.evaluation.stats.statistics import MIN_PROMPTS, few_prompts
from mtp_research.evaluation.tables import UNDEFINED, Grid, interval, number

_NUM_LISTED = 5  # cells with other texts or rounds


def matrix_grids(matrix: SeedMatrix) -> list[Grid]:
    """The matrix over all prompts, matching cells, differences, positions, then each domain."""
    done, groups = matrix.done_seeds, group_figures(matrix)
    seeds = f"{len(done)} of {len(matrix.seeds)} seeds"
    grids = [
        matrix_grid(groups, title=_length_title(seeds, len(matrix.prompts))),
        match_grid(matrix),
        difference_grid(groups),
        position_grid(groups),
    ]
    for domain, num_prompts in prompts_by_domain(matrix).items():
        own = group_figures(matrix, domain=domain)
        grids.append(matrix_grid(own, title=_length_title(f"{domain}, {seeds}", num_prompts)))
    return [grid for grid in grids if grid.rows]


def _length_title(what: str, num_prompts: int) -> str:
    return f"Acceptance length, {what}, {num_prompts} prompts; * the match"


def matrix_grid(groups: Sequence[GroupFigures], *, title: str) -> Grid:
    """Acceptance length of each head (row) under each policy (column); `*` marks the match."""
    columns = list(dict.fromkeys(column_name(one.key) for one in groups))
    rows: dict[str, dict[str, str]] = {}
    for one in groups:
        text = interval(one.length) + "*" * one.is_match
        if one.clean_length is not None:
            text += f", {number(one.clean_length.value, '.3f')} if rerun"
        rows.setdefault(row_name(one.key), {})[column_name(one.key)] = text
    lines = [(head, *(row.get(name, UNDEFINED) for name in columns)) for head, row in rows.items()]
    return Grid(title, ("heads", *columns), tuple(lines))


def difference_grid(groups: Sequence[GroupFigures]) -> Grid:
    """Each cell minus the same heads' match, paired over seeds and prompts."""
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


def match_grid(matrix: SeedMatrix) -> Grid:
    """Matching cells against each other, over all prompts and by domain."""
    counts = {None: len(matrix.prompts)} | prompts_by_domain(matrix)
    lines = [
        (pair_name(pair), domain or "all", str(num_prompts), *_match_cells(pair))
        for domain, num_prompts in counts.items()
        for pair in match_pairs(matrix, domain=domain)
    ]
    title = "Matching cells: trained for and decoded with training, minus the same with eagle"
    header = ("heads, each under its match", "domain", "prompts", "training", "eagle",
              "difference by seed", "difference [95 %]")  # fmt: skip
    return Grid(title, header, tuple(sorted(lines, key=lambda line: line[0])))


def position_grid(groups: Sequence[GroupFigures]) -> Grid:
    """p_i of every cell over all prompts; `*` marks the match."""
    most = max((len(one.positions) for one in groups), default=0)
    lines = [
        (
            row_name(one.key),
            column_name(one.key) + "*" * one.is_match,
            *(interval(figure) for figure in one.positions),
            *[UNDEFINED] * (most - len(one.positions)),
        )
        for one in groups
    ]
    header = ("heads", "policy", *(f"p_{i}" for i in range(1, most + 1)))
    return Grid("Acceptance by draft position; * the match", header, tuple(lines))


def pair_name(pair: MatchPair) -> str:
    """Both heads, such as `chain - ttt N=1`."""
    return f"{pair.ours.unroll} - {row_name(pair.theirs)}"


def prompts_by_domain(matrix: SeedMatrix) -> dict[str | None, int]:
    """Number of prompts of each domain, by name."""
    domains = [prompt.domain for prompt in matrix.prompts]
    return {domain: domains.count(domain) for domain in sorted(set(domains))}


def verdict(matrix: SeedMatrix) -> str:
    """How many texts and rounds are what they must be, over all cells."""
    total = len(matrix.cells) * len(matrix.prompts)
    texts = total - sum(cell.num_other_texts for cell in matrix.cells)
    rounds = total - sum(cell.num_other_rounds for cell in matrix.cells)
    return (
        f"{texts} of {total} texts are plain decoding's; "
        f"{rounds} of {total} lists of rounds are the replay walk's"
    )


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
        warnings.append(
            f"a domain has {_range(min(sizes), max(sizes))} prompts: intervals over fewer than "
            f"{MIN_PROMPTS} prompts are too narrow, those of a domain show no more than a tendency"
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
        warnings.append(f"{verdict(matrix)}; others in {listed}{more}")
    return warnings


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def markdown_tables(matrix: SeedMatrix) -> str:
    """Warnings and verdict, then every table as Markdown."""
    lines = [f"warning: {text}" for text in matrix_warnings(matrix)]
    tables = (f"{g.title}\n\n{markdown_table(g.header, g.rows)}" for g in matrix_grids(matrix))
    return "\n\n".join([*lines, verdict(matrix), *tables])


def _match_cells(pair: MatchPair) -> tuple[str, ...]:
    return (
        interval(pair.ours_length),
        interval(pair.theirs_length),
        " ".join(number(value, "+.3f") for value in pair.by_seed),
        interval(pair.difference, "+.3f"),
    )
