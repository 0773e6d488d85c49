"""Add a verification rule, and see what it trades.

    python -m examples.new_verify_rule

A rule is a pure function from logits and drafts to accepted counts and emitted tokens. This one
keeps a draft that is nearly as probable as the target's best token. It is lossy, says so, and the
decoder takes it like the built-in rules.
"""

from pathlib import Path

from mtp_research import SpecDecoder, SpecSettings, load_heads, load_target
from mtp_research.decode.verify.verify import VerifyInputs, VerifyOutput, count_leading, emit
from mtp_research.decode.verify.verify_rules import RULES, Rule
from mtp_research.evaluation.run.prompts import encode_prompts, load_prompts
from mtp_research.models.target import load_tokenizer

LAB_TINY = Path(__file__).resolve().parents[1] / "assets" / "lab_tiny"
MARGIN = 1.0  # nats


def verify_margin(inputs: VerifyInputs) -> VerifyOutput:
    """Accept drafts whose log-probability is at most MARGIN below the best token's."""
    best = inputs.target_logits.max(dim=-1)  # [R, K+1]
    drafted = inputs.target_logits[:, :-1].gather(-1, inputs.draft_indices[..., None])[..., 0]
    accepted = inputs.is_valid & (best.values[:, :-1] - drafted <= MARGIN)  # [R, K]
    return emit(inputs, num_accepted=count_leading(accepted), decided=best.indices)


def main() -> None:
    """Decode with the exact rule and the new one, and print a table."""
    target = load_target(LAB_TINY / "target", dtype="float32", device="cpu")
    prompts = load_prompts(str(LAB_TINY / "prompts"), max_prompts=8)
    tokenizer = load_tokenizer(str(LAB_TINY / "target"))
    token_ids = encode_prompts(prompts, tokenizer, max_model_len=1024).token_ids
    heads = load_heads(LAB_TINY / "heads" / "chain_n3", target)
    margin = Rule(verify_margin, lossless=False, samples=False)

    print(f"{'rule':10}{'lossless':>9}{'acceptance length':>18}{'texts changed':>15}")
    exact: dict[str, tuple[int, ...]] = {}
    for name, rule in (("greedy", RULES["greedy"]), ("margin", margin)):
        decoder = SpecDecoder(
            target, heads, spec=SpecSettings(verify=rule, num_speculative_tokens=3)
        )
        outputs = decoder.generate(token_ids, max_new_tokens=40)
        texts = {output.request_id: output.output_token_ids for output in outputs}
        exact = exact or texts
        changed = sum(texts[key] != exact[key] for key in exact)
        length = decoder.stats.acceptance_length
        print(f"{name:10}{rule.lossless!s:>9}{length:18.3f}{f'{changed} of {len(texts)}':>15}")


if __name__ == "__main__":
    main()
