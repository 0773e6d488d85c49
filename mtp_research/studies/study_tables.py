"""Tables, warnings and stored figures of a train unroll x decode policy matrix over training seeds.

    python train.py experiment=policy_matrix output_dir=runs/matrix
    python -m mtp_research.studies.study_tables runs/matrix            the tables again, from JSON

Figures are computed by the seed statistics; this file stores them beside the counters, holds stored
ones against the counters when they are read, and lays them out. Letters: K drafts per step, N MTP
modules.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mtp_research.evaluation.report.stored import require_stored_figures
from mtp_research.evaluation.report.terminal import (
    UNDEFINED,
    Grid,
    interval,
    markdown_table,
    number,
)
from mtp_research.evaluation.stats.matrix_seeds import (
    MATRIX_FILE,
    SCHEMA_VERSION,
    GroupFigures,
    MatchPair,
    SeedMatrix,
    column_name,
    group_figures,
    match_pairs,
    read_matrix,
    row_name,
)
from mtp_research.evaluation.stats.statistics import MIN_PROMPTS, few_prompts
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import write_atomically

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
        warnings.append(f"{verdict(matrix)}; others in {listed}{more}")
    return warnings


def verdict(matrix: SeedMatrix) -> str:
    """How many texts and rounds are what they must be, over all cells."""
    total = len(matrix.cells) * len(matrix.prompts)
    texts = total - sum(cell.num_other_texts for cell in matrix.cells)
    rounds = total - sum(cell.num_other_rounds for cell in matrix.cells)
    return (
        f"{texts} of {total} texts are plain decoding's; "
        f"{rounds} of {total} lists of rounds are the replay walk's"
    )


def pair_name(pair: MatchPair) -> str:
    """Both heads, such as `chain - ttt N=1`."""
    return f"{pair.ours.unroll} - {row_name(pair.theirs)}"


def prompts_by_domain(matrix: SeedMatrix) -> dict[str, int]:
    """Number of prompts of each domain, by name."""
    domains = [prompt.domain for prompt in matrix.prompts]
    return {domain: domains.count(domain) for domain in sorted(set(domains))}


def markdown_tables(matrix: SeedMatrix) -> str:
    """Warnings and verdict, then every table as Markdown."""
    lines = [f"warning: {text}" for text in matrix_warnings(matrix)]
    tables = (f"{g.title}\n\n{markdown_table(g.header, g.rows)}" for g in matrix_grids(matrix))
    return "\n\n".join([*lines, verdict(matrix), *tables])


def summary(matrix: SeedMatrix) -> dict[str, object]:
    """The figures of `matrix.json`, over all prompts and by domain."""
    domains = [None, *sorted({prompt.domain for prompt in matrix.prompts})]
    figures = {domain: group_figures(matrix, domain=domain) for domain in domains}
    return {
        "done_seeds": list(matrix.done_seeds),
        "groups": [
            {
                **asdict(one),
                "key": one.key._asdict(),
                "row": row_name(one.key),
                "column": column_name(one.key),
            }
            for one in figures[None]
        ],
        "heat_maps": [_heat_map(groups, domain=d) for d, groups in figures.items()],
        "match_pairs": [
            {
                "domain": domain,
                **asdict(pair),
                "ours": pair.ours._asdict(),
                "theirs": pair.theirs._asdict(),
            }
            for domain in domains
            for pair in match_pairs(matrix, domain=domain)
        ],
    }


def write_matrix(folder: Path, matrix: SeedMatrix, *, figures: bool) -> None:
    """Write `matrix.json`, whole or not at all: what was counted, and a summary of it or null."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "schema_version": SCHEMA_VERSION,
        **asdict(matrix),
        "cells": [{**asdict(cell), "key": cell.key._asdict()} for cell in matrix.cells],
        "summary": summary(matrix) if figures else None,
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    write_atomically(folder / MATRIX_FILE, text + "\n")


def read_checked_matrix(folder: Path) -> SeedMatrix:
    """`read_matrix`, and the figures in the file must be those that its counters give.

    A file of an unfinished matrix may hold none, an older one fewer of them.
    """
    matrix, path = read_matrix(folder), folder / MATRIX_FILE
    stored = json.loads(path.read_text(encoding="utf8")).get("summary")
    if stored is not None:
        require_stored_figures(path, stored, summary(matrix))
    return matrix


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.studies.study_tables`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.studies.study_tables",
        description="Print the tables of a policy matrix as Markdown.",
    )
    parser.add_argument("folder", type=Path)
    try:
        matrix = read_checked_matrix(parser.parse_args(argv).folder)
    except IntegrityError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    sys.stdout.write(markdown_tables(matrix) + "\n")
    return 0


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
    counts: Mapping[str | None, int] = {None: len(matrix.prompts), **prompts_by_domain(matrix)}
    lines = [
        (
            pair_name(pair),
            domain or "all",
            str(num_prompts),
            interval(pair.ours_length),
            interval(pair.theirs_length),
            " ".join(number(value, "+.3f") for value in pair.by_seed),
            interval(pair.difference, "+.3f"),
        )
        for domain, num_prompts in counts.items()
        for pair in match_pairs(matrix, domain=domain)
    ]
    title = "Matching cells: trained for and decoded with training, minus the same with eagle"
    header = ("heads, each under its match", "domain", "prompts", "training", "eagle",
              "difference by seed", "difference [95 %]")  # fmt: skip
    return Grid(title, header, tuple(sorted(lines, key=lambda line: line[0])))


def _position_grid(groups: Sequence[GroupFigures]) -> Grid:
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


if __name__ == "__main__":
    raise SystemExit(main())
