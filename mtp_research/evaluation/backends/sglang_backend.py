"""SGLang behind the protocol of engines: version 0.5.23, in processes of its own; not run yet.

A request is a stream whose chunks are the tokens of one step each: the kept drafts and one more.
SGLang joins chunks that nobody has fetched; with `batch_notify_size=1` and a reader for each stream
every chunk is fetched before the next one comes. That it was so is checked: a request ends with its
number of rounds and how many of them kept how many drafts, and its chunks have to say the same.
Not handed out are the number of steps of its loop, and the token ids of a prompt (their count is).

Sources: SGLang 0.5.23, `entrypoints/engine.py`, `managers/tokenizer_manager.py` (chunks and their
`meta_info`), `managers/scheduler_components/` (what is sent and counted),
`managers/schedule_batch.py` (what ends a text), `arg_groups/speculative_hook.py`.
Letters: K drafts per step, R requests decoded at a time.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends.protocol import (
    EngineRun,
    Pass,
    StepLog,
    Workload,
    engine_pass,
    free_memory,
    warm_up,
)
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.run.settings_check import load_engine
from mtp_research.runtime.errors import EnvironmentFault, IntegrityError

_ROUNDS, _DRAFTED, _KEPT = "spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts"
_HISTOGRAM = "spec_correct_drafts_histogram"  # [kept drafts] -> rounds

Module = Any  # SGLang is no dependency: its classes have no types here
Meta = Mapping[str, Any]  # `meta_info` of a request's last chunk


class SglangBackend:
    """One engine of SGLang for a condition, on the target's device beside the target."""

    def __init__(self, condition: Condition, workload: Workload) -> None:
        self._condition, self._workload = condition, workload
        self._sglang: Module = None
        self._engine: Module = None

    def prepare(self) -> None:
        """Start its processes, which load the checkpoint and capture; warm up."""
        if self._engine is not None:
            return
        free_memory()
        self._sglang = load_engine("sglang")
        self._engine = self._sglang.Engine(**self._words())
        warm_up(self._run, self._workload.conversations.encoded)

    def decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        """Every prompt at once, R side by side."""
        version = f"{self._condition.backend} {self._sglang.__version__}"
        return engine_pass(
            self._run, self._workload, self._condition, number=number, done=done, version=version
        )

    def close(self) -> None:
        """End its processes, whose memory the next condition needs."""
        if self._engine is not None:
            self._engine.shutdown()
        self._engine = None

    def _words(self) -> dict[str, object]:
        condition, target = self._condition, self._workload.target
        engine, num_drafts = condition.config.engine, condition.num_speculative_tokens
        assert engine.max_model_len is not None, "a condition has room for its prompts"
        words = engine_words(
            self._workload.checkpoint_of(condition),
            dtype=str(target.dtype).removeprefix("torch."),
            num_drafts=num_drafts,
            context_length=min(  # has to be longer than a text
                engine.max_model_len + num_drafts + 2, target.config.max_position_embeddings
            ),
            max_running_requests=engine.max_num_requests,
        )
        words |= {"device": target.device.type, "disable_cuda_graph": not engine.cuda_graphs}
        words["mem_fraction_static"] = engine.memory_fraction  # of what the target leaves free
        if target.dtype == torch.float32:  # its other kernels take none
            words["attention_backend"] = "triton"
        return words

    def _run(self, encoded: EncodedPrompts, max_new_tokens: int) -> EngineRun:
        num_drafts = self._condition.num_speculative_tokens
        ends, asked = self._workload.stop_token_ids(self._condition), encoded.by_id()
        params = sampling_params(max_new_tokens=max_new_tokens, stop_token_ids=ends)
        log = StepLog(self._condition.backend, num_drafts=num_drafts)
        told = drive(self._engine, asked, params, log=log)
        records = tuple(map(log.record, asked))
        if not num_drafts:
            return EngineRun(records, num_steps=None)
        for record in records:
            check_rounds(record, told[record.request_id])
        names = {"num_drafts": _ROUNDS, "num_draft_tokens": _DRAFTED, "num_accepted_tokens": _KEPT}
        counted = {ours: sum(m.get(key, 0) for m in told.values()) for ours, key in names.items()}
        return EngineRun(records, num_steps=None, counters=counted)


