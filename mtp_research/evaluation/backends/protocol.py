"""What an engine has to be to stand in the table of an evaluation: the protocol `Backend`.

Between conditions and statistics: `run.passes` calls `prepare`, `decode` and `close` of one backend
a condition. Every backend decodes the same token ids in the same order; all requests are there when
the clock starts, and an engine decodes as many of them side by side as the condition says. Model
loading, compiling and a warm-up come before the clock.

Other engines do not say how many drafts they keep. Their step outputs do, and `StepLog` makes
records of these: in a greedy text a step adds the drafts that were kept and one more token.
Letter: K drafts per step.
"""

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from mtp_research.decode.build import Heads
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.conditions import Condition
from mtp_research.evaluation.run.conversations import Conversations
from mtp_research.evaluation.run.journal import Journal
from mtp_research.evaluation.run.prompts import EncodedPrompts
from mtp_research.evaluation.stats.outcome import PassRecord
from mtp_research.models.target import Target
from mtp_research.runtime.errors import IntegrityError
from mtp_research.runtime.progress import WorkProgress

HeadsKey = tuple[str | None, str | None]  # `spec.head`, and the engine by whose conventions
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 4, 8


class Workload(NamedTuple):
    """What every condition decodes, with what, and where finished prompts are kept."""

    target: Target
    heads: Mapping[HeadsKey, Heads]
    conversations: Conversations
    journal: Journal
    progress: WorkProgress  # of the prompts of all conditions and passes
    checkpoints: Mapping[HeadsKey, Path] = {}  # what other engines load for heads

    def heads_of(self, condition: Condition) -> Heads:
        """The heads of a condition that our loop decodes; those of K = 0 need not be loaded."""
        return self.heads.get((condition.config.spec.head, condition.conventions))

    def checkpoint_of(self, condition: Condition) -> Path:
        """The folder that the engine of a condition loads; for K = 0 any export, if there is one.

        An engine may read more of an export than of the target, see `exports.check_plain`.
        """
        if condition.num_speculative_tokens:
            return self.checkpoints[condition.config.spec.head, condition.backend]
        exports = (path for key, path in self.checkpoints.items() if key[1] == condition.backend)
        return next(exports, Path(self.target.path))

    def stop_token_ids(self, condition: Condition) -> tuple[int, ...]:
        """Tokens that end a text of the condition."""
        return () if condition.config.sampling.ignore_eos else tuple(self.target.stop_token_ids)


class Pass(NamedTuple):
    """One decoding of the prompt set: a record per turn, sorted by id, and its measurements."""

    records: tuple[RequestRecord, ...]
    audit: dict[str, int] | None
    times: PassRecord


class Backend(Protocol):
    """An engine, set up for one condition."""

    def prepare(self) -> None:
        """Load, compile and warm up, unless that was done."""
        ...

    def decode(self, number: int, done: Sequence[RequestRecord]) -> Pass:
        """Pass `number` over the prompts, but for those that an earlier process has `done`."""
        ...

    def close(self) -> None:
        """Give back the engine's memory."""
        ...


