"""A loop whose verifier obeys a hash of request and position.

Two runs of a scenario meet the same accepted counts, broken rows and stop tokens, whichever steps
they fall into, so that runs with other timing, batches or pools can be compared round by round.
"""

import random
from dataclasses import dataclass, field

import torch

from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.ledger import Launched
from mtp_research.decode.schedule.request import Request, Status
from mtp_research.decode.step import Verified
from mtp_research.decode.verify.verify import PADDING_TOKEN_ID, VerifyOutput

VOCAB = 128


@dataclass
class HashedLoop:
    """A decoder whose verifier obeys hashes, and what its requests went through.

    Attributes:
        decoder: its verifier is replaced.
        break_chance: chance that a verification with drafts fails like one with NaN logits.
        rounds: per request, length and drafts after each committed round.
    """

    decoder: SpecDecoder
    break_chance: float = 0.0
    rounds: dict[str, list[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        scheduler, ledger = self.decoder.scheduler, self.decoder._ledger
        make_schedule, apply = scheduler.schedule, ledger.apply

        def named_schedule():
            schedule = make_schedule()
            self._names = [entry.request.request_id for entry in schedule.entries]
            return schedule

        def noted_apply(launched: Launched) -> None:
            apply(launched)
            _, _, made = launched.pending.wait().columns()
            for entry, drafts in zip(launched.entries, made, strict=True):
                request = entry.request
                if request.status is not Status.FINISHED and (
                    entry.ends_at_newest_token or entry.ends_recompute
                ):
                    room = max(self.decoder.max_model_len - request.num_tokens, 0)
                    rounds = self.rounds.setdefault(request.request_id, [])
                    rounds.append((request.num_tokens, tuple(drafts[:room])))

        scheduler.schedule = named_schedule
        ledger.apply = noted_apply
        self.decoder.observe(lambda parts: parts._replace(verify=self._verify))

    def _verify(self, inputs, target, params) -> Verified:
        width = self.decoder.num_speculative_tokens + 1
        counts, tokens, finite = [], [], []
        for row, name in enumerate(self._names):
            drafts = inputs.draft_token_ids[row].tolist()
            num_valid = next((i for i, d in enumerate(drafts) if d < 0), len(drafts))
            rng = random.Random(f"{name} {int(inputs.num_tokens[row])}")
            count = min(rng.randint(0, width - 1), num_valid)
            bonus = rng.randrange(VOCAB)
            breaks = num_valid > 0 and rng.random() < self.break_chance
            emitted = [*drafts[:count], bonus, *[PADDING_TOKEN_ID] * (width - 1 - count)]
            finite.append(not breaks)
            counts.append(0 if breaks else count)
            tokens.append([PADDING_TOKEN_ID] * width if breaks else emitted)
        tensors = (torch.tensor(counts), torch.tensor(tokens), torch.tensor(finite))
        return Verified(VerifyOutput(*tensors), None)

    def decode(
        self, requests: list[Request], *, aborted: Request | None = None, num_steps: int = 0
    ) -> dict[str, tuple]:
        """Step until all is done; per request its end, text and rounds.

        Args:
            requests: all that were added.
            aborted: one that is aborted after `num_steps` steps.
            num_steps: see `aborted`.
        """
        while self.decoder.scheduler.has_work:
            if aborted is not None and num_steps == self.decoder.stats.num_steps:
                self.decoder.abort(aborted)
                aborted = None
                continue
            self.decoder.step()
            self.decoder.scheduler.check_integrity()
        blocks = self.decoder.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_blocks, "blocks leaked"
        return {
            request.request_id: (
                request.finish_reason,
                request.output_token_ids,
                tuple(request.num_accepted_per_round),
                tuple(request.num_drafted_per_round),
                tuple(
                    dict.fromkeys(self.rounds.get(request.request_id, []))
                ),  # resumed: drafted twice
            )
            for request in requests
        }
