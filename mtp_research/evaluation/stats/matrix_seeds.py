"""`matrix.json`: heads of several unrolls and training seeds, each decoded with several policies.

The file holds the rounds of every cell; every figure is computed from them. A *cell* is one head
(unroll, N, recycled norm, seed) under one decode policy. A *group* is the cells that differ in the
seed alone. Figures are over the seeds that have all their cells, so that a matrix which was stopped
in the middle compares like with like. Intervals: two-level bootstrap over seeds and prompts,
paired: one set of draws for all groups. Letters: K drafts per step, N MTP modules, S seeds,
P prompts.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_research.evaluation.stats.bootstrap import (
    Draws,
    Estimate,
    Floats,
    Lengths,
    difference,
    estimate_of,
    interval_of,
    lengths,
    make_draws,
)
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.files import require_file

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
    """One head under one policy."""

    key: GroupKey
    seed: int  # of the training
    num_speculative_tokens: int  # K
    is_match: bool  # policy and recycled norm are those the head was trained for
    head_sha256: str  # of the head's weights
    # Of the loop, prompt by prompt: rounds that start before the stop token and whose K tokens are
    # all known
    accepted_per_round: Rounds
    # The same if the rows of rejected drafts were rerun, by the replay walk; None for a policy that
    # reruns them
    clean_per_round: Rounds | None
    num_other_texts: int  # prompts whose text is not the one of plain decoding
    num_other_rounds: int  # prompts whose rounds are not those of the replay walk
    # Rounds whose newest six tokens occurred before in the request; None in files of versions that
    # also counted the rounds behind the stop token
    num_repeated_rounds: int | None = None
    # Share of the anchors of the texts, the same ones for every policy, whose first i = 1 .. K
    # drafts are all right, rejected rows rerun; None in older files
    anchor_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class SeedMatrix:
    """All cells."""

    seeds: tuple[int, ...]  # asked for; `done_seeds` are those with all their cells
    num_cells_per_seed: int  # cells of a finished seed
    prompts: tuple[MatrixPrompt, ...]  # decoded by every cell
    cells: tuple[MatrixCell, ...]  # measured so far
    bootstrap_seed: int  # of the resampling
    settings: Mapping[str, object]  # dtype, tokens per prompt, configuration
    run: Mapping[str, object]  # command, code, versions and machine

    @property
    def done_seeds(self) -> tuple[int, ...]:
        """Seeds with all their cells, in order."""
        have = [cell.seed for cell in self.cells]
        return tuple(s for s in self.seeds if have.count(s) == self.num_cells_per_seed)


def read_matrix(folder: Path) -> SeedMatrix:
    """Read `matrix.json`; its figures are left aside, `group_figures` computes them again.

    Raises:
        ConfigError: there is no such file.
        IntegrityError: no JSON, of another version, with wrong fields, or a cell has not
            one list of rounds for each prompt.
    """
    path = folder / MATRIX_FILE
    require_file(path, kind="matrix")
    try:
        stored = json.loads(path.read_text(encoding="utf8"))
        if stored.get("schema_version") != SCHEMA_VERSION:
            raise IntegrityError(f"{path}: expected schema_version {SCHEMA_VERSION}; run again.")
        matrix = SeedMatrix(
            seeds=tuple(stored["seeds"]),
            num_cells_per_seed=int(stored["num_cells_per_seed"]),
            prompts=tuple(MatrixPrompt(**one) for one in stored["prompts"]),
            cells=tuple(map(_cell, stored["cells"])),
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


def _cell(stored: dict[str, Any]) -> MatrixCell:  # Any: as json.loads returns it
    clean, rates = stored["clean_per_round"], stored.get("anchor_rates")
    fields = {
        "key": GroupKey(**stored["key"]),
        "accepted_per_round": _rounds(stored["accepted_per_round"]),
        "clean_per_round": None if clean is None else _rounds(clean),
        "anchor_rates": None if rates is None else tuple(rates),
    }
    cell = MatrixCell(**{**stored, **fields})
    counts = {count for rounds in cell.accepted_per_round for count in rounds}
    if not counts <= set(range(cell.num_speculative_tokens + 1)):
        raise ValueError(f"{cell.key} accepts {sorted(counts)} of {cell.num_speculative_tokens}")
    return cell


def _check(matrix: SeedMatrix) -> None:
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


_CHAIN, _EAGLE = "training", "eagle"  # policies that the two ways of training were made for


@dataclass(frozen=True)
class GroupFigures:
    """Acceptance of one group over the finished seeds; lengths in tokens per round."""

    key: GroupKey
    is_match: bool  # the policy and the norm the heads were trained for
    num_rounds: int  # of all seeds
    length: Estimate  # mean over seeds, 95 % interval over seeds and prompts
    by_seed: tuple[float | None, ...]  # each seed's own; None for one without rounds
    # If the rows of rejected drafts were rerun; None for a clean policy
    clean_length: Estimate | None
    # Length minus that of the same heads' match, paired; None for the match itself and where the
    # matrix has no match
    minus_match: Estimate | None
    # p_1 .. p_K, mean over seeds of rounds with at least i accepted drafts / rounds; length = 1 +
    # their sum.
    positions: tuple[Estimate, ...]
    # Mean over seeds of `MatrixCell.anchor_rates`, comparable between policies as p_i is not; empty
    # for one domain and where a cell has none
    anchor_rates: tuple[float, ...]
    repeated_share: float | None  # of the rounds, over all prompts; None where a cell lacks it


@dataclass(frozen=True)
class MatchPair:
    """Heads trained for `training`, decoded with it, minus heads trained for `eagle`, with it."""

    ours: GroupKey  # group of the first, `chain`
    theirs: GroupKey  # group of the second, `ttt` or `shared_context`, of the same N and norm
    ours_length: Estimate  # acceptance length of the first
    theirs_length: Estimate  # of the second
    difference: Estimate  # ours - theirs over the same seeds and prompts
    by_seed: tuple[float | None, ...]  # each seed's own difference; None where one has no rounds


def group_figures(matrix: SeedMatrix, *, domain: str | None = None) -> list[GroupFigures]:
    """Figures of every group, over all prompts or over one domain's; empty without a full seed."""
    chosen, groups = _chosen(matrix, domain), _groups(matrix)
    if not chosen or not groups:
        return []
    draws = _draws(matrix, chosen)
    own = {key: _lengths(_loops(cells), chosen, draws) for key, cells in groups.items()}
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
                by_seed=_known(own[key].by_seed),
                clean_length=estimate_of(_lengths(reruns, chosen, draws)) if reruns else None,
                minus_match=None if match == key else difference(own[key], own[match]),
                positions=_positions(cells, chosen, draws),
                anchor_rates=() if domain else _anchor_rates(cells),
                repeated_share=None if domain else _repeated_share(cells),
            )
        )
    return made


