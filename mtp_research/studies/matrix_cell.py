"""The decode loop beside the replay walk: a cell of the policy matrix, and the loop in training.

A cell holds the loop's rounds against those of the walk over the loop's own text; `train.py` hands
the function of `decode_probe` to the training loop, which does not import the decoder.
Clean policies are replayed from flags of anchors. Under `target_roll`, which never reruns the rows
of rejected drafts, flags are not enough: pass m runs row q once, with the target's H_q and the
token x_{q+1+m}. Near the frontier that token is still a draft, and the row stays as it is when the
draft is rejected, so that what an anchor drafts depends on the rounds before it. The stale walk
carries each pass's rows along, round by round, over a text that is known:

    round at frontier p, text up to x_{p+1}:  pass m runs rows (last frontier, p] and drafts from p

Letters: K drafts per step, k = K depths, T tokens of the text, P prompt tokens.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from mtp_research.config.schema import EngineConfig, TrainConfig
from mtp_research.data.packing import EncodedDocument, pack_first_fit
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompts, load_prompts
from mtp_research.heads.record import DEFAULT_SCHEDULE
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention.attention import AttentionCall, DenseContext, with_sinks
from mtp_research.models.target import Target, load_tokenizer
from mtp_research.policy import fields, plan
from mtp_research.training.losses.losses import UnrollSpec
from mtp_research.training.packed_rows import TrainingRows
from mtp_research.training.walk.acceptance import replay_walk, response_ranges
from mtp_research.training.walk.replay import held_out_drafts

# The unroll that computes what a policy drafts from; with one module it is `ttt` as well.
WALK_UNROLL = {"training": "chain", "eagle": "shared_context", "target_roll": "independent"}
_WALK_ROWS = 8
_NUM_NEWEST = 6  # tokens whose earlier occurrence makes a round a repeated one
PROBE_NEW_TOKENS, PROBE_MODEL_LEN = 64, 512


def decode_prompts(
    target: Target,
    heads: MTPHeads | None,
    prompts: Sequence[tuple[int, ...]],
    *,
    policy: str,
    num_drafts: int,
    num_new: int,
) -> list[RequestRecord]:
    """Greedy text of a fixed length, every prompt read whole in its first step.

    It goes on behind a stop token, so that the round which holds it is known; `measure_cell` counts
    no later one.
    """
    longest, total = max(map(len, prompts)), sum(map(len, prompts))
    engine = EngineConfig(
        max_num_requests=len(prompts),
        max_num_batched_tokens=max(512, total + len(prompts) * (num_drafts + 1)),
        max_prefill_chunk=longest,
        max_model_len=longest + num_new + 1,
    )
    spec = SpecSettings(policy=policy, num_speculative_tokens=num_drafts)
    decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
    records = decoder.generate(prompts, sampling=SamplingParams(max_new_tokens=num_new))
    return sorted(records, key=lambda record: int(record.request_id))


class CellRounds(NamedTuple):
    """Accepted drafts of each round of each prompt of loop and walks.

    Rounds start before the text's first stop token, and all their K tokens are known.
    """

    loop: tuple[tuple[int, ...], ...]
    clean: tuple[tuple[int, ...], ...] | None  # walk, rejected rows rerun; None if clean
    differing: tuple[int, ...]  # prompts; none in float32
    walks: tuple[tuple[int, ...], ...]  # under the policy as it is
    num_repeated: int  # the loop's rounds whose newest six tokens occurred before in the request
    # `[K]` share of the anchors, the same for all policies, whose first i drafts are all right
    anchor_rates: tuple[float, ...]


def measure_cell(
    heads: MTPHeads,
    records: Sequence[RequestRecord],
    *,
    prompts: Sequence[tuple[int, ...]],
    policy: str,
    num_drafts: int,
) -> CellRounds:
    """Compare the loop's rounds with the walk over its own text."""
    documents = [
        EncodedDocument(
            doc_id=record.request_id,
            domain="matrix",
            token_ids=tuple(prompt) + record.output_token_ids,
            loss_mask=(False,) * len(prompt) + (True,) * len(record.output_token_ids),
        )
        for prompt, record in zip(prompts, records, strict=True)
    ]
    walks = _walks(heads, documents, policy=policy, num_drafts=num_drafts)
    pairs = zip(records, walks, strict=True)
    loop = tuple(_known_rounds(one.num_accepted_per_round, walk) for one, walk in pairs)
    texts = zip(prompts, documents, loop, strict=True)
    hits = np.sum([walk.prefix_hits for walk in walks], axis=0)
    return CellRounds(
        loop=loop,
        clean=None if fields.POLICIES[policy].clean else tuple(walk.clean for walk in walks),
        differing=tuple(i for i, walk in enumerate(walks) if loop[i] != walk.exact),
        walks=tuple(walk.exact for walk in walks),
        num_repeated=sum(
            num_repeated_rounds(text.token_ids, rounds, start=len(prompt) - 1)
            for prompt, text, rounds in texts
        ),
        anchor_rates=tuple((hits / max(sum(walk.num_anchors for walk in walks), 1)).tolist()),
    )


