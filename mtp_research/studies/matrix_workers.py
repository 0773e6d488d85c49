"""Heads and cells of a policy matrix, head by head, in this process or in several on one machine.

A head that is there already is used again: a matrix that was killed goes on with the next one.
Small heads leave most of a GPU idle: `matrix.num_workers` heads are trained and decoded at a time,
each in a process of its own with its own copy of the target, dealt out to the GPUs there are.
Cells do not depend on the number. Letters: N MTP modules, k depths.
"""

import copy
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import NamedTuple, cast

import torch

from mtp_research.config.schema import TrainConfig
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.stats.matrix_seeds import GroupKey, MatrixCell
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.family import NormPoint
from mtp_research.models.target import Target
from mtp_research.policy.fields import MATCHING_POLICY
from mtp_research.runtime.errors import NumericFault
from mtp_research.runtime.files import sha256_of
from mtp_research.runtime.provenance import redact_tree
from mtp_research.studies.matrix_cell import decode_prompts, measure_cell
from mtp_research.training.loop import train_heads
from mtp_research.training.setup import cache_hidden, depths_of, load_inputs

logger = logging.getLogger(__name__)
_TRAINED_FILE = "trained.json"  # written when a head's training has ended
_SECTIONS = ("model", "head", "data", "objective", "trainer", "seed")  # what a head depends on
_PARENT_POLL_S = 1.0


class Asked(NamedTuple):
    """What every cell decodes, and the texts of plain decoding."""

    prompts: list[tuple[int, ...]]
    plain: list[RequestRecord]


class HeadRun(NamedTuple):
    """One training run: its folder, and its configuration."""

    folder: Path
    config: TrainConfig


def head_runs(config: TrainConfig, output_dir: Path, *, seed: int) -> list[HeadRun]:
    """The heads of one seed; all of equal depth share one cache of hidden states."""
    return [
        _run_of(config, output_dir, unroll, num_modules, norm, seed)
        for num_modules in config.matrix.num_mtp_modules
        for unroll in unrolls_of(num_modules, wanted=config.matrix.unrolls)
        for norm in config.matrix.recycle_norms or [config.head.recycle_norm]
    ]


def unrolls_of(num_mtp_modules: int, *, wanted: Sequence[str]) -> list[str]:
    """Unrolls that make sense for N modules: `ttt` is `shared_context` with one module."""
    left_out = "shared_context" if num_mtp_modules == 1 and "ttt" in wanted else ""
    left_out = "ttt" if num_mtp_modules > 1 else left_out
    return [unroll for unroll in wanted if unroll != left_out]


def decoding_config(config: TrainConfig) -> TrainConfig:
    """The configuration with the dtype that cells are decoded in, for loading the target."""
    if config.matrix.dtype == "auto":
        return config
    config = copy.deepcopy(config)
    config.model.dtype, config.trainer.precision = config.matrix.dtype, "auto"
    return config


def train_run(run: HeadRun) -> None:
    """Train one head, unless its folder says that this was done with this configuration."""
    mark, wanted = run.folder / _TRAINED_FILE, _facts(run.config)
    if mark.is_file() and not changed_settings(json.loads(mark.read_text())["config"], wanted):
        logger.info("%s is trained", run.folder.name)
        return
    if not Path(str(run.config.data.hidden_cache)).is_dir():
        cache_hidden(run.config)
    result = train_heads(run.config, run.folder)
    mark.write_text(json.dumps({"config": wanted, "result": result}) + "\n", encoding="utf8")


def changed_settings(stored: object, wanted: object, at: str = "") -> list[str]:
    """Dotted keys that differ, of those that both have: a version of the schema may add or drop."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        keys = sorted(stored.keys() & wanted.keys())
        found = [changed_settings(stored[key], wanted[key], f"{at}.{key}") for key in keys]
        return [key for one in found for key in one]
    return [] if stored == wanted else [at.lstrip(".")]


def decoded_as(heads: MTPHeads, recycle_norm: str) -> MTPHeads:
    """The same modules, their outputs fed on as if the head's record said `recycle_norm`.

    A wrong record is invisible in the text and costs acceptance; this is how its price is measured.
    The heads passed in are left as they are; both share their weights.
    """
    view = copy.copy(heads)
    view.spec = dataclasses.replace(heads.spec, recycle_norm=cast(NormPoint, recycle_norm))
    return view


def measure_heads(
    runs: Sequence[HeadRun],
    asked: Asked,
    *,
    target: Target,
    done: Collection[MatrixCell],
    num_workers: int,
) -> Iterator[MatrixCell]:
    """Cells missing in `done`, as they are measured; untrained heads are trained.

    A cell of `done` whose head has other weights by now counts as missing, and so does one of a
    version that counted rounds behind the stop token. One of `num_workers` is
    this process with its `target`; several load their own, a head at a time.
    """
    if num_workers == 1:
        for run in runs:
            yield from _missing_cells(run, asked, target, done)
        return
    for run in runs:  # workers read these files, so one process must write them first
        if not Path(str(run.config.data.hidden_cache)).is_dir():
            cache_hidden(run.config)
    context = multiprocessing.get_context("spawn")
    size, places = min(num_workers, len(runs)), context.SimpleQueue()  # one place each
    for index in range(num_workers):
        places.put(_Place(index, num_workers, torch.cuda.device_count(), os.getpid()))
    shared = (runs[0].config, asked, places)
    pool = ProcessPoolExecutor(size, context, initializer=_start_worker, initargs=shared)
    with pool:
        futures = [pool.submit(_measure_in_worker, run, tuple(done)) for run in runs]
        try:
            for future in futures:  # in order, so that the file does not depend on chance
                yield from future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_worker_state: list[tuple[Asked, Target]] = []  # of this process, when it is a worker


class _Place(NamedTuple):
    """Where a worker runs."""

    index: int
    num_workers: int
    num_gpus: int
    parent: int  # process id


def _start_worker(config: TrainConfig, asked: Asked, places: "SimpleQueue[_Place]") -> None:
    """Load the target once for all heads of this process; end with the parent."""
    place = places.get()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.num_workers))
    if place.num_gpus > 1:
        torch.cuda.set_device(place.index % place.num_gpus)
    threading.Thread(target=_stop_with, args=(place.parent,), daemon=True).start()
    _worker_state.append((asked, load_inputs(decoding_config(config)).target))


def _stop_with(parent: int) -> None:
    """Ask this process to stop, which saves a training, once its parent is gone."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _measure_in_worker(run: HeadRun, done: Sequence[MatrixCell]) -> list[MatrixCell]:
    asked, target = _worker_state[0]
    return list(_missing_cells(run, asked, target, done))