def match_pairs(matrix: SeedMatrix, *, domain: str | None = None) -> list[MatchPair]:
    """Every pair of matching cells of equal N and recycled norm; empty without a full seed."""
    chosen, groups = _chosen(matrix, domain), _groups(matrix)
    matches = [key for key, cells in groups.items() if cells[0].is_match]
    pairs = [
        (ours, theirs)
        for ours in matches
        for theirs in matches
        if (ours.policy, theirs.policy) == (_CHAIN, _EAGLE)
        and ours.num_mtp_modules == theirs.num_mtp_modules
        and ours.recycle_norm == theirs.recycle_norm
    ]
    if not chosen or not pairs:
        return []
    draws = _draws(matrix, chosen)
    made = []
    for ours, theirs in pairs:
        mine, other = (_lengths(_loops(groups[key]), chosen, draws) for key in (ours, theirs))
        made.append(
            MatchPair(
                ours=ours,
                theirs=theirs,
                ours_length=estimate_of(mine),
                theirs_length=estimate_of(other),
                difference=difference(mine, other),
                by_seed=_known(mine.by_seed - other.by_seed),
            )
        )
    return made


def row_name(key: GroupKey) -> str:
    """The heads of a group; pre-norm recycling is named, the usual post-norm is not."""
    return key.head + (f" {key.recycle_norm}" if key.recycle_norm != "post_norm" else "")


def column_name(key: GroupKey) -> str:
    """The policy of a group, and the recycled norm where it is not the heads' own."""
    norm = key.decode_recycle_norm
    return key.policy + (f" as {norm}" if norm != key.recycle_norm else "")


def _chosen(matrix: SeedMatrix, domain: str | None) -> list[int]:
    return [i for i, prompt in enumerate(matrix.prompts) if domain in (None, prompt.domain)]


def _groups(matrix: SeedMatrix) -> dict[GroupKey, list[MatrixCell]]:
    """Cells of the finished seeds by group, in the order of the seeds."""
    groups: dict[GroupKey, list[MatrixCell]] = {}
    for cell in sorted(matrix.cells, key=lambda cell: matrix.seeds.index(cell.seed)):
        if cell.seed in matrix.done_seeds:
            groups.setdefault(cell.key, []).append(cell)
    return groups


def _draws(matrix: SeedMatrix, chosen: Sequence[int]) -> Draws:
    """Equal for all groups, which pairs them."""
    return make_draws(len(matrix.done_seeds), len(chosen), seed=matrix.bootstrap_seed)


def _loops(cells: Sequence[MatrixCell]) -> list[Rounds]:
    return [cell.accepted_per_round for cell in cells]


def _lengths(cells: Sequence[Rounds], chosen: Sequence[int], draws: Draws) -> Lengths:
    """One row a seed, one column a chosen prompt."""
    accepted = [[sum(cell[index]) for index in chosen] for cell in cells]
    rounds = [[len(cell[index]) for index in chosen] for cell in cells]
    return lengths(accepted, rounds, draws)


def _positions(
    cells: Sequence[MatrixCell], chosen: Sequence[int], draws: Draws
) -> tuple[Estimate, ...]:
    """p_1 .. p_K: the length of rounds that could accept one draft, minus the bonus token."""
    made = []
    for position in range(1, cells[0].num_speculative_tokens + 1):
        reached = [
            tuple(tuple(int(n >= position) for n in rounds) for rounds in cell)
            for cell in _loops(cells)
        ]
        one = _lengths(reached, chosen, draws)
        made.append(interval_of(one.value - 1, one.draws - 1))
    return tuple(made)


def _anchor_rates(cells: Sequence[MatrixCell]) -> tuple[float, ...]:
    found = [cell.anchor_rates for cell in cells]
    if None in found:
        return ()
    return tuple(np.mean(np.array(found), axis=0).tolist())


def _repeated_share(cells: Sequence[MatrixCell]) -> float | None:
    repeated = [cell.num_repeated_rounds for cell in cells if cell.num_repeated_rounds is not None]
    num_rounds = sum(len(rounds) for cell in cells for rounds in cell.accepted_per_round)
    return sum(repeated) / num_rounds if len(repeated) == len(cells) and num_rounds else None


def _known(values: Floats) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())
