"""Figures of a train unroll x decode policy matrix over training seeds, from its counters.

    python train.py experiment=policy_matrix output_dir=runs/matrix
    python -m mtp_research.evaluation.seed_figures runs/matrix         the tables again, from JSON

Figures are over the seeds that have all their cells, so that a matrix which was stopped in the
middle compares like with like. Intervals: two-level bootstrap over seeds and prompts, paired.
Letters: K drafts per step, N MTP modules, S seeds, P prompts.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mtp_research.errors import IntegrityError
from mtp_research.evaluation.bootstrap import Estimate
from mtp_research.evaluation.bootstrap_seeds import (
    Draws,
    Lengths,
    difference,
    estimate_of,
    lengths,
    make_draws,
)
from mtp_research.evaluation.markdown import markdown_table
from mtp_research.evaluation.seed_matrix import (
    MATRIX_FILE,
    SCHEMA_VERSION,
    GroupKey,
    MatrixCell,
    Rounds,
    SeedMatrix,
    read_matrix,
)
from mtp_research.evaluation.tables import UNDEFINED, Grid, interval
from mtp_research.files import write_atomically


@dataclass(frozen=True)
class GroupFigures:
    """Acceptance of one group over the finished seeds; lengths in tokens per round.

    Attributes:
        key: see `GroupKey`.
        is_match: the policy and the norm the heads were trained for.
        num_rounds: of all seeds.
        length: mean over seeds, 95 % interval over seeds and prompts.
        by_seed: each seed's own.
        clean_length: if the rows of rejected drafts were rerun; None for a clean policy.
        minus_match: length minus that of the same heads' match, paired; None for the match itself
            and where the matrix has no match.
    """

    key: GroupKey
    is_match: bool
    num_rounds: int
    length: Estimate
    by_seed: tuple[float, ...]
    clean_length: Estimate | None
    minus_match: Estimate | None


def group_figures(matrix: SeedMatrix, *, domain: str | None = None) -> list[GroupFigures]:
    """Figures of every group, over all prompts or over one domain's; empty without a full seed."""
    chosen = [i for i, p in enumerate(matrix.prompts) if domain in (None, p.domain)]
    seeds = matrix.done_seeds
    if not seeds or not chosen:
        return []
    draws = make_draws(len(seeds), len(chosen), seed=matrix.bootstrap_seed)
    groups: dict[GroupKey, list[MatrixCell]] = {}
    for cell in sorted(matrix.cells, key=lambda cell: matrix.seeds.index(cell.seed)):
        if cell.seed in seeds:
            groups.setdefault(cell.key, []).append(cell)
    own = {
        key: _lengths([cell.accepted_per_round for cell in cells], chosen, draws)
        for key, cells in groups.items()
    }
    matches = {
        (key.unroll, key.num_mtp_modules, key.recycle_norm): key
        for key, cells in groups.items()
        if cells[0].is_match
    }
    made = []
    for key, cells in groups.items():
        match = matches.get((key.unroll, key.num_mtp_modules, key.recycle_norm), key)
        reruns = [c.clean_per_round for c in cells if c.clean_per_round is not None]
        made.append(
            GroupFigures(
                key=key,
                is_match=cells[0].is_match,
                num_rounds=sum(len(c.accepted_per_round[i]) for c in cells for i in chosen),
                length=estimate_of(own[key]),
                by_seed=tuple(own[key].by_seed.tolist()),
                clean_length=estimate_of(_lengths(reruns, chosen, draws)) if reruns else None,
                minus_match=None if match == key else difference(own[key], own[match]),
            )
        )
    return made


def summary(matrix: SeedMatrix) -> dict[str, object]:
    """The figures of `matrix.json`, over all prompts and by domain."""
    domains = [None, *sorted({prompt.domain for prompt in matrix.prompts})]
    figures = {domain: group_figures(matrix, domain=domain) for domain in domains}
    return {
        "done_seeds": list(matrix.done_seeds),
        "groups": [_plain(one) for one in figures[None]],
        "heat_maps": [heat_map(groups, domain=d) for d, groups in figures.items()],
    }


