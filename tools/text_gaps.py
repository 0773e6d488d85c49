"""How texts of two loops compare, for `gpu_deterministic`: match rate, and gaps where they part."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import Target

Texts = dict[int, tuple[int, ...]]
MAX_GAPS = 200  # divergences of a loop whose logits are computed; all of them are counted


class Decoded(NamedTuple):
    """Output by prompt, seconds after the warm-up and mean acceptance length."""

    texts: Texts
    seconds: float
    acceptance_length: float | None


def compare(
    target: Target, prompts: list[list[int]], base: Decoded, found: Decoded
) -> dict[str, object]:
    """Match rate against the first loop, and the logit gap at up to `MAX_GAPS` divergences."""
    num_equal = sum(base.texts[index] == found.texts[index] for index in range(len(prompts)))
    gaps = divergences(target, prompts, base.texts, found.texts)
    return {
        "match_rate": num_equal / len(prompts),
        "num_divergent": len(prompts) - num_equal,
        "seconds": found.seconds,
        "tokens_per_s": sum(map(len, found.texts.values())) / found.seconds,
        "acceptance_length": found.acceptance_length,
        "divergences": list(itertools.islice(gaps, MAX_GAPS)),
    }


@torch.inference_mode()
def divergences(
    target: Target, prompts: list[list[int]], expected: Texts, found: Texts
) -> Iterator[dict[str, object]]:
    """Where texts part: prompt, output position, tokens and the gap of the top two logits."""
    for index, prompt in enumerate(prompts):
        pairs = enumerate(zip(expected[index], found[index], strict=True))
        first = next((place for place, (left, right) in pairs if left != right), None)
        if first is None:
            continue
        text = torch.tensor([[*prompt, *expected[index][:first]]], device=target.device)
        positions = torch.arange(text.shape[1], device=target.device)[None]
        hidden = target.forward(text, position_ids=positions, context=DenseContext())
        top = target.logits(hidden.post_norm[0, -1]).float().topk(2)
        yield {
            "prompt": index,
            "position": first,
            "tokens": (expected[index][first], found[index][first]),
            "logit_gap": float(top.values[0] - top.values[1]),
        }
