"""The real decode loop during training: what the replay walk predicts, measured now and then.

`train.py` hands the function of `decode_probe` to the training loop, which does not import the
decoder. Letters: K drafts per step.
"""

from collections.abc import Callable
from typing import cast

import torch

from mtp_research.config.schema import EngineConfig, TrainConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompts, load_prompts
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.target import load_tokenizer
from mtp_research.policy.plan import MATCHING_POLICY, ModuleSchedule

MAX_NEW_TOKENS = 64
MAX_MODEL_LEN = 512
ENGINE = EngineConfig(max_num_requests=8, max_model_len=MAX_MODEL_LEN, audit=False)


def decode_probe(config: TrainConfig) -> Callable[[MTPHeads], dict[str, object]] | None:
    """A function that decodes `trainer.decode_eval_prompts` prompts greedily with given heads.

    It drafts by the policy that the unroll matches, K being the depths of the training.
    """
    num_prompts = config.trainer.decode_eval_prompts
    if not num_prompts:
        return None
    prompts = load_prompts(None, max_prompts=num_prompts, seed=config.seed)
    num_drafts = config.objective.num_depths or max(config.head.num_mtp_modules, 3)

    def probe(heads: MTPHeads) -> dict[str, object]:
        tokenizer = cast(ChatTokenizer, load_tokenizer(config.model.path))
        encoded = encode_prompts(prompts, tokenizer, max_model_len=MAX_MODEL_LEN)
        decoder = SpecDecoder(
            heads.target,
            heads,
            spec=SpecSettings(
                policy=MATCHING_POLICY[config.objective.unroll],
                num_speculative_tokens=num_drafts,
                verify="greedy",
                module_schedule=cast(ModuleSchedule, config.head.module_schedule),
            ),
            engine=ENGINE,
        )
        sampling = SamplingParams(
            max_new_tokens=MAX_NEW_TOKENS, stop_token_ids=heads.target.stop_token_ids
        )
        for prompt, token_ids in zip(encoded.prompts, encoded.token_ids, strict=True):
            decoder.add_request(token_ids, sampling=sampling, request_id=prompt.question_id)
        # Modules that are compiled for the shapes of training would compile again for each step's.
        with torch.compiler.set_stance("force_eager"):
            while decoder.has_work:
                decoder.step()
        accepted = [
            count for record in decoder.stats.records for count in record.num_accepted_per_round
        ]
        return {
            "acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
            "num_accepted": sum(accepted),
            "num_rounds": len(accepted),
            "num_prompts": len(encoded.prompts),
        }

    return probe