def engine_words(
    checkpoint: Path, *, dtype: str, num_drafts: int, context_length: int, max_running_requests: int
) -> dict[str, object]:
    """Arguments of `sglang.Engine` without which its steps could not be read.

    Args:
        checkpoint: folder of the target, with the module for K > 0.
        dtype: name of the type that it computes in.
        num_drafts: K.
        context_length: tokens of the longest text, and a few more.
        max_running_requests: R.
    """
    words: dict[str, object] = {"model_path": str(checkpoint), "skip_tokenizer_init": True}
    words |= {"dtype": dtype, "random_seed": 0, "disable_radix_cache": True}
    words |= {"context_length": context_length, "max_running_requests": max_running_requests}
    words |= {"stream_interval": 1, "incremental_streaming_output": True, "batch_notify_size": 1}
    if num_drafts:  # a chain: K passes of the module, whose tokens and one more are verified
        words |= {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}
        words["speculative_draft_model_path"] = str(checkpoint)  # not found out for every family
        words |= {"speculative_num_steps": num_drafts}
        words |= {"speculative_num_draft_tokens": num_drafts + 1}
    return words


def sampling_params(*, max_new_tokens: int, stop_token_ids: Sequence[int]) -> dict[str, object]:
    """Greedy text; `ignore_eos` would make it blind for the named tokens as well."""
    params: dict[str, object] = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
    return params | {"stop_token_ids": list(stop_token_ids), "ignore_eos": not stop_token_ids}


def drive(
    engine: Module, asked: Mapping[str, Sequence[int]], params: Mapping[str, Any], *, log: StepLog
) -> dict[str, Meta]:
    """Decode prompts, token ids by name, all of them there at once.

    Returns:
        What the engine says of each request at its end.

    Raises:
        EnvironmentFault: it gave a request up.
        IntegrityError: it read another prompt, or ended a text at another token than a named one.
    """

    async def one(name: str, token_ids: Sequence[int]) -> Meta:
        words = {"input_ids": list(token_ids), "sampling_params": dict(params), "rid": name}
        meta: Meta = {}
        async for chunk in await engine.async_generate(**words, stream=True):
            log.add(name, chunk["output_ids"])
            meta = chunk["meta_info"]
        reason = meta.get("finish_reason") or {"type": "abort", "message": "no end"}
        _check_end(name, meta, reason, num_prompt_tokens=len(token_ids), params=params)
        log.end(name, reason["type"])
        return meta

    async def every() -> dict[str, Meta]:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(one(name, ids)) for name, ids in asked.items()}
        return {name: task.result() for name, task in tasks.items()}

    for name, token_ids in asked.items():
        log.begin(name, token_ids)
    try:
        return engine.loop.run_until_complete(every())
    except BaseExceptionGroup as faults:
        raise faults.exceptions[0] from None


def _check_end(
    name: str, meta: Meta, reason: Meta, *, num_prompt_tokens: int, params: Mapping[str, Any]
) -> None:
    if reason["type"] not in ("length", "stop"):
        raise EnvironmentFault(
            f"backend=sglang must decode request {name} to its end, got {reason.get('message')}; "
            "lower engine.max_num_requests, or raise engine.memory_fraction."
        )
    if meta["prompt_tokens"] != num_prompt_tokens:
        raise IntegrityError(
            f"sglang, request {name}: expected a prompt of {num_prompt_tokens} token ids, got "
            f"{meta['prompt_tokens']}."
        )
    if reason["type"] == "stop" and reason["matched"] not in params["stop_token_ids"]:
        raise IntegrityError(
            f"sglang, request {name}: expected an end at one of {params['stop_token_ids']}, got "
            f"{reason['matched']}, an eos_token_id of the model; set sampling.ignore_eos=true."
        )


def check_rounds(record: RequestRecord, meta: Meta) -> None:
    """Compare the rounds of a request's chunks with what the engine counted of it.

    Of the last round it counts the drafts behind the end of the text as well.

    Raises:
        IntegrityError: chunks of several steps were joined, or steps were no rounds.
    """
    seen, told = record.num_accepted_per_round, meta.get(_ROUNDS, 0)
    counted = Counter(dict(enumerate(meta.get(_HISTOGRAM, ()))))  # as many rounds as it told
    last = list((counted - Counter(seen[:-1])).elements())
    if len(seen) != told or (seen and (len(last) != 1 or last[0] < seen[-1])):
        raise IntegrityError(
            f"sglang, request {record.request_id}: expected the {told} rounds that it counted "
            f"({meta.get('num_retractions', 0)} times put back to wait), got {len(seen)} in its "
            "outputs, or others; lower engine.max_num_requests."
        )
