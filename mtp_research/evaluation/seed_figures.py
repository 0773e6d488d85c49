"""Figures of a train unroll x decode policy matrix over training seeds, from its counters.

    python train.py experiment=policy_matrix output_dir=runs/matrix
    python -m mtp_research.evaluation.seed_figures runs/matrix         the tables again, from JSON

Computed in `seed_groups.py`, laid out in `seed_tables.py`; this file stores them beside the
counters, and holds stored ones against the counters when they are read. Letter: N MTP modules.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mtp_research.evaluation.runs import require_stored_figures
from mtp_research.evaluation.seed_tables import markdown_tables, matrix_grids
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
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import write_atomically

__all__ = ["group_figures", "matrix_grids", "read_checked_matrix", "summary", "write_matrix"]


def summary(matrix: SeedMatrix) -> dict[str, object]:
    """The figures of `matrix.json`, over all prompts and by domain."""
    domains = [None, *sorted({prompt.domain for prompt in matrix.prompts})]
    figures = {domain: group_figures(matrix, domain=domain) for domain in domains}
    return {
        "done_seeds": list(matrix.done_seeds),
        "groups": [_plain(one) for one in figures[None]],
        "heat_maps": [heat_map(groups, domain=d) for d, groups in figures.items()],
        "match_pairs": [_plain_pair(p, d) for d in domains for p in match_pairs(matrix, domain=d)],
    }


def heat_map(groups: Sequence[GroupFigures], *, domain: str | None) -> dict[str, object]:
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

    Raises:
        IntegrityError: see `read_matrix`; or a stored figure differs.
    """
    matrix, path = read_matrix(folder), folder / MATRIX_FILE
    stored = json.loads(path.read_text(encoding="utf8")).get("summary")
    if stored is not None:
        require_stored_figures(path, stored, summary(matrix))
    return matrix


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m mtp_research.evaluation.seed_figures`."""
    parser = argparse.ArgumentParser(
        prog="python -m mtp_research.evaluation.seed_figures",
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


def _plain(one: GroupFigures) -> dict[str, object]:
    names = {"row": row_name(one.key), "column": column_name(one.key)}
    return {**asdict(one), "key": one.key._asdict(), **names}


def _plain_pair(pair: MatchPair, domain: str | None) -> dict[str, object]:
    keys = {"ours": pair.ours._asdict(), "theirs": pair.theirs._asdict()}
    return {"domain": domain, **asdict(pair), **keys}


if __name__ == "__main__":
    raise SystemExit(main())