class StepLog:
    """What the steps of an engine add to the texts of requests, and when.

    A request's first addition is the prefill's one token; each later one is a round, or a plain
    step for K = 0.

    Args:
        engine: its name, for messages.
        num_drafts: K.
    """

    def __init__(self, engine: str, *, num_drafts: int) -> None:
        self._engine, self._num_drafts = engine, num_drafts
        self._begun_s: dict[str, float] = {}
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[tuple[float, tuple[int, ...]]]] = {}
        self._reasons: dict[str, str] = {}

    def begin(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A request with this prompt is there."""
        self._begun_s[request_id] = time.perf_counter()
        self._prompts[request_id] = tuple(token_ids)
        self._pieces[request_id] = []

    def confirm(self, request_id: str, token_ids: Sequence[int]) -> None:
        """The engine says that this was the prompt.

        Raises:
            IntegrityError: it was another one.
        """
        asked = self._prompts[request_id]
        if tuple(token_ids) != asked:
            hashes = [token_ids_sha256([ids])[:12] for ids in (asked, token_ids)]
            raise IntegrityError(
                f"{self._engine}, request {request_id}: expected the prompt's {len(asked)} token "
                f"ids ({hashes[0]}), got {len(token_ids)} others ({hashes[1]})."
            )

    def add(self, request_id: str, token_ids: Sequence[int]) -> None:
        """A step added these tokens; steps without any, as those of long prompts, are no rounds.

        Raises:
            IntegrityError: more tokens than a step can give, so that they are of several.
        """
        if not token_ids:
            return
        pieces = self._pieces[request_id]
        most = self._num_drafts + 1 if pieces else 1
        if len(token_ids) > most:
            raise IntegrityError(
                f"{self._engine}, request {request_id}: a step must add at most {most} tokens at "
                f"K = {self._num_drafts}, got {len(token_ids)} behind {len(pieces)} additions; its "
                "rounds cannot be told from its outputs."
            )
        pieces.append((time.perf_counter(), tuple(token_ids)))

    def end(self, request_id: str, reason: str) -> None:
        """The request has ended; `reason` is a finish reason of records, see `RequestRecord`."""
        self._reasons[request_id] = reason

    def token_ids(self, request_id: str) -> tuple[int, ...]:
        """The text so far."""
        return tuple(token for _, piece in self._pieces[request_id] for token in piece)

    def record(self, request_id: str) -> RequestRecord:
        """The record of a request that has ended."""
        pieces, begun_s = self._pieces[request_id], self._begun_s[request_id]
        first_s, last_s = (pieces[0][0], pieces[-1][0]) if pieces else (begun_s, begun_s)
        added = [len(piece) for _, piece in pieces[1:]]
        rounds = added if self._num_drafts else []
        return RequestRecord(
            request_id=request_id,
            num_prompt_tokens=len(self._prompts[request_id]),
            output_token_ids=self.token_ids(request_id),
            finish_reason=self._reasons[request_id],
            num_accepted_per_round=tuple(count - 1 for count in rounds),
            num_drafted_per_round=(self._num_drafts,) * len(rounds),
            num_target_forwards=len(added),
            ttft_s=first_s - begun_s,
            decode_s=last_s - first_s,
        )


def token_ids_sha256(prompts: Iterable[Sequence[int]]) -> str:
    """One hash of the token ids of prompts, in order."""
    return hashlib.sha256(json.dumps([list(one) for one in prompts]).encode()).hexdigest()


class EngineRun(NamedTuple):
    """What an engine other than ours made of some prompts."""

    records: tuple[RequestRecord, ...]  # one a prompt
    num_steps: int | None  # of its loop; None where it does not tell
    counters: Mapping[str, int] | None = None  # its own, see `PassRecord`


def free_memory() -> None:
    """Give back what decoders that have ended left cached, before an engine takes its share."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def warm_up(run: Callable[[EncodedPrompts, int], EngineRun], encoded: EncodedPrompts) -> None:
    """Decode a few tokens of the first prompts; `run` takes prompts and the most new tokens."""
    few = slice(_WARM_UP_PROMPTS)
    run(EncodedPrompts(encoded.prompts[few], encoded.token_ids[few], ()), _WARM_UP_TOKENS)


def engine_pass(
    run: Callable[[EncodedPrompts, int], EngineRun],
    workload: Workload,
    condition: Condition,
    *,
    number: int,
    done: Sequence[RequestRecord],
    version: str,
) -> Pass:
    """One pass of an engine other than ours, in the journal once it is whole.

    Args:
        run: decodes prompts, all of them there from the start, up to so many new tokens each.
        workload: the prompts.
        condition: what is decoded.
        number: of the pass.
        done: what the journal has.
        version: engine and version.
    """
    left = workload.conversations.encoded.without({record.request_id for record in done})
    started = time.perf_counter()
    records, num_steps, counters = run(left, condition.config.sampling.max_new_tokens)
    wall_s = time.perf_counter() - started
    workload.journal.add(condition.label, number, records=records, audit=None)
    workload.progress.advance(len(records), note=condition.label)
    times = PassRecord(
        wall_s=wall_s,
        num_steps=num_steps,
        num_warm_ups=1,
        backend=version,
        engine_counters=counters,
    )
    return Pass(records, None, times)