def heat_map(groups: Sequence[GroupFigures], *, domain: str | None) -> dict[str, object]:
    """Lengths by head (row) and decode policy (column) for drawing; null where there is no cell."""
    rows, columns = (list(dict.fromkeys(map(name, groups))) for name in (row_name, column_name))
    at = {(row_name(one), column_name(one)): one for one in groups}
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


def row_name(one: GroupFigures) -> str:
    """The heads of a group; pre-norm recycling is named, the usual post-norm is not."""
    norm = one.key.recycle_norm
    return one.key.head + (f" {norm}" if norm != "post_norm" else "")


def column_name(one: GroupFigures) -> str:
    """The policy of a group, and the recycled norm where it is not the heads' own."""
    norm = one.key.decode_recycle_norm
    return one.key.policy + (f" as {norm}" if norm != one.key.recycle_norm else "")


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


def matrix_grid(groups: Sequence[GroupFigures], *, title: str) -> Grid:
    """Acceptance length of each head (row) under each policy (column); `*` marks the match."""
    columns = list(dict.fromkeys(map(column_name, groups)))
    rows: dict[str, dict[str, str]] = {}
    for one in groups:
        text = interval(one.length) + "*" * one.is_match
        if one.clean_length is not None:
            text += f", {one.clean_length.value:.3f} if rerun"
        rows.setdefault(row_name(one), {})[column_name(one)] = text
    lines = [(head, *(row.get(name, UNDEFINED) for name in columns)) for head, row in rows.items()]
    return Grid(title, ("heads", *columns), tuple(lines))


def difference_grid(groups: Sequence[GroupFigures]) -> Grid:
    """Each cell minus the same heads' match, paired over seeds and prompts."""
    lines = [
        (
            row_name(one),
            column_name(one),
            " ".join(f"{value:.3f}" for value in one.by_seed),
            interval(one.minus_match, "+.3f") if one.minus_match else UNDEFINED,
        )
        for one in groups
    ]
    title = "acceptance length minus that of the matching policy"
    return Grid(title, ("heads", "policy", "length by seed", "difference [95 %]"), tuple(lines))


def matrix_grids(matrix: SeedMatrix) -> list[Grid]:
    """The matrix over all prompts and by domain, and the differences to the match."""
    done, groups = matrix.done_seeds, group_figures(matrix)
    title = f"acceptance length, {len(done)} of {len(matrix.seeds)} seeds"
    grids = [matrix_grid(groups, title=f"{title}, {len(matrix.prompts)} prompts; * the match")]
    for domain in sorted({prompt.domain for prompt in matrix.prompts}):
        num_prompts = sum(prompt.domain == domain for prompt in matrix.prompts)
        own = group_figures(matrix, domain=domain)
        grids.append(matrix_grid(own, title=f"{domain}: {title}, {num_prompts} prompts"))
    return [*grids, difference_grid(groups)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.evaluation.seed_figures`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.seed_figures",
        description="Print the tables of a policy matrix as Markdown.",
    )
    parser.add_argument("folder", type=Path)
    try:
        matrix = read_matrix(parser.parse_args(argv).folder)
    except IntegrityError as fault:
        sys.stderr.write(f"error: {fault}\n")
        return fault.exit_code
    tables = [
        f"{one.title}\n\n{markdown_table(one.header, one.rows)}" for one in matrix_grids(matrix)
    ]
    sys.stdout.write("\n\n".join(tables) + "\n")
    return 0


def _lengths(cells: Sequence[Rounds], chosen: Sequence[int], draws: Draws) -> Lengths:
    """One row a seed, one column a chosen prompt."""
    accepted = [[sum(cell[index]) for index in chosen] for cell in cells]
    rounds = [[len(cell[index]) for index in chosen] for cell in cells]
    return lengths(accepted, rounds, draws)


def _plain(one: GroupFigures) -> dict[str, object]:
    return {
        **asdict(one),
        "key": one.key._asdict(),
        "row": row_name(one),
        "column": column_name(one),
    }


if __name__ == "__main__":
    raise SystemExit(main())
