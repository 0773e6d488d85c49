"""`matrix.json`: heads of several unrolls and training seeds, each decoded with several policies.

The file holds the rounds of every cell; `seed_figures` computes every figure from them. A *cell* is
one head (unroll, N, recycled norm, seed) under one decode policy. A *group* is the cells that
differ in the seed alone. Letters: K drafts per step, N MTP modules.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mtp_research.errors import IntegrityError

MATRIX_FILE = "matrix.json"
SCHEMA_VERSION = 1
Rounds = tuple[tuple[int, ...], ...]  # accepted drafts of each round of each prompt


class GroupKey(NamedTuple):
    """What the seeds of a group share; `recycle_norm` is the training's, the other the loop's."""

    unroll: str
    num_mtp_modules: int
    recycle_norm: str
    policy: str
    decode_recycle_norm: str

    @property
    def head(self) -> str:
        """Name of the heads, such as `chain N=3`."""
        return f"{self.unroll} N={self.num_mtp_modules}"


@dataclass(frozen=True)
class MatrixPrompt:
    """One prompt by name and hash of its token ids."""

    id: str
    domain: str
    sha256: str


@dataclass(frozen=True)
class MatrixCell:
    """One head under one policy.

    Attributes:
        key: see `GroupKey`.
        seed: of the training.
        num_speculative_tokens: K.
        is_match: policy and recycled norm are those the head was trained for.
        head_sha256: of the head's weights.
        accepted_per_round: of the loop, rounds whose K tokens are all known, prompt by prompt.
        clean_per_round: the same if the rows of rejected drafts were rerun, by the replay walk;
            None for a policy that reruns them.
        num_other_texts: prompts whose text is not the one of plain decoding.
        num_other_rounds: prompts whose rounds are not those of the replay walk.
    """

    key: GroupKey
    seed: int
    num_speculative_tokens: int
    is_match: bool
    head_sha256: str
    accepted_per_round: Rounds
    clean_per_round: Rounds | None
    num_other_texts: int
    num_other_rounds: int


@dataclass(frozen=True)
class SeedMatrix:
    """All cells.

    Attributes:
        seeds: asked for; `done_seeds` are those with all their cells.
        num_cells_per_seed: cells of a finished seed.
        prompts: decoded by every cell.
        cells: measured so far.
        bootstrap_seed: of the resampling.
        settings: dtype, tokens per prompt, configuration.
        run: command, code, versions and machine.
    """

    seeds: tuple[int, ...]
    num_cells_per_seed: int
    prompts: tuple[MatrixPrompt, ...]
    cells: tuple[MatrixCell, ...]
    bootstrap_seed: int
    settings: Mapping[str, object]
    run: Mapping[str, object]

    @property
    def done_seeds(self) -> tuple[int, ...]:
        """Seeds with all their cells, in order."""
        have = [cell.seed for cell in self.cells]
        return tuple(s for s in self.seeds if have.count(s) == self.num_cells_per_seed)


def read_matrix(folder: Path) -> SeedMatrix:
    """Read `matrix.json`; its figures are left aside, `group_figures` computes them again.

    Raises:
        IntegrityError: missing, no JSON, of another version, with wrong fields, or a cell has not
            one list of rounds for each prompt.
    """
    path = folder / MATRIX_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
        if stored.get("schema_version") != SCHEMA_VERSION:
            raise IntegrityError(f"{path}: expected schema_version {SCHEMA_VERSION}; run again.")
        matrix = SeedMatrix(
            seeds=tuple(stored["seeds"]),
            num_cells_per_seed=int(stored["num_cells_per_seed"]),
            prompts=tuple(MatrixPrompt(**one) for one in stored["prompts"]),
            cells=tuple(map(read_cell, stored["cells"])),
            bootstrap_seed=int(stored["bootstrap_seed"]),
            settings=stored["settings"],
            run=stored["run"],
        )
        _check(matrix)
        return matrix
    except IntegrityError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{path} is not a readable matrix: {error}.") from None


def read_cell(stored: dict[str, Any]) -> MatrixCell:  # Any: as json.loads returns it
    """A cell from its JSON values.

    Raises:
        ValueError: a round accepts less than none or more than K.
        KeyError: a field is missing.
    """
    clean = stored["clean_per_round"]
    fields = {
        "key": GroupKey(**stored["key"]),
        "accepted_per_round": _rounds(stored["accepted_per_round"]),
        "clean_per_round": None if clean is None else _rounds(clean),
    }
    cell = MatrixCell(**{**stored, **fields})
    counts = {count for rounds in cell.accepted_per_round for count in rounds}
    if not counts <= set(range(cell.num_speculative_tokens + 1)):
        raise ValueError(f"{cell.key} accepts {sorted(counts)} of {cell.num_speculative_tokens}")
    return cell


def _check(matrix: SeedMatrix) -> None:
    """Every cell has rounds for every prompt, is of a seed asked for, and is there once.

    Raises:
        ValueError: names the first that is not so.
    """
    num_prompts, seen = len(matrix.prompts), set()
    for cell in matrix.cells:
        name = f"the cell of {cell.key.head} seed {cell.seed} under {cell.key.policy}"
        for rounds in (cell.accepted_per_round, cell.clean_per_round):
            if rounds is not None and len(rounds) != num_prompts:
                raise ValueError(f"{name} has rounds of {len(rounds)} prompts for {num_prompts}")
        if cell.seed not in matrix.seeds:
            raise ValueError(f"{name} is of no seed asked for, {list(matrix.seeds)}")
        if (cell.key, cell.seed) in seen:
            raise ValueError(f"{name} is there twice")
        seen.add((cell.key, cell.seed))


def _rounds(stored: Iterable[Iterable[int]]) -> Rounds:
    return tuple(tuple(rounds) for rounds in stored)
