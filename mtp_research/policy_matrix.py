"""`task=matrix`: heads of every unroll, decoded with every policy, the walk against the loop.

    python train.py experiment=policy_matrix_tiny

trains heads for each unroll and number of modules on the same documents, decodes the same prompts
with each head under each policy, and holds every cell to two equalities: the text is the one that
plain decoding gives, and the rounds of the loop are the rounds of the replay walk, one by one.

Stands beside the entries because it is the one place that both trains and decodes.
Letters: N MTP modules, K drafts per step, k = K depths.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from mtp_research.config import EngineConfig, TrainConfig
from mtp_research.data.packing import EncodedDocument
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.errors import ConfigError, NumericFault
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.matrix_cell import Cell, measure_cell
from mtp_research.models.target import Target
from mtp_research.policy import POLICIES
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import cache_hidden, depths_of, load_inputs

TABLE_WIDTH = 120  # characters; log files have no width of their own


def run_policy_matrix(config: TrainConfig, output_dir: Path) -> dict[str, object]:
    """Train and decode all cells.

    Args:
        config: checked configuration; `head`, `objective` and `trainer` hold for all heads but for
            the unroll and N.
        output_dir: run folder; each head has its own below it, which a repeated call reuses.

    Returns:
        JSON-serialisable result with one entry a cell.

    Raises:
        ConfigError: no held-out document has a prompt and an answer.
        NumericFault: a cell's text or rounds are not those of plain decoding and of the walk.
    """
    runs = [
        _run_of(config, output_dir, unroll=unroll, num_mtp_modules=num_modules)
        for num_modules in config.matrix.num_mtp_modules
        for unroll in unrolls_of(num_modules, wanted=config.matrix.unrolls)
    ]
    for name, run in runs:
        cache_hidden(run)
        train_heads(run, output_dir / name)
    target, documents = load_inputs(config)
    prompts = _prompts(documents.held_out, limit=config.matrix.num_prompts)
    num_new = config.matrix.max_new_tokens
    plain = _decode(target, None, prompts, policy="training", num_drafts=0, num_new=num_new)
    cells = []
    for name, run in runs:
        heads = load_heads(output_dir / name / "head", target)
        for policy in config.matrix.policies:
            num_drafts = depths_of(run)
            records = _decode(
                target, heads, prompts, policy=policy, num_drafts=num_drafts, num_new=num_new
            )
            _check_text(records, plain, where=f"{name} under {policy}")
            cells.append(
                measure_cell(heads, records, prompts=prompts, policy=policy, num_drafts=num_drafts)
            )
    width = max(Console(stderr=True).width, TABLE_WIDTH)
    Console(stderr=True, width=width).print(matrix_table(cells))
    return {"num_prompts": len(prompts), "cells": [cell._asdict() for cell in cells]}


def unrolls_of(num_mtp_modules: int, *, wanted: Sequence[str]) -> list[str]:
    """Unrolls that make sense for N modules: `ttt` is `shared_context` with one module."""
    left_out = "shared_context" if num_mtp_modules == 1 and "ttt" in wanted else ""
    left_out = "ttt" if num_mtp_modules > 1 else left_out
    return [unroll for unroll in wanted if unroll != left_out]


def matrix_table(cells: Sequence[Cell]) -> Table:
    """Acceptance length of each head (row) under each policy (column), the match in bold."""
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    table = Table(title="acceptance length, loop = walk; bold: the policy matches the unroll")
    table.add_column("heads")
    for policy in policies:
        table.add_column(policy + ("" if POLICIES[policy].clean else ", leaves stale rows"))
    rows: dict[str, dict[str, str]] = {}
    for cell in cells:
        text = f"{cell.acceptance_length:.3f} +- {cell.standard_error:.3f}"
        if not POLICIES[cell.policy].clean:
            text += f", {cell.clean_length:.3f} if rerun"
        name = f"{cell.unroll} N={cell.num_mtp_modules}"
        rows.setdefault(name, {})[cell.policy] = f"[bold]{text}[/bold]" if cell.is_match else text
    for name, row in rows.items():
        table.add_row(name, *(row[policy] for policy in policies))
    return table


class _Run(NamedTuple):
    name: str
    config: TrainConfig


def _run_of(config: TrainConfig, output_dir: Path, *, unroll: str, num_mtp_modules: int) -> _Run:
    """Configuration of one head; all heads of equal depth share one cache of hidden states."""
    config = copy.deepcopy(config)
    config.task = "heads"
    config.objective.unroll, config.head.num_mtp_modules = unroll, num_mtp_modules
    if config.data.hidden_cache is None:
        config.data.hidden_cache = str(output_dir / f"hidden_k{depths_of(config)}")
    return _Run(f"{unroll}_n{num_mtp_modules}", config)


def _prompts(documents: Sequence[EncodedDocument], *, limit: int) -> list[tuple[int, ...]]:
    """What comes before the first own token of each document, evenly spread over them."""
    lengths = [
        (document, document.loss_mask.index(True))
        for document in documents
        if any(document.loss_mask)
    ]
    found = [document.token_ids[:length] for document, length in lengths if length > 0]
    if not found:
        raise ConfigError(
            "data.path must hold documents with a prompt before the target's own tokens, got none "
            "among those held out; set data=lab_regenerated."
        )
    return found[:: max(1, len(found) // limit)][:limit]


def _decode(
    target: Target,
    heads: MTPHeads | None,
    prompts: Sequence[tuple[int, ...]],
    *,
    policy: str,
    num_drafts: int,
    num_new: int,
) -> list[RequestRecord]:
    """Greedy text of a fixed length, every prompt read whole in its first step."""
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    engine = EngineConfig(
        max_num_requests=len(prompts),
        max_num_batched_tokens=max(512, total + len(prompts) * (num_drafts + 1)),
        max_prefill_chunk=longest,
        max_model_len=longest + num_new + 1,
    )
    decoder = SpecDecoder(
        target, heads, policy=policy, num_speculative_tokens=num_drafts, engine=engine
    )
    records = decoder.generate(prompts, sampling=SamplingParams(max_new_tokens=num_new))
    return sorted(records, key=lambda record: int(record.request_id))


def _check_text(
    records: Sequence[RequestRecord], plain: Sequence[RequestRecord], *, where: str
) -> None:
    for record, expected in zip(records, plain, strict=True):
        if record.output_token_ids != expected.output_token_ids:
            raise NumericFault(
                f"policy matrix: {where}, prompt {record.request_id}: the text differs from plain "
                "decoding; they are equal in float32, set model.dtype=float32."
            )
