"""Replay of a greedy loop under a policy that never reruns the rows of rejected drafts.

Under `target_roll` pass m runs row q once, with the target's H_q and the token x_{q+1+m}. Near the
frontier that token is still a draft, and the row stays as it is when the draft is rejected. So what
an anchor drafts depends on the rounds before it, and flags of anchors are not enough: this walk
carries each pass's rows along, round by round, over a text that is known.

    round at frontier p, text up to x_{p+1}:  pass m runs rows (last frontier, p] and drafts from p

Letters: T tokens of the text, P prompt tokens, k = K drafts, D hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtp_research.heads.stack import MTPHeads
from mtp_research.models.attention import DenseContext, with_sinks
from mtp_research.policy import HiddenPolicy, ModuleSchedule, module_index, token_offset


class StoredRows:
    """Keys and values of one pass, round after round; new rows read them and one another.

    An `AttentionContext`.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self._rows: tuple[Tensor, Tensor] | None = None

    def attend(
        self,
        module: nn.Module,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        sliding_window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        if self._rows is not None:
            key = torch.cat((self._rows[0], key), dim=2)
            value = torch.cat((self._rows[1], value), dim=2)
        self._rows = (key, value)
        num_keys, num_rows = key.shape[2], query.shape[2]
        mask = DenseContext().mask(sliding_window, length=num_keys, device=key.device)
        mask = mask[:, :, num_keys - num_rows :]
        if sinks is not None:
            key, value, mask = with_sinks(key, value, mask, sinks)
        output = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)


@torch.no_grad()
def stale_walk(
    heads: MTPHeads,
    token_ids: Sequence[int],
    *,
    policy: HiddenPolicy,
    start: int,
    stop: int,
    num_depths: int,
    schedule: ModuleSchedule = "cycle",
) -> tuple[int, ...]:
    """Accepted drafts of each round, in order, as `replay_walk` gives them for clean policies.

    Args:
        heads: the modules.
        token_ids: `[T]` the target's own greedy text with its prompt.
        policy: reads the target's hidden states at fresh rows, and has no draft rows.
        start: first anchor, P - 1.
        stop: end of the anchors whose k tokens are known, T - k - 1.
        num_depths: k, drafts a round.
        schedule: which module runs which pass.
    """
    assert (policy.rows, policy.hidden, policy.draft_rows) == ("fresh", "target", "none"), (
        f"{policy.name} is replayed from flags or not at all"
    )
    device = heads.target.device
    positions = torch.arange(len(token_ids), device=device)[None]
    text = torch.tensor([list(token_ids)], device=device)
    hidden = heads.source(
        heads.target.forward(text, position_ids=positions, context=DenseContext())
    )
    stored = [StoredRows() for _ in range(num_depths)]
    accepted: list[int] = []
    first, frontier = 0, start
    while frontier < stop:
        known = list(token_ids[: frontier + 2])  # the drafts of this round follow
        for step in range(num_depths):
            offset = token_offset(policy, step)
            module_idx = module_index(schedule, step, heads.spec.num_mtp_modules)
            output = heads.run_module(
                module_idx,
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
