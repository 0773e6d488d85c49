"""`task=matrix`: heads of every unroll, decoded with every policy, the walk against the loop.

    python train.py experiment=policy_matrix          three seeds, intervals over seeds and prompts
    python train.py experiment=policy_matrix_tiny     one seed, a CPU, 3.5 minutes
    python train.py experiment=recycle_norm           each head with its own and the other norm

trains heads for each seed, number of modules and unroll on the same documents, decodes the same
prompts with each head under each policy, and holds every cell to two equalities: the text is the
one that plain decoding gives, and the rounds of the loop are the rounds of the replay walk, one by
one. `matrix.json` is written after every cell; a run that was killed goes on with the next one.

Stands beside the entries because it is the one place that both trains and decodes.
Letters: N MTP modules, K drafts per step.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from mtp_research.config.schema import TrainConfig
from mtp_research.data.packing import EncodedDocument
from mtp_research.evaluation.report.terminal import fitted, rich_table
from mtp_research.evaluation.report.wandb_log import ReportRun, publish
from mtp_research.evaluation.stats.matrix_seeds import (
    MATRIX_FILE,
    GroupFigures,
    MatrixPrompt,
    SeedMatrix,
    column_name,
    group_figures,
    read_matrix,
    row_name,
)
from mtp_research.models.target import Target, target_hashes
from mtp_research.runtime.errors import ConfigError, IntegrityError, Interrupted
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import redact_tree, run_record
from mtp_research.studies.matrix_cell import decode_prompts
from mtp_research.studies.matrix_workers import (
    Asked,
    changed_settings,
    decoding_config,
    head_runs,
    measure_heads,
)
from mtp_research.studies.study_tables import matrix_grids, write_matrix
from mtp_research.training.documents import held_out_indices, read_texts, unseen
from mtp_research.training.setup import load_inputs

if TYPE_CHECKING:
    from mtp_research.evaluation.report.page import Section

TABLE_WIDTH = 160  # characters; log files have no width of their own


def run_policy_matrix(
    config: TrainConfig, output_dir: Path, *, on_start: Callable[[], object] | None = None
) -> dict[str, object]:
    """Train and decode all cells; `cells` of the result has an entry for all seeds of a cell.

    `on_start` is called when the folder is known to hold no matrix of other settings.
    `head`, `objective` and `trainer` hold for all heads but for the unroll, N, the recycled norm
    and the seed. Each head has a folder of its own in `output_dir`, which a repeated call reuses.
    """
    target, documents = load_inputs(decoding_config(config))
    asked = documents.held_out
    if config.matrix.prompts:
        asked = _other_documents(config, training=documents.train)
    chosen = _prompt_documents(asked, limit=config.matrix.num_prompts)
    prompts = [prompt for prompt, _ in chosen]
    plain = decode_prompts(
        target, None, prompts, policy="training", num_drafts=0, num_new=config.matrix.max_new_tokens
    )
    matrix = _start(config, output_dir, prompts=map(_prompt_facts, chosen), target=target)
    if on_start is not None:
        on_start()
    with ReportRun(config.logger) as wandb_run:
        wandb_run.open(output_dir, config=dataclasses.asdict(config), job_type="study")
        matrix = _measure(matrix, config, output_dir, asked=Asked(prompts, plain), target=target)
        _print_grids(matrix)
        found = group_figures(matrix)
        publish(
            lambda: _sections(output_dir),
            results=output_dir / MATRIX_FILE,
            run=wandb_run,
            scalars=_lengths(found),
        )
    return {
        "num_prompts": len(prompts),
        "seeds": list(matrix.seeds),
        "results": str(output_dir / MATRIX_FILE),
        "cells": list(map(_group_facts, found)),
    }


def _measure(
    matrix: SeedMatrix, config: TrainConfig, output_dir: Path, *, asked: Asked, target: Target
) -> SeedMatrix:
    """The matrix with all cells; it is written after each."""
    cells = measure_heads(
        [run for seed in matrix.seeds for run in head_runs(config, output_dir, seed=seed)],
        asked,
        target=target,
        done=matrix.cells,
        num_workers=config.matrix.num_workers,
    )
    progress = WorkProgress(
        "policy matrix",
        total=matrix.num_cells_per_seed * len(matrix.seeds),
        unit="cells",
        first=len(matrix.cells),
        is_live=False,  # the training of a head has a live line of its own
    )
    goes_on = f"the same command with output_dir={output_dir} goes on."
    with progress, _in_the_name_of(goes_on):
        for cell in cells:
            others = (c for c in matrix.cells if (c.key, c.seed) != (cell.key, cell.seed))
            matrix = dataclasses.replace(matrix, cells=(*others, cell))
            write_matrix(output_dir, matrix, figures=cell.seed in matrix.done_seeds)
            progress.done(len(matrix.cells), note=f"{row_name(cell.key)} {column_name(cell.key)}")
    write_matrix(output_dir, matrix, figures=True)
    return matrix


@contextmanager
def _in_the_name_of(goes_on: str) -> Iterator[None]:
    """A head that was stopped in its training knows its own folder alone."""
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(f"{str(stop).partition(';')[0]}; {goes_on}") from None


def _print_grids(matrix: SeedMatrix) -> None:
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=TABLE_WIDTH)
    for grid in matrix_grids(matrix):
        console.print(rich_table(fitted(grid, console.width)))


def _lengths(found: Sequence[GroupFigures]) -> dict[str, float]:
    """Acceptance length by head and policy, for the summary on W&B."""
    return {
        f"{row_name(one.key)} {column_name(one.key)}/acceptance_length": one.length.value
        for one in found
        if one.length.value is not None
    }


def _sections(output_dir: Path) -> "list[Section]":
    """Of the page; its libraries are needed only where it is sent."""
    from mtp_research.studies.study_pages import matrix_section

    return [matrix_section(output_dir, name=output_dir.name)]


def _group_facts(one: GroupFigures) -> dict[str, object]:
    return {
        **one.key._asdict(),
        "is_match": one.is_match,
        "acceptance_length": one.length.value,
        "interval": [one.length.low, one.length.high],
        "clean_length": (one.clean_length or one.length).value,
        "num_rounds": one.num_rounds,
    }


def _start(
    config: TrainConfig, output_dir: Path, *, prompts: Iterable[MatrixPrompt], target: Target
) -> SeedMatrix:
    asked: dict[str, object] = dataclasses.asdict(config)
    for key in ("output_dir", "logger", "launcher"):  # of this call, as is the number of workers
        del asked[key]
    asked["matrix"] = {**vars(config.matrix), "num_workers": None}  # no cell depends on it
    seeds = tuple(config.matrix.seeds or [config.seed])
    num_norms = max(1, len(config.matrix.recycle_norms))
    dtype = str(target.dtype).removeprefix("torch.")
    num_heads = len(head_runs(config, output_dir, seed=seeds[0]))
    matrix = SeedMatrix(
        seeds=seeds,
        num_cells_per_seed=num_heads * len(config.matrix.policies) * num_norms,
        prompts=tuple(prompts),
        cells=(),
        bootstrap_seed=config.seed,
        settings={"dtype": dtype, "config": json.loads(json.dumps(redact_tree(asked)))},
        run=run_record() | {"target": target_hashes(target)},
    )
    if not (output_dir / MATRIX_FILE).is_file():
        return matrix
    stored = read_matrix(output_dir)
    changed = changed_settings(stored.settings, matrix.settings)
    same = dataclasses.replace(stored, cells=(), run=matrix.run, settings=matrix.settings) == matrix
    if changed or not same:
        raise IntegrityError(
            f"{output_dir / MATRIX_FILE} holds a matrix of other prompts or settings "
            f"({', '.join(changed) or 'prompts or seeds'}); set them back, or another output_dir."
        )
    return stored


def _other_documents(
    config: TrainConfig, *, training: Sequence[EncodedDocument]
) -> list[EncodedDocument]:
    """Documents of `matrix.prompts` that are in no training document, as many of each domain."""
    found = unseen(read_texts(config.matrix.prompts, model_path=config.model.path), train=training)
    # Plain text begins with one token that is not the target's own, and asks nothing.
    asked = [one for one in found if any(one.loss_mask) and not any(one.loss_mask[:2])]
    num_documents = min(config.matrix.num_prompts, len(asked))
    return [asked[index] for index in sorted(held_out_indices(asked, num_documents=num_documents))]


def _prompt_documents(
    documents: Sequence[EncodedDocument], *, limit: int
) -> list[tuple[tuple[int, ...], EncodedDocument]]:
    """What comes before the first own token of each document, evenly spread over them."""
    lengths = [(one, one.loss_mask.index(True)) for one in documents if any(one.loss_mask)]
    found = [(one.token_ids[:n], one) for one, n in lengths if n > 0]
    if not found:
        raise ConfigError(
            "data.path or matrix.prompts must hold documents with a prompt before the target's own "
            "tokens, got none; set data=lab_regenerated."
        )
    return found[:: max(1, len(found) // limit)][:limit]


def _prompt_facts(chosen: tuple[tuple[int, ...], EncodedDocument]) -> MatrixPrompt:
    prompt, document = chosen
    digest = hashlib.sha256(json.dumps(list(prompt)).encode()).hexdigest()
    return MatrixPrompt(document.doc_id, document.domain, digest)
