"""Measure acceptance against context length.

    python -m examples.acceptance_by_context
    python -m examples.acceptance_by_context --target DIR --heads DIR --text FILE --longest 32768

A head learns on short rows and is used on long texts. The records of finished requests say how many
drafts each round accepted, and with that how much text stood before it. With `--text` the first
64, 128, ... tokens of a long text are continued, up to `--longest`.
"""

import argparse
from pathlib import Path

from mtp_research import EngineConfig, SamplingParams, SpecDecoder, load_heads, load_target
from mtp_research.evaluation.run.prompts import encode_prompts, load_prompts
from mtp_research.evaluation.stats.statistics import acceptance_by_context

LAB_TINY = Path(__file__).resolve().parents[1] / "assets" / "lab_tiny"


def main(words: list[str] | None = None) -> None:
    """Decode past every stop token and print rounds and acceptance by context length."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default=str(LAB_TINY / "target"))
    parser.add_argument("--heads", default=str(LAB_TINY / "heads" / "chain_n3"))
    parser.add_argument("--text", type=Path, help="file; left out: eight prompts of lab_tiny")
    parser.add_argument("--longest", type=int, default=784, help="tokens")
    parser.add_argument("--tokens", type=int, default=240, help="that continue each context")
    args = parser.parse_args(words)
    target = load_target(args.target)
    heads = load_heads(args.heads, target)
    if args.text is None:
        prompts = load_prompts(str(LAB_TINY / "prompts"), max_prompts=8)
        contexts = encode_prompts(prompts, target.tokenizer, max_model_len=args.longest).token_ids
    else:
        token_ids = target.encode(args.text.read_text(encoding="utf8"))[: args.longest]
        sizes = [1 << n for n in range(6, len(token_ids).bit_length())] or [len(token_ids)]
        contexts = [token_ids[:size] for size in sizes]
    engine = EngineConfig(max_model_len=args.longest + args.tokens)
    decoder = SpecDecoder(target, heads, engine=engine)  # three drafts a round
    sampling = SamplingParams(max_new_tokens=args.tokens)  # no stop tokens
    records = list(decoder.generate(contexts, sampling=sampling))

    print(f"{'context':>14}{'requests':>10}{'rounds':>8}{'acceptance length [95 %]':>30}")
    for part in acceptance_by_context(records, seed=0):
        size, length = f"{part.low}-{part.high - 1}", part.acceptance_length
        interval = f"{length.value:.3f}"
        if length.low is not None:  # one prompt has no interval
            interval += f" [{length.low:.3f}, {length.high:.3f}]"
        print(f"{size:>14}{part.num_prompts:10}{part.num_rounds:8}{interval:>30}")


if __name__ == "__main__":
    main()
