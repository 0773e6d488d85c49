"""vLLM behind the protocol of engines: version 0.24, its V1 runner, in this process.

`load_vllm`, `engine_words`, `sampling_params` and `drive` are the driver, for tools as well. A step
of the engine gives, for each request that it advanced, the tokens that it added: the kept drafts
and one more. vLLM counts drafts of all requests together; its counters stand beside the records.
Steps must not overlap (`async_scheduling`), or an output would be of another step. The other
runner, V2, runs modules by other rules than those of `heads.engines`.

Sources: vLLM 0.24.0, `outputs.py`, `v1/engine/llm_engine.py`, `v1/engine/output_processor.py`,
`v1/core/sched/scheduler.py` (what is counted), `v1/metrics/reader.py`.
Letters: K drafts per step, R requests decoded at a time.
"""

import os
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

# Whether engines have processes of their own, and which runner: see `load_vllm`.
SWITCHES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")
_COUNTERS = "vllm:spec_decode_"
_COUNTED = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")  # a draft is a round's

Module = Any  # vLLM is no dependency: its classes have no types here


class VllmBackend:
    """One engine of vLLM for a condition, on the target's device beside the target."""

    def __init__(self, condition: Condition, workload: Workload) -> None:
        self._condition, self._workload = condition, workload
        self._vllm: Module = None
        self._llm: Module = None

    def prepare(self) -> None:
        """Load the checkpoint, compile and capture as vLLM does; warm up."""
        if self._llm is not None:
            return
        free_memory()
        self._vllm = load_vllm()
        self._llm = self._vllm.LLM(**self._words())
        warm_up(self._run, self._workload.conversations.encoded)

    def decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        """Every prompt at once, R side by side."""
        version = f"{self._condition.backend} {self._vllm.__version__}"
        return engine_pass(
            self._run, self._workload, self._condition, number=number, done=done, version=version
        )

    def close(self) -> None:
        """End the engine, whose memory the next condition needs."""
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None

    def _words(self) -> dict[str, object]:
        condition, target = self._condition, self._workload.target
        engine, num_drafts = condition.config.engine, condition.num_speculative_tokens
        assert engine.max_model_len is not None, "a condition has room for its prompts"
        words = engine_words(
            self._workload.checkpoint_of(condition),
            dtype=str(target.dtype).removeprefix("torch."),
            num_drafts=num_drafts,
            # Drafts behind the last token need places too, or vLLM makes fewer of them.
            max_model_len=min(
                engine.max_model_len + num_drafts + 1, target.config.max_position_embeddings
            ),
            max_num_seqs=engine.max_num_requests,
        )
        words |= {"enforce_eager": not engine.cuda_graphs, "disable_log_stats": False}
        if target.device.type == "cuda":  # the target stays, so the share is one of what is free
            free, total = torch.cuda.mem_get_info(target.device)
            words["gpu_memory_utilization"] = round(engine.memory_fraction * free / total, 4)
        if target.dtype == torch.float32:  # vLLM's other kernels take none
            is_latent = hasattr(target.config, "kv_lora_rank")
            words["attention_config"] = {"backend": "TRITON_MLA" if is_latent else "TRITON_ATTN"}
        return words

    def _run(self, encoded: EncodedPrompts, max_new_tokens: int) -> EngineRun:
        engine, num_drafts = self._llm.llm_engine, self._condition.num_speculative_tokens
        ends = self._workload.stop_token_ids(self._condition)
        asked = encoded.by_id()
        params = sampling_params(self._vllm, max_new_tokens=max_new_tokens, stop_token_ids=ends)
        log = StepLog(self._condition.backend, num_drafts=num_drafts)
        before = counters(self._llm)
        num_steps = drive(engine, asked, params, log=log)
        after = counters(self._llm)
        counted = {name: after.get(name, 0) - before.get(name, 0) for name in _COUNTED}
        records = tuple(map(log.record, asked))
        return EngineRun(records, num_steps, counted if num_drafts else None)


def load_vllm(*, apart: bool = False, v2_runner: bool = False) -> Module:
    """The module; raises as `load_engine` does.

    Args:
        apart: let each engine have a process of its own.
        v2_runner: take the faster runner, which the table of conventions is not about.
    """
    os.environ |= dict(zip(SWITCHES, (str(int(on)) for on in (apart, v2_runner)), strict=True))
    return load_engine("vllm")


def engine_words(
    checkpoint: Path, *, dtype: str, num_drafts: int, max_model_len: int, max_num_seqs: int
) -> dict[str, object]:
    """Arguments of `vllm.LLM` without which its steps could not be read, or would not be ours.

    Args:
        checkpoint: folder of the target, with the modules for K > 0.
        dtype: name of the type that it computes in.
        num_drafts: K.
        max_model_len: tokens of the longest text.
        max_num_seqs: R.
    """
    words: dict[str, object] = {"model": str(checkpoint), "skip_tokenizer_init": True}
    words |= {"dtype": dtype, "seed": 0, "generation_config": "vllm"}
    words |= {"max_model_len": max_model_len, "max_num_seqs": max_num_seqs}
    words |= {"enable_prefix_caching": False, "async_scheduling": False}
    if num_drafts:
        words["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    return words


def sampling_params(vllm: Module, *, max_new_tokens: int, stop_token_ids: Sequence[int]) -> object:
    """Greedy text that ends at these tokens alone; each output has what its step added."""
    params = vllm.SamplingParams(
        temperature=0.0,
        detokenize=False,
        max_tokens=max_new_tokens,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # the configuration's; ours are named
    )
    params.output_kind = vllm.sampling_params.RequestOutputKind.DELTA
    return params


def drive(
    engine: Module, asked: Mapping[str, Sequence[int]], params: object, *, log: StepLog
) -> int:
    """Decode prompts, token ids by name, all of them there at once; returns the number of steps."""
    for name, token_ids in asked.items():
        log.begin(name, token_ids)
        engine.add_request(name, {"prompt_token_ids": list(token_ids)}, params)
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            (text,) = output.outputs
            log.add(output.request_id, list(text.token_ids))
            if output.finished:
                log.confirm(output.request_id, output.prompt_token_ids)
                log.end(output.request_id, str(text.finish_reason))
        num_steps += 1
    return num_steps


def counters(llm: Module) -> dict[str, int]:
    """What the engine counted of drafts since it began; nothing of it is by request."""
    found: dict[str, int] = {}
    for metric in llm.get_metrics():
        name = str(metric.name).removeprefix(_COUNTERS)
        if name in _COUNTED:
            found[name] = found.get(name, 0) + int(metric.value)
    return found