def num_repeated_rounds(token_ids: Sequence[int], accepted: Sequence[int], *, start: int) -> int:
    """Rounds whose newest tokens occurred before in the same order; copying makes drafting easy.

    The first round has the anchor `start`; one at anchor t knows the tokens up to x_{t+1}.
    """
    ends = range(_NUM_NEWEST, len(token_ids) + 1)
    newest = {end: tuple(token_ids[end - _NUM_NEWEST : end]) for end in ends}
    first_end: dict[tuple[int, ...], int] = {}
    for end, gram in newest.items():
        first_end.setdefault(gram, end)
    num_known, count = start + 2, 0
    for num_accepted in accepted:
        if num_known in newest:
            count += first_end[newest[num_known]] < num_known
        num_known += num_accepted + 1
    return count


class _Walks(NamedTuple):
    """Accepted drafts of each round of one text."""

    exact: tuple[int, ...]  # under the policy as it is
    clean: tuple[int, ...]  # as if the rows of rejected drafts were rerun
    num_anchors: int  # before the stop token, whose K tokens are known
    prefix_hits: np.ndarray  # `[K]` anchors whose first i drafts are right, rejected rows rerun


def _known_rounds(accepted: Sequence[int], walk: _Walks) -> tuple[int, ...]:
    """The loop's rounds that start at an anchor of the walk."""
    known, anchor = [], 0
    for count in accepted:
        if anchor >= walk.num_anchors:
            break
        known.append(count)
        anchor += count + 1
    return tuple(known)


def _walks(
    heads: MTPHeads, documents: Sequence[EncodedDocument], *, policy: str, num_drafts: int
) -> list[_Walks]:
    rows = TrainingRows(
        pack_first_fit(documents, seq_len=max(len(text.token_ids) for text in documents)),
        target=heads.target,
        hidden_source=heads.spec.hidden_source,
        keep_hidden=False,
    )
    schedule = heads.spec.module_schedule or DEFAULT_SCHEDULE
    spec, found = UnrollSpec(num_drafts, WALK_UNROLL[policy], schedule), []
    starts = range(0, len(rows), _WALK_ROWS)
    batches = [range(start, min(start + _WALK_ROWS, len(rows))) for start in starts]
    drafts = held_out_drafts(heads, rows, spec=spec, row_batches=batches)
    for index, document in enumerate(documents):
        ((start, stop),) = response_ranges(document.loss_mask, num_depths=num_drafts)
        stop = max(start, min(stop, _stop_position(document, heads.target.stop_token_ids) - 1))
        clean = replay_walk(drafts[index].is_hit, start=start, stop=stop).accepted_per_round
        exact, run = clean, fields.POLICIES[policy]
        if not run.clean:
            exact = stale_walk(
                heads,
                document.token_ids,
                policy=run,
                start=start,
                stop=stop,
                num_depths=num_drafts,
                schedule=schedule,
            )
        prefixes = np.cumprod(drafts[index].is_hit[start:stop], axis=1).sum(axis=0)
        found.append(_Walks(exact, clean, stop - start, prefixes))
    return found


def _stop_position(document: EncodedDocument, stop_token_ids: Collection[int]) -> int:
    """Of the answer's first stop token; the end of the text without one."""
    pairs = enumerate(zip(document.token_ids, document.loss_mask, strict=True))
    stops = (at for at, (token, is_own) in pairs if is_own and token in stop_token_ids)
    return next(stops, len(document.token_ids))


class StoredRows:
    """An `AttentionContext`: keys and values of one pass, which later rounds' rows read too."""

    def __init__(self) -> None:
        self._rows: tuple[Tensor, Tensor] | None = None

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        """See `AttentionContext.attend`."""
        query, key, value, scale, sliding_window, sinks = call
        if self._rows is not None:
            key = torch.cat((self._rows[0], key), dim=2)
            value = torch.cat((self._rows[1], value), dim=2)
        self._rows = (key, value)
        num_keys, num_rows = key.shape[2], query.shape[2]
        mask = DenseContext().mask(sliding_window, length=num_keys, device=key.device)
        mask = mask[:, :, num_keys - num_rows :]
        if sinks is not None:
            key, value, mask = with_sinks(key, value, mask, sinks)
        is_grouped = query.shape[1] != key.shape[1]
        output = nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        return output.transpose(1, 2)


