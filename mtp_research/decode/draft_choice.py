"""Which token a module's logits propose: the last stretch of a draft pass.

`greedy` takes the argmax, `processed` the argmax after the request's own logit processors, `sample`
draws with its temperature and truncation and keeps the distribution for verification.

Letters: R requests, V vocabulary, V' draft vocabulary.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from mtp_research.decode.drafter import VerifiedStep
from mtp_research.decode.kv_cache import HiddenRing
from mtp_research.decode.processors import process_logits
from mtp_research.decode.sampling import Stream, sample_from, target_probabilities, uniform_noise
from mtp_research.decode.verify import PADDING_TOKEN_ID
from mtp_research.heads.draft_vocabulary import DraftVocabulary
from mtp_research.models.compiled import settled

DraftSampling = Literal["greedy", "processed", "sample"]
DRAFT_SAMPLINGS: tuple[DraftSampling, ...] = get_args(DraftSampling)


def choose_drafts(
    logits: Tensor,
    step: VerifiedStep,
    *,
    draft_step: int,
    ring: HiddenRing,
    sampling: DraftSampling,
    vocabulary: DraftVocabulary | None,
) -> Tensor:
    """Draft tokens `[R]` int64; a non-finite row gives -1.

    For greedy drafts -inf is a mask, as in verification: one look-up finds what is broken.

    Args:
        logits: `[R, V]`, or `[R, V']` of a draft vocabulary.
        step: the verified step that is drafted for.
        draft_step: which draft, 0..K-1.
        ring: has the text with the drafts so far; sampled drafts leave their distributions in it.
        sampling: how to choose.
        vocabulary: the tokens that may be drafted; None for all.
    """
    if sampling == "greedy":
        best = settled(logits.argmax(dim=-1))
        finite = torch.isfinite(logits.gather(-1, best[:, None])[:, 0])
        token_ids = best if vocabulary is None else vocabulary.token_ids[best]
        return torch.where(finite, token_ids, PADDING_TOKEN_ID)
    finite = torch.isfinite(logits).all(dim=-1)
    if vocabulary is not None:
        logits = vocabulary.spread(logits)
    if sampling == "processed" and step.params.processors is not None:
        num_tokens = step.state.num_known_tokens + draft_step
        logits = process_logits(
            logits[:, None],
            step.params.processors,
            text=ring.text[step.inputs.slots],
            num_tokens=num_tokens[:, None],
        )[:, 0]
        finite = finite & (logits.amax(dim=-1) > -torch.inf)  # no token may be left
    if sampling == "processed":
        return torch.where(finite, logits.argmax(dim=-1), PADDING_TOKEN_ID)
    safe = logits.masked_fill(~finite[:, None], 0.0)
    probs = target_probabilities(safe[:, None], step.params)[:, 0]
    ring.write_draft_probs(step.inputs.slots, draft_step=draft_step, probs=probs)
    # Keyed by the step too: a later step drafts this position anew (see verify_block).
    first = step.state.num_known_tokens
    noise = uniform_noise(step.params.seed, first, Stream.DRAFT, index=draft_step)
    token_ids = sample_from(probs, noise)
    return torch.where(finite, token_ids, PADDING_TOKEN_ID)
