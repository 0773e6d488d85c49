"""transformers' own generation behind the protocol of engines: `generate`, with MTP for K > 0.

One text at a time, in the order of the prompts. What a step adds is read from a streamer, which the
library hands the tokens of each round. It loads the MTP modules anew for every text, and the clock
runs: that is what a caller of it waits for. It stops a round's drafts at a drafted end token; the
record counts K drafts all the same, as our loop, which judges all of them.

Sources: transformers 5.17.0, `_assisted_decoding` in `generation/utils.py`,
`MTPCandidateGenerator` in `generation/candidate_generator.py` and `MtpModel` in
`modeling_layers.py`. Letter: K drafts per step.
"""

import re
from collections.abc import Sequence
from typing import cast

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import candidate_generator
from transformers.generation.streamers import BaseStreamer

from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends.protocol import (
    EngineRun,
    Pass,
    StepLog,
    Workload,
    engine_pass,
    warm_up,
)
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.experts import expert_stacks
from mtp_research.models.loading.load_weights import quiet_loading
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError


class TransformersBackend:
    """The model of a condition as the library loads it: the target, or its export with modules."""

    def __init__(self, condition: Condition, workload: Workload) -> None:
        self._condition, self._workload = condition, workload
        self._model: PreTrainedModel | None = None

    def prepare(self) -> None:
        """Load the checkpoint in the target's dtype on its device; warm up."""
        if self._model is not None:
            return
        workload, condition = self._workload, self._condition
        target, folder = workload.target, workload.checkpoint_of(condition)
        with quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype)
        model = cast(PreTrainedModel, model.to(target.device).eval())  # type: ignore[arg-type]
        if target.dtype == torch.float64 and expert_stacks(model):
            model.set_experts_implementation("eager")  # its own products of experts know no float64
        model.generation_config = GenerationConfig()  # sampling of the release's own is not ours
        if condition.num_speculative_tokens:
            heads = workload.heads[condition.config.spec.head, condition.backend]
            assert isinstance(heads, MTPHeads), f"an export has modules, got {heads}"
            pattern = layer_pattern(target, num_modules=heads.spec.num_mtp_modules)
            if pattern is not None:
                model._keys_to_ignore_on_load_unexpected = [pattern]
        self._model = model
        warm_up(self._run, workload.conversations.encoded)

    def decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        """One text after the other; their rounds are those that the streamer saw."""
        version = f"{self._condition.backend} {transformers.__version__}"
        return engine_pass(
            self._run, self._workload, self._condition, number=number, done=done, version=version
        )

    def close(self) -> None:
        """Give back the model."""
        self._model = None

    @torch.no_grad()
    def _run(self, encoded: EncodedPrompts, max_new_tokens: int) -> EngineRun:
        assert self._model is not None, "prepare() comes before decode()"
        num_drafts = self._condition.num_speculative_tokens
        ends = self._workload.stop_token_ids(self._condition)
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_mtp=num_drafts > 0,
            eos_token_id=list(ends) or None,
            pad_token_id=0,  # of batches, which there are none of; the library asks for one
        )
        log = StepLog(self._condition.backend, num_drafts=num_drafts)
        asked = encoded.by_id()
        for name, token_ids in asked.items():  # all are there when the clock starts
            log.begin(name, token_ids)
        for name, token_ids in asked.items():
            ids = torch.tensor([token_ids], device=self._model.device)
            with quiet_loading():  # of the modules
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=settings,
                    streamer=_Streamer(log, name),
                )
            log.end(name, "stop" if log.token_ids(name)[-1] in ends else "length")
        return EngineRun(tuple(map(log.record, asked)), num_steps=None)


class _Streamer(BaseStreamer):
    """Hands a request's log the prompt and then what each step adds."""

    def __init__(self, log: StepLog, request_id: str) -> None:
        self._log, self._request_id = log, request_id
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """The prompt, or tokens of one step."""
        hand = self._log.add if self._has_prompt else self._log.confirm
        hand(self._request_id, value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


def library_steps(target: Target, *, num_modules: int) -> list[str]:
    """What to do before `generate(use_mtp=True)` on the exported checkpoint; [] for nothing.

    The library knows modules by the layer numbers of the releases; those of other targets have to
    be named to it, or it fails for lack of a pattern.

    Raises:
        ConfigError: as `layer_pattern`.
    """
    pattern = layer_pattern(target, num_modules=num_modules)
    if pattern is None:
        return []
    return [
        f'before generate(use_mtp=True): model._keys_to_ignore_on_load_unexpected = [r"{pattern}"]'
    ]


def layer_pattern(target: Target, *, num_modules: int) -> str | None:
    """The pattern of tensor names that `generate(use_mtp=True)` has to be told; None for none.

    Raises:
        ConfigError: the installed version, or its class for this target, has no such generation.
    """
    if not hasattr(candidate_generator, "MTPCandidateGenerator"):
        raise ConfigError(
            "backend=transformers must find generate(use_mtp=True), which transformers "
            f"{transformers.__version__} lacks; install transformers 5.17 or export for an engine."
        )
    if not hasattr(target.config, "num_mtp_layers"):
        raise ConfigError(
            "model.path must be of a family with num_mtp_layers in its configuration for "
            f"backend=transformers, got {target.family_name} (transformers "
            f"{transformers.__version__}); export for an engine."
        )
    first = target.config.num_hidden_layers
    patterns = [str(pattern) for pattern in target.model._keys_to_ignore_on_load_unexpected or []]
    names = [f"model.layers.{first + module}.eh_proj.weight" for module in range(num_modules)]
    if all(any(re.search(pattern, name) for pattern in patterns) for name in names):
        return None
    numbers = "|".join(str(first + module) for module in range(num_modules))
    return rf"model\.layers\.({numbers})\."