@torch.no_grad()
def stale_walk(
    heads: MTPHeads,
    token_ids: Sequence[int],
    *,
    policy: plan.HiddenPolicy,
    start: int,
    stop: int,
    num_depths: int,
    schedule: plan.ModuleSchedule = "cycle",
) -> tuple[int, ...]:
    """Accepted drafts of each round, in order, as `replay_walk` gives them for clean policies.

    `token_ids` `[T]` is the target's own greedy text with its prompt. The policy reads the target's
    hidden states at fresh rows, and has no draft rows. Anchors are [start, stop): P - 1, and
    T - k - 1, the end of those whose k = `num_depths` tokens are known.
    """
    assert (policy.rows, policy.hidden, policy.draft_rows) == ("fresh", "target", "none"), (
        f"{policy.name} is replayed from flags or not at all"
    )
    device = heads.target.device
    positions = torch.arange(len(token_ids), device=device)[None]
    text = torch.tensor([list(token_ids)], device=device)
    output = heads.target.forward(text, position_ids=positions, context=DenseContext())
    hidden = heads.source(output)
    stored = [StoredRows() for _ in range(num_depths)]
    accepted: list[int] = []
    first, frontier = 0, start
    while frontier < stop:
        known = list(token_ids[: frontier + 2])  # the drafts of this round follow
        for step in range(num_depths):
            offset = plan.token_offset(policy, step)
            module_idx = plan.module_index(schedule, step, heads.spec.num_mtp_modules)
            output = heads.run_module(
                heads.mtp_modules[module_idx],
                token_ids=torch.tensor([known[first + offset :]], device=device),
                prev_hidden_states=hidden[:, first : frontier + 1],
                position_ids=positions[:, first : frontier + 1],
                context=stored[step],
            )
            logits = heads.logits(output.post_norm[0, -1], module_idx=module_idx)
            known.append(int(logits.argmax()))
        wanted = token_ids[frontier + 2 : frontier + 2 + num_depths]
        pairs = zip(known[frontier + 2 :], wanted, strict=True)
        hits = [draft == token for draft, token in pairs]
        accepted.append(num_depths if all(hits) else hits.index(False))
        first, frontier = frontier + 1, frontier + accepted[-1] + 1
    return tuple(accepted)


def decode_probe(config: TrainConfig) -> Callable[[MTPHeads], dict[str, object]] | None:
    """A function that decodes `trainer.decode_eval_prompts` prompts greedily with given heads.

    It drafts by the policy that the unroll matches, K being the depths of the training.
    """
    num_prompts = config.trainer.decode_eval_prompts
    if not num_prompts:
        return None
    # Layers stay the library's: training goes on with them, to the bit as if nothing was decoded.
    engine = EngineConfig(
        max_num_requests=8, max_model_len=PROBE_MODEL_LEN, audit=False, few_rows_kernel=False
    )
    prompts = load_prompts(None, max_prompts=num_prompts, seed=config.seed)
    spec = SpecSettings(
        policy=fields.MATCHING_POLICY[config.objective.unroll],
        num_speculative_tokens=config.objective.num_depths or max(config.head.num_mtp_modules, 3),
        verify="greedy",
    )

    def probe(heads: MTPHeads) -> dict[str, object]:
        tokenizer = cast(ChatTokenizer, load_tokenizer(config.model.path))
        encoded = encode_prompts(prompts, tokenizer, max_model_len=PROBE_MODEL_LEN)
        decoder = SpecDecoder(heads.target, heads, spec=spec, engine=engine)
        sampling = SamplingParams(
            max_new_tokens=PROBE_NEW_TOKENS, stop_token_ids=heads.target.stop_token_ids
        )
        for prompt, token_ids in zip(encoded.prompts, encoded.token_ids, strict=True):
            decoder.add_request(token_ids, sampling=sampling, request_id=prompt.question_id)
        # Modules that are compiled for the shapes of training would compile again for each step's.
        with torch.compiler.set_stance("force_eager"):
            while decoder.has_work:
                decoder.step()
        accepted = [n for one in decoder.stats.records for n in one.num_accepted_per_round]
        return {
            "acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
            "num_accepted": sum(accepted),
            "num_rounds": len(accepted),
            "num_prompts": len(encoded.prompts),
        }

    return probe
