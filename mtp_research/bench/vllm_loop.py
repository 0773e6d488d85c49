"""vLLM 0.24 as a loop that `end_to_end` serves requests with: random weights, synthetic acceptance.

It runs as its users run it: the faster runner (V2), steps that overlap, the sizes of graphs that it
chooses itself. The engine runs in our process, where no message is part of a latency, or apart, as
that of its server. Tokens choose their experts evenly: routers of its dummy weights prefer so few
that steps are faster than the memory could deliver all of them.

Sources: vLLM 0.24.0, `config/speculative.py` (synthetic acceptance, which class has which modules),
`config/scheduler.py` (overlapping steps), `config/vllm.py` (sizes of graphs), `envs.py` (routing).
Letters: K drafts per step, R requests decoded at a time.
"""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mtp_research.bench.shapes import SHAPES, config_of
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import DecodeStats, RequestRecord
from mtp_research.evaluation.backends.vllm_backend import (
    counters,
    engine_words,
    load_vllm,
    sampling_params,
)
from mtp_research.runtime.errors import ConfigError

# Model type of a shape -> vLLM's class that has its MTP module.
_CLASSES = {
    "qwen2": "MiMoForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
}
ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"


@dataclass
class _Live:
    num_prompt_tokens: int
    begun_s: float
    first_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)


class VllmLoop:
    """An engine of vLLM, ready to serve.

    Records have no rounds: vLLM counts drafts of all requests together.

    Args:
        shape: name of sizes whose MTP module vLLM has.
        rates: chance that the first draft is accepted, the first two, ... all K; empty for K = 0.
        max_num_requests: R.
        max_model_len: tokens of the longest text.
        apart: let the engine have a process of its own, as vLLM's server does.
        words: more arguments of `vllm.LLM`.

    Raises:
        ConfigError: vLLM has no module of this shape.
        EnvironmentFault: vLLM 0.24 is not installed or cannot be loaded here.
    """

    num_builds: int | None = None

    def __init__(
        self,
        shape: str,
        *,
        rates: Sequence[float],
        max_num_requests: int,
        max_model_len: int,
        apart: bool,
        words: Mapping[str, object],
    ) -> None:
        if not _has_module(shape):
            known = " or ".join(filter(_has_module, SHAPES))
            raise ConfigError(f"--engine vllm must get --shape {known}, got {shape}.")
        os.environ[ROUTING] = "uniform_random"
        self.stats = DecodeStats()
        self._vllm = load_vllm(apart=apart, v2_runner=True)
        self._live: dict[str, _Live] = {}
        self._num_rounds = self._num_accepted = 0
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(shape)
            config.architectures = [_CLASSES[SHAPES[shape].model_type]]
            config.num_nextn_predict_layers = 1
            config.save_pretrained(folder)
            own = engine_words(
                Path(folder),
                dtype="bfloat16",
                num_drafts=len(rates),
                # Drafts behind the last token need places too, or vLLM makes fewer of them.
                max_model_len=max_model_len + len(rates) + 1,
                max_num_seqs=max_num_requests,
            )
            own |= {"async_scheduling": None, "disable_log_stats": False, "load_format": "dummy"}
            if rates:
                cast(dict[str, object], own["speculative_config"]).update(
                    {
                        "rejection_sample_method": "synthetic",
                        "synthetic_acceptance_rates": list(rates),
                    }
                )
            self._llm: Any = self._vllm.LLM(**own | dict(words))

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self._llm.llm_engine.has_unfinished_requests()

    @property
    def version(self) -> str:
        """What ran."""
        return f"vllm {self._vllm.__version__}"

    def add_request(
        self, prompt: Sequence[int], *, sampling: SamplingParams, request_id: str
    ) -> None:
        """Let a prompt, token ids, wait for its place."""
        params = sampling_params(
            self._vllm, max_new_tokens=sampling.max_new_tokens, stop_token_ids=()
        )
        self._live[request_id] = _Live(len(prompt), time.perf_counter())
        self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> None:
        """One step of the engine; requests that ended leave their records in `stats`."""
        outputs = self._llm.llm_engine.step()
        now, self.stats.num_steps = time.perf_counter(), self.stats.num_steps + 1
        for output in outputs:
            live = self._live[output.request_id]
            new = list(output.outputs[0].token_ids)
            if new and not live.token_ids:
                live.first_s = now
            live.token_ids += new
            if output.finished:
                del self._live[output.request_id]
                self.stats.records.append(_record(output, live, now))

    def acceptance_length(self) -> float:
        """Tokens per round since the last call, by vLLM's own counters; 1 without drafts."""
        counted = counters(self._llm)
        rounds, accepted = (counted.get(n, 0) for n in ("num_drafts", "num_accepted_tokens"))
        new_rounds, new_accepted = rounds - self._num_rounds, accepted - self._num_accepted
        self._num_rounds, self._num_accepted = rounds, accepted
        return 1 + new_accepted / new_rounds if new_rounds else 1.0

    def close(self) -> None:
        """End the engine, whose memory the next one needs."""
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


def _has_module(shape: str) -> bool:
    """Whether vLLM has the MTP module of a shape; its FP8 products were not tried."""
    one = SHAPES[shape]
    return one.model_type in _CLASSES and "quantization_config" not in one.arguments


def _record(output: Any, live: _Live, now: float) -> RequestRecord:
    return RequestRecord(
        request_id=output.request_id,
        num_prompt_tokens=live.num_prompt_tokens,
        output_token_ids=tuple(live.token_ids),
        finish_reason=str(output.outputs[0].finish_reason),
        num_accepted_per_round=(),
        num_drafted_per_round=(),
        num_target_forwards=0,
        ttft_s=live.first_s - live.begun_s,
        decode_s=now - live.first_s,
    )