def _missing_cells(
    run: HeadRun, asked: Asked, target: Target, done: Collection[MatrixCell]
) -> Iterator[MatrixCell]:
    """Cells of one head, those left out that `done` holds for the same weights."""
    train_run(run)
    config = run.config
    heads = load_heads(run.folder / "head", target)
    sha256 = sha256_of(run.folder / "head" / "model.safetensors")
    have = {(c.key, c.seed, c.head_sha256) for c in done if c.num_repeated_rounds is not None}
    for policy in config.matrix.policies:
        for norm in config.matrix.recycle_norms or [config.head.recycle_norm]:
            head = (config.head.num_mtp_modules, config.head.recycle_norm)
            key = GroupKey(config.objective.unroll, *head, policy, norm)
            if (key, config.seed, sha256) not in have:
                yield _cell(decoded_as(heads, norm), key, asked, run=run, sha256=sha256)


def _cell(heads: MTPHeads, key: GroupKey, asked: Asked, *, run: HeadRun, sha256: str) -> MatrixCell:
    num_drafts, num_new = depths_of(run.config), run.config.matrix.max_new_tokens
    records = decode_prompts(
        heads.target,
        heads,
        asked.prompts,
        policy=key.policy,
        num_drafts=num_drafts,
        num_new=num_new,
    )
    rounds = measure_cell(
        heads, records, prompts=asked.prompts, policy=key.policy, num_drafts=num_drafts
    )
    pairs = zip(records, asked.plain, strict=True)
    texts = [r.request_id for r, p in pairs if r.output_token_ids != p.output_token_ids]
    share = run.config.matrix.max_differing_share
    allowed = share * len(records)
    fix = f"matrix.max_differing_share={share:g} allows {int(allowed)} of {len(records)} prompts"
    if heads.target.dtype != torch.float32:
        fix = "they are equal in float32, set matrix.dtype=float32 and another output_dir"
    where = f"{run.folder.name} under {key.policy}"
    if len(texts) > allowed:
        raise NumericFault(
            f"policy matrix: {where}, {len(texts)} prompts, first {texts[:5]}: the text differs "
            f"from plain decoding; {fix}."
        )
    if len(rounds.differing) > allowed:
        first = rounds.differing[0]
        raise NumericFault(
            f"policy matrix: {where}, prompt {first}: the loop accepted {rounds.loop[first]}, the "
            f"walk {rounds.walks[first]}; {len(rounds.differing)} prompts differ; {fix}."
        )
    has_own_norm = key.recycle_norm == key.decode_recycle_norm
    return MatrixCell(
        key=key,
        seed=run.config.seed,
        num_speculative_tokens=num_drafts,
        is_match=MATCHING_POLICY[key.unroll] == key.policy and has_own_norm,
        head_sha256=sha256,
        accepted_per_round=rounds.loop,
        clean_per_round=rounds.clean,
        num_other_texts=len(texts),
        num_other_rounds=len(rounds.differing),
        num_repeated_rounds=rounds.num_repeated,
        anchor_rates=rounds.anchor_rates,
    )


def _run_of(
    config: TrainConfig, output_dir: Path, unroll: str, num_modules: int, norm: str, seed: int
) -> HeadRun:
    config = copy.deepcopy(config)
    config.task, config.seed = "heads", seed
    config.objective.unroll, config.head.num_mtp_modules = unroll, num_modules
    config.head.recycle_norm = norm
    if config.data.hidden_cache is None:
        config.data.hidden_cache = str(output_dir / f"hidden_k{depths_of(config)}")
    norms = [norm] if config.matrix.recycle_norms else []
    name = "_".join([unroll, f"n{num_modules}", *norms, f"s{seed}"])
    return HeadRun(output_dir / name, config)


def _facts(config: TrainConfig) -> dict[str, object]:
    """What the head depends on, as JSON gives it back."""
    fields: dict[str, object] = dataclasses.asdict(config)
    return json.loads(json.dumps(redact_tree({name: fields[name] for name in _SECTIONS})))
