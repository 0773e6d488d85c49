"""This project's loop behind the protocol of engines.

Second stage of the flow: prompts -> decode loop -> statistics -> report. Before the clock starts a
decoder is built, its prompts are checked, and its steps are captured and warmed up.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.pool_size import free_bytes
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends.protocol import Pass, Workload
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.conversations import Dialogue
from mtp_research.evaluation.run.decoders import build_decoder
from mtp_research.evaluation.run.settings_check import sampling_params
from mtp_research.evaluation.run.timed_decode import (
    MAX_WARM_UPS,
    Finished,
    Question,
    StepClock,
    decode_prompts,
    of_all_ranks,
    warm_up,
)
from mtp_research.runtime.compiling import num_since
from mtp_research.runtime.provenance import project_version

_GIB = 1 << 30


class OwnBackend:
    """A condition's decoder, which is built if a pass needs it.

    Args:
        condition: what is decoded.
        workload: prompts, models and journal.
        num_passes: how often.
        num_blocks: of the pool, where they were planned; None plans here.
    """

    def __init__(
        self, condition: Condition, workload: Workload, *, num_passes: int, num_blocks: int | None
    ) -> None:
        self._condition, self._workload = condition, workload
        self._num_passes, self._num_blocks = num_passes, num_blocks
        self._decoder: SpecDecoder | None = None
        self._num_warm_ups = 0

    def prepare(self) -> None:
        """Build the decoder; check all prompts before minutes of capture; warm it up."""
        if self._decoder is not None:
            return
        condition, workload = self._condition, self._workload
        target, encoded = workload.target, workload.conversations.encoded
        heads = workload.heads_of(condition)  # not loaded if every K is 0
        by_id = self._sampling()
        sampling = [by_id[prompt.question_id] for prompt in encoded.prompts]
        decoder = build_decoder(condition, target, heads, num_blocks=self._num_blocks)
        asked = zip(encoded.prompts, encoded.token_ids, sampling, strict=True)
        for prompt, token_ids, params in asked:
            decoder.check(token_ids, sampling=params, request_id=prompt.question_id)
        if decoder.is_captured:
            self._log(_pool_line(decoder))
        decoder.warm_up(sampling[0], num_requests=len(sampling), log=self._log)
        has_one_clock = condition.config.model.tp_plan == "none"
        # With several passes until the steps are stable; ranks would not agree on that.
        most = MAX_WARM_UPS if self._num_passes > 1 and has_one_clock else 1
        self._num_warm_ups = warm_up(decoder, encoded, sampling, most=most)
        decoder.forget_texts()  # short ones, which would choose the drafts of those to come
        if target.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(target.device)
        self._decoder = decoder

    def decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        """Decode what the journal does not have; finished prompts go there."""
        assert self._decoder is not None, "prepare() comes before decode()"
        decoder, condition, workload = self._decoder, self._condition, self._workload
        device = workload.target.device
        clock = None
        if not decoder.is_captured:  # a captured step has no parts
            clock = StepClock(device)
            decoder.observe(clock.watch)
        dialogue = workload.conversations.begin(done, max_model_len=decoder.max_model_len)
        ranks, left = workload.target.split, dialogue.left
        is_dealt = workload.target.exchange is not None
        if ranks is not None and is_dealt:
            left = left.share(ranks.rank, ranks.num_ranks)
        sampling = self._sampling()
        num_builds = decoder.num_builds
        decoded = decode_prompts(
            decoder,
            left,
            [sampling[prompt.question_id] for prompt in left.prompts],
            salt=f"pass {number}",
            clock=clock,
            finished=Finished(
                workload.journal,
                decoder,
                label=condition.label,
                number=number,
                progress=workload.progress,
            ),
            follow_up=lambda record: _question(dialogue, record, sampling),
        )
        if is_dealt:
            num_own, decoded = len(decoded.records), of_all_ranks(decoded)
            workload.progress.advance(len(decoded.records) - num_own, note=condition.label)
        peak = None
        if device.type == "cuda" and self._num_passes == 1:
            peak = torch.cuda.max_memory_allocated(device)
        is_compared = len(condition.config.backend) > 1
        times = replace(
            decoded.times,
            peak_memory_bytes=peak,
            num_warm_ups=self._num_warm_ups,
            capture_s=decoder.capture_s,
            num_late_builds=num_since(num_builds, decoder.num_builds),
            backend=f"{condition.backend} {project_version()}" if is_compared else None,
        )
        return Pass(decoded.records, decoded.audit, times)

    def close(self) -> None:
        """Give back the decoder and its pool."""
        self._decoder = None

    def _sampling(self) -> dict[str, SamplingParams]:
        """Parameters by request id; seeds differ per turn and agree across conditions."""
        config, workload = self._condition.config, self._workload
        return {
            name: sampling_params(
                config.sampling,
                seed=config.seed * 1_000_003 + index,
                stop_token_ids=workload.target.stop_token_ids,
            )
            for index, name in enumerate(workload.conversations.request_ids)
        }

    def _log(self, line: str) -> None:
        sys.stderr.write(f"{self._condition.label}: {line}\n")
        sys.stderr.flush()


def _question(
    dialogue: Dialogue, record: RequestRecord, sampling: Mapping[str, SamplingParams]
) -> Question | None:
    asked = dialogue.next_turn(record)
    return None if asked is None else Question(*asked, sampling[asked.request_id])


def _pool_line(decoder: SpecDecoder) -> str:
    free = free_bytes(decoder.target.device)
    rest = "" if free is None else f"; {free / _GIB:.2f} GiB stay free for others"
    return f"KV pool: {decoder.num_blocks} blocks, {decoder.pool_bytes / _GIB:.2f} GiB{rest}"
