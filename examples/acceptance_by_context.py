"""Measure acceptance against context length.

    python -m examples.acceptance_by_context

A head learns on short rows and is used on long texts. The records of finished requests say how many
drafts each round accepted, and with that where in the text the round was.
"""

from collections import defaultdict
from itertools import accumulate
from pathlib import Path

from mtp_research import SamplingParams, SpecDecoder, SpecSettings, load_heads, load_target
from mtp_research.evaluation.run.prompts import encode_prompts, load_prompts
from mtp_research.models.target import load_tokenizer

LAB_TINY = Path(__file__).resolve().parents[1] / "assets" / "lab_tiny"
BUCKET = 64  # tokens of context


def main(num_tokens: int = 240) -> None:
    """Decode past every stop token and print rounds and acceptance by context length."""
    target = load_target(LAB_TINY / "target", dtype="float32", device="cpu")
    prompts = load_prompts(str(LAB_TINY / "prompts"), max_prompts=8)
    tokenizer = load_tokenizer(str(LAB_TINY / "target"))
    token_ids = encode_prompts(prompts, tokenizer, max_model_len=1024).token_ids
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    decoder = SpecDecoder(
        target, heads, spec=SpecSettings(policy="training", num_speculative_tokens=3)
    )
    sampling = SamplingParams(max_new_tokens=num_tokens)  # no stop tokens

    rounds: dict[int, list[int]] = defaultdict(list)
    for record in decoder.generate(token_ids, sampling=sampling):
        accepted = record.num_accepted_per_round
        # The prefill gives the first token, each round its accepted drafts and one token more.
        starts = accumulate((1 + a for a in accepted), initial=record.num_prompt_tokens + 1)
        for start, count in zip(starts, accepted, strict=False):
            rounds[start // BUCKET].append(count)

    print(f"{'context':>12}{'rounds':>8}{'acceptance length':>19}{'p_1':>7}{'p_2':>7}{'p_3':>7}")
    for bucket, counts in sorted(rounds.items()):
        context = f"{bucket * BUCKET}-{(bucket + 1) * BUCKET - 1}"
        rates = "".join(f"{sum(c >= i for c in counts) / len(counts):7.3f}" for i in (1, 2, 3))
        print(f"{context:>12}{len(counts):8}{1 + sum(counts) / len(counts):19.3f}{rates}")


if __name__ == "__main__":
    main()
