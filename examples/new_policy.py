"""Add a hidden-state policy as data, and price it.

    python -m examples.new_policy

`target_roll` feeds each depth the target's hidden state, as SGLang does for MiMo-V2, but never runs
again the rows whose token was a rejected draft. The policy below differs in one field: its rows are
anchored at the frontier, which repairs them. The auditor shows what the field buys in the draft KV,
the acceptance length what that is worth for these heads (trained for `training`).
"""

import dataclasses
from pathlib import Path

from mtp_research import POLICIES, SpecDecoder, SpecSettings, load_heads, load_target
from mtp_research.evaluation.run.prompts import encode_prompts, load_prompts
from mtp_research.models.target import load_tokenizer

LAB_TINY = Path(__file__).resolve().parents[1] / "assets" / "lab_tiny"


def main() -> None:
    """Decode with the known policy and the new one, and print a table."""
    target = load_target(LAB_TINY / "target", dtype="float32", device="cpu")
    prompts = load_prompts(str(LAB_TINY / "prompts"), max_prompts=8)
    tokenizer = load_tokenizer(str(LAB_TINY / "target"))
    token_ids = encode_prompts(prompts, tokenizer, max_model_len=1024).token_ids
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    known = POLICIES["target_roll"]
    repaired = dataclasses.replace(known, name="anchored_roll", rows="anchored", clean=True)

    print(f"{'policy':14}{'acceptance length':>18}{'WRONG':>7}{'MIXED':>7}{'HOLE':>7}{'slots':>7}")
    texts = []
    for policy in (known, repaired):
        decoder = SpecDecoder(
            target, heads, spec=SpecSettings(policy=policy, num_speculative_tokens=3)
        )
        outputs = decoder.generate(token_ids, max_new_tokens=40)
        texts.append({output.request_id: output.output_token_ids for output in outputs})
        audit = decoder.stats.audit
        counts = "".join(f"{audit[name]:7}" for name in ("WRONG", "MIXED", "HOLE", "slots"))
        print(f"{policy.name:14}{decoder.stats.acceptance_length:18.3f}{counts}")
    assert texts[0] == texts[1], "the policy decides how fast a text comes, never which text"


if __name__ == "__main__":
    main()
