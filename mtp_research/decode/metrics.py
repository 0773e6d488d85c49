"""Counters of a decoder that serves, as Prometheus text under the names of vLLM.

    metrics = ServiceMetrics(decoder, model_name="mine")
    text = metrics.exposition(num_live=3)

A request is counted when it has ended, and its record is dropped from `decoder.stats.records`, so
that a service does not grow. Tokens are counted as they come. As in vLLM, `accepted` excludes the
bonus token and positions count from 0.

Source: vLLM 0.24.0, `v1/spec_decode/metrics.py` and `v1/metrics/loggers.py`, for names, labels and
the bounds of the histogram.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.stats import RequestRecord

# Upper bounds of the time to the first token, in seconds.
_TENTHS = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, *_TENTHS)

_Sample = tuple[str, float]  # further labels, value


class ServiceMetrics:
    """Sums over the ended requests of a decoder that nobody else reads.

    Args:
        decoder: whose records are taken.
        model_name: label of every line.
    """

    def __init__(self, decoder: SpecDecoder, *, model_name: str) -> None:
        self._decoder = decoder
        self._labels = f'model_name={json.dumps(model_name)},engine="0"'
        self._num_prompt_tokens = 0
        self._num_drafts = 0  # rounds that had drafts
        self._num_draft_tokens = 0
        self._num_accepted = [0] * decoder.num_speculative_tokens  # by position
        self._num_ended: Counter[str] = Counter()  # by finish reason
        self._num_first_tokens = [0] * (len(_TTFT_BOUNDS) + 1)  # by bucket
        self._ttft_s = 0.0

    def take_records(self) -> None:
        """Count the requests that have ended since, and drop their records."""
        records = self._decoder.stats.records
        while records:  # a step in another thread may add some
            self._count(records.pop(0))

    def exposition(self, *, num_live: int) -> str:
        """The text for `/metrics`; `num_live` requests are in the service's hands."""
        self.take_records()
        waiting = min(self._decoder.num_waiting, num_live)
        accepted = self._num_accepted
        by_position = [(f',position="{i}"', count) for i, count in enumerate(accepted)]
        ended = [(f',finished_reason="{r}"', n) for r, n in sorted(self._num_ended.items())]
        counters: dict[str, Sequence[_Sample]] = {
            "prompt_tokens": [("", self._num_prompt_tokens)],
            "generation_tokens": [("", self._decoder.stats.num_emitted_tokens)],
            "num_preemptions": [("", self._decoder.stats.num_preemptions)],
            "request_success": ended,
            "spec_decode_num_drafts": [("", self._num_drafts)],
            "spec_decode_num_draft_tokens": [("", self._num_draft_tokens)],
            "spec_decode_num_accepted_tokens": [("", sum(accepted))],
            "spec_decode_num_accepted_tokens_per_pos": by_position,
        }
        lines = [
            *self._lines("num_requests_running", "gauge", [("", num_live - waiting)]),
            *self._lines("num_requests_waiting", "gauge", [("", waiting)]),
        ]
        for name, samples in counters.items():
            lines += self._lines(f"{name}_total", "counter", samples)
        return "\n".join([*lines, *self._ttft(), ""])

    def _count(self, record: RequestRecord) -> None:
        self._num_ended[record.finish_reason] += 1
        self._num_prompt_tokens += record.num_prompt_tokens
        self._num_drafts += len(record.num_drafted_per_round)
        self._num_draft_tokens += sum(record.num_drafted_per_round)
        for num_accepted in record.num_accepted_per_round:
            for position in range(num_accepted):
                self._num_accepted[position] += 1
        if record.output_token_ids:
            self._num_first_tokens[bisect_left(_TTFT_BOUNDS, record.ttft_s)] += 1
            self._ttft_s += record.ttft_s

    def _lines(self, name: str, kind: str, samples: Sequence[_Sample]) -> list[str]:
        values = [f"vllm:{name}{{{self._labels}{more}}} {value}" for more, value in samples]
        return [f"# TYPE vllm:{name} {kind}", *values]

    def _ttft(self) -> list[str]:
        name, labels, below = "vllm:time_to_first_token_seconds", self._labels, 0
        lines = [f"# TYPE {name} histogram"]
        bounds = [*map(str, _TTFT_BOUNDS), "+Inf"]
        for bound, count in zip(bounds, self._num_first_tokens, strict=True):
            below += count
            lines.append(f'{name}_bucket{{{labels},le="{bound}"}} {below}')
        return [
            *lines,
            f"{name}_count{{{labels}}} {below}",
            f"{name}_sum{{{labels}}} {self._ttft_s}",
        ]
