"""Greedy text of our loop at K = 0 beside transformers' `generate`, prompt by prompt.

    python tools/same_text.py --target FOLDER_OR_GGUF --prompts question.jsonl --out same_text.json

First turns only, float32 unless --dtype says otherwise. Of a text that differs, the gap between the
two largest logits at the first token that does is measured with transformers: a tie is decided by
the order in which numbers were added. Exits 1 if a gap is above --max-gap. The file holds hashes
and counts, no text.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from transformers import AutoModelForCausalLM

from mtp_research import EngineConfig, SpecDecoder, SpecSettings, load_target
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompt, load_prompts
from mtp_research.models.loading.source import source_facts
from mtp_research.models.target import load_tokenizer
from mtp_research.runtime.provenance import run_record


def main() -> int:
    """Compare; see the docstring of the module."""
    args = parse()
    tokenizer = cast(ChatTokenizer, load_tokenizer(args.target))
    prompts = load_prompts(args.prompts, max_prompts=args.max_prompts)
    ids = [list(encode_prompt(prompt, tokenizer)) for prompt in prompts]
    target = load_target(args.target, dtype=args.dtype, device=args.device)
    started = time.perf_counter()
    engine = EngineConfig(max_num_requests=args.batch, audit=False)
    decoder = SpecDecoder(target, spec=SpecSettings(num_speculative_tokens=0), engine=engine)
    ours = {
        int(record.request_id): list(record.output_token_ids)
        for record in decoder.generate(ids, max_new_tokens=args.tokens)
    }
    our_seconds = time.perf_counter() - started
    # A copy of its own: the target's layers have our attention.
    plain = AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype).to(target.device)
    plain.eval()
    rows, started = [], time.perf_counter()
    for index, prompt in enumerate(prompts):
        theirs = continued(plain, ids[index], num_tokens=args.tokens)
        row = compared(plain, ids[index], ours[index], theirs)
        digest = hashlib.sha256(json.dumps(theirs).encode()).hexdigest()
        rows.append({"question_id": prompt.question_id, "text_sha256": digest, **row})
        print(
            f"{index + 1}/{len(prompts)} {prompt.question_id}: {row}", file=sys.stderr, flush=True
        )
    num_equal = sum(row["num_equal_tokens"] == row["num_tokens"] for row in rows)
    gaps = [row["gap"] for row in rows if "gap" in row]
    result = {
        "target": source_facts(args.target), "dtype": str(target.dtype), "tokens": args.tokens,
        "num_prompts": len(rows), "num_equal": num_equal, "largest_gap": max(gaps, default=None),
        "our_seconds": our_seconds, "their_seconds": time.perf_counter() - started,
        "run": run_record(), "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf8")
    print(f"{num_equal} of {len(rows)} texts equal; gaps where they differ: {gaps or 'none'}")
    return int(any(gap > args.max_gap for gap in gaps))


def parse() -> argparse.Namespace:
    """The words of the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", required=True)
    add("--prompts", required=True)
    add("--out", type=Path, required=True)
    add("--tokens", type=int, default=128)
    add("--max-prompts", type=int)
    add("--max-gap", type=float, default=1e-4)
    add("--batch", type=int, default=1)
    add("--dtype", default="float32")
    add("--device", default="auto")
    return parser.parse_args()


@torch.inference_mode()
def continued(model: torch.nn.Module, prompt: list[int], *, num_tokens: int) -> list[int]:
    """What `generate` appends to the prompt, greedily."""
    ids = torch.tensor([prompt], device=model.device)
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return text[0, len(prompt) :].tolist()


@torch.inference_mode()
def compared(
    model: torch.nn.Module, prompt: list[int], ours: list[int], theirs: list[int]
) -> dict[str, float | int]:
    """How many tokens are equal from the start and, where not all are, how near the choice was."""
    pairs = zip(ours, theirs, strict=False)
    num_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    row: dict[str, float | int] = {"num_tokens": len(theirs), "num_equal_tokens": num_equal}
    if ours != theirs:
        ids = torch.tensor([prompt + theirs[:num_equal]], device=model.device)
        best, second = model(ids).logits[0, -1].float().topk(2).values.tolist()
        row["gap"] = best - second
    return row


if __name__ == "__main__":
    raise SystemExit(main())
