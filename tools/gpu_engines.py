"""Exported heads in vLLM against our loop run by vLLM's conventions, round by round, on a GPU.

    python tools/gpu_engines.py --out $OUT                          all cases; wants vLLM 0.24
    python tools/gpu_engines.py --out $OUT --cases lab_tiny,mimo --k 1,3
    python tools/gpu_engines.py --out /tmp/x --prepare-only         on a CPU: our side alone

A case is the shipped target with its trained head, or a random target of one family with random
modules, whose lm_head is fitted so that texts do not hang on rounding. Both loops decode the
exported one greedily: equal texts are counted, and equal rounds in them. `control` is our loop by
the family's own conventions: where it agrees as well, the case tells nothing. vLLM has no float32
kernels for latent attention and for gated delta rules: these cases are decoded in bfloat16, and
`rounding` is our loop in float32 against our loop in bfloat16: what no engine could be blamed for.
Our side runs on the CPU. Exit status 1: a case failed or too few rounds are equal.

Letters: K drafts per step, N rows, D hidden, V vocabulary.
"""

import argparse
import itertools
import json
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch

from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.backends.vllm_backend import (
    engine_words,
    load_vllm,
    sampling_params,
)
from mtp_research.evaluation.run.engine_effect import DecodeTask, decode_as
from mtp_research.evaluation.run.prompts import encode_prompt, load_prompts
from mtp_research.heads.engines import ENGINES, HeadRun, trained_run
from mtp_research.heads.export import stitch_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.target import load_target, load_tokenizer
from mtp_research.training.unroll import RowInputs, unroll
from tests import tiny
from tests.heads.release import change_config, write_release

LAB_TINY = ROOT / "assets" / "lab_tiny"
LEAST_EQUAL = 0.99  # of the rounds of equal texts
LEAST_WHOLE = 0.97  # of the equal texts
_LONGEST_PROMPT = 160  # tokens
_SIZES: dict[str, object] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 16}
_SIZES |= {"eos_token_id": None, "num_attention_heads": 4, "num_key_value_heads": 2}
_MOE = {**_SIZES, "moe_intermediate_size": 128}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# In bfloat16 every expert takes part: a router whose best two scores round to one picks another.
_ALL_EXPERTS = {"num_experts_per_tok": 8}
_NEXT = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
CASES: dict[str, dict[str, object]] = {  # family -> changes of the tiny recipe
    "glm4_moe": {**_MOE, "head_dim": 64},
    "deepseek_v3": {
        **(_MOE | _LATENT | _ALL_EXPERTS),
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "mimo": _SIZES,
    "qwen3_next": {**(_MOE | _NEXT | _ALL_EXPERTS), "shared_expert_intermediate_size": 128},
}
# The type of MiMo's configuration is remote code; vLLM goes by the architecture.
CONFIGS = {"mimo": {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}}
BFLOAT16 = ("deepseek_v3", "qwen3_next")


class Decoded(NamedTuple):
    """One prompt's output."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]  # drafts kept, by round


class Agreement(NamedTuple):
    """How far two sides agree; rounds are those of equal texts, without the last, which is cut.

    A round is equal if it begins at the same token on both sides and keeps as many drafts.
    """

    num_texts: int
    num_equal_texts: int
    num_whole_texts: int  # of the equal ones, with all rounds equal
    num_rounds: int
    num_equal_rounds: int
    lengths: tuple[float, float]  # acceptance lengths over all prompts


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case; returns 1 where one failed or differs."""
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for case in options.cases.split(","):
        try:
            heads = prepare(case, options.out / case)
            for num_drafts in map(int, options.k.split(",")):
                found = _compare(heads, options.out / case / "exported", num_drafts, options)
                rows.append({"case": case, "k": num_drafts, **found})
                print(json.dumps(rows[-1]), flush=True)
        except Exception:  # the other cases are worth having
            rows.append({"case": case, "passed": False, "error": traceback.format_exc()})
    (options.out / "engines.json").write_text(json.dumps(rows, indent=1))
    return 0 if all(row["passed"] for row in rows) else 1


def prepare(case: str, folder: Path) -> MTPHeads:
    """Heads of a case, read back from what is exported for vLLM to `folder/exported`."""
    source = head = folder / "source"
    if case == "lab_tiny":
        source, head = LAB_TINY / "target", LAB_TINY / "heads" / "ttt_n1"
    else:
        made = tiny.tiny_target(case, dtype=torch.float32, seed=1, **CASES[case])
        write_release(made, source)
    target = load_target(source, dtype="float32", device="cpu")
    heads = load_heads(head, target)
    if case != "lab_tiny":  # norms near 1 would hide what is recycled
        norm = heads.mtp_modules[0].shared_head.norm.weight
        norm.data += torch.linspace(-0.8, 4, len(norm)).roll(17)
        fit_lm_head(heads)
        write_release(target, source)
    stitch_heads(heads, folder / "exported", source=source, engine="vllm")
    change_config(folder / "exported", CONFIGS.get(case, {}))
    return load_heads(folder / "exported", target)  # rounded to bfloat16, of the family's way


@torch.no_grad()
def fit_lm_head(heads: MTPHeads, *, num_rows: int = 48, length: int = 40) -> None:
    """Let target and modules name the successor of the last token, as well as one matrix can.

    Least squares `[V, D]` from the final states of random text to a permutation of the vocabulary.
    """
    target = heads.target
    generator = torch.Generator().manual_seed(0)
    follow = torch.randperm(target.config.vocab_size, generator=generator)
    ids = torch.randint(len(follow), (num_rows, length), generator=generator)
    positions, document = torch.arange(length).expand_as(ids), torch.zeros_like(ids)
    seen = target.forward(ids, position_ids=positions, context=DenseContext(document))
    inputs = RowInputs(ids, heads.source(seen), positions, document)
    (drafted,) = unroll(heads, inputs, num_depths=1, kind="chain")
    states = torch.cat((seen.post_norm.flatten(0, 1), drafted.post_norm[:, :-1].flatten(0, 1)))
    named = follow[torch.cat((ids.flatten(), ids[:, 1:].flatten()))]
    wanted = torch.nn.functional.one_hot(named, len(follow)).double()
    ridge = torch.eye(states.shape[1], dtype=torch.float64)
    gram = states.double().T @ states.double() + ridge
    weight = torch.linalg.solve(gram, states.double().T @ wanted).T
    target.lm_head.weight.copy_(20 * weight)


def our_side(heads: MTPHeads, run: HeadRun, task: DecodeTask) -> list[Decoded]:
    """Our loop, with the heads run as `run` says."""
    records = decode_as(heads, run, task)
    return [Decoded(one.token_ids, one.num_accepted_per_round) for one in records]


def vllm_side(folder: Path, task: DecodeTask, stop_token_ids: Sequence[int]) -> list[Decoded]:
    """One request at a time: what a step adds to a text is a round."""
    family = folder.parent.name
    vllm = load_vllm()
    words = engine_words(
        folder,
        dtype="bfloat16" if family in BFLOAT16 else "float32",
        num_drafts=task.spec.num_speculative_tokens,
        max_model_len=256,
        max_num_seqs=1,
    )
    attention = "TRITON_MLA" if family == "deepseek_v3" else "TRITON_ATTN"
    words |= {"enforce_eager": True, "gpu_memory_utilization": 0.05}
    words |= {"attention_config": {"backend": attention}}
    if family == "qwen3_next":  # the other kernel is FlashInfer's
        words |= {"gdn_prefill_backend": "triton"}
    engine = vllm.LLM(**words).llm_engine
    params = sampling_params(
        vllm, max_new_tokens=task.max_new_tokens, stop_token_ids=stop_token_ids
    )
    found = []
    for index, prompt in enumerate(task.prompts):
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        pieces: list[list[int]] = []
        while engine.has_unfinished_requests():
            pieces += [list(one.outputs[0].token_ids) for one in engine.step()]
        found.append(decoded([piece for piece in pieces if piece]))
    engine.engine_core.shutdown()  # the next case needs its memory
    return found


def decoded(pieces: Sequence[Sequence[int]]) -> Decoded:
    """What each step added: the prompt's token, then per round the kept drafts and one more."""
    tokens = (token for piece in pieces for token in piece)
    return Decoded(tuple(tokens), tuple(len(piece) - 1 for piece in pieces[1:]))


def agreement(ours: Sequence[Decoded], theirs: Sequence[Decoded]) -> Agreement:
    """Equal texts, equal rounds in them, and both acceptance lengths."""
    pairs = list(zip(ours, theirs, strict=True))
    equal = [(rounds(a), rounds(b)) for a, b in pairs if a.token_ids == b.token_ids]
    counts = [[n for one in side for n in one.accepted[:-1]] for side in (ours, theirs)]
    lengths = [1 + sum(side) / max(len(side), 1) for side in counts]
    return Agreement(
        num_texts=len(pairs),
        num_equal_texts=len(equal),
        num_whole_texts=sum(a == b for a, b in equal),
        num_rounds=sum(max(len(a), len(b)) for a, b in equal),
        num_equal_rounds=sum(len(a & b) for a, b in equal),
        lengths=(lengths[0], lengths[1]),
    )


def rounds(one: Decoded) -> set[tuple[int, int]]:
    """Where in the text each round begins, and how many drafts it keeps; the last is left out."""
    begins = itertools.accumulate((kept + 1 for kept in one.accepted), initial=1)
    return set(list(zip(begins, one.accepted, strict=False))[:-1])


def _compare(
    heads: MTPHeads, folder: Path, num_drafts: int, options: argparse.Namespace
) -> dict[str, object]:
    vocab_size = heads.target.config.vocab_size
    prompts = _prompts(folder.parent.name, options.prompts, vocab_size=vocab_size)
    spec = SpecSettings(num_speculative_tokens=num_drafts)
    task = DecodeTask(prompts, spec, options.max_new_tokens)
    run = ENGINES["vllm"][heads.target.family_name].run
    ours = theirs = our_side(heads, run, task)
    if not options.prepare_only:
        theirs = vllm_side(folder, task, heads.target.stop_token_ids)
    own = replace(trained_run(heads), policy=run.policy, module_schedule=run.module_schedule)
    found, control = agreement(ours, theirs), agreement(our_side(heads, own, task), theirs)
    passed = found.num_equal_rounds >= LEAST_EQUAL * found.num_rounds > 0
    passed = passed and found.num_whole_texts >= LEAST_WHOLE * found.num_equal_texts
    row: dict[str, object] = {"passed": passed, **found._asdict(), "control": control._asdict()}
    if folder.parent.name in BFLOAT16:
        rounded = load_heads(folder, load_target(folder, dtype="bfloat16", device="cpu"))
        row["rounding"] = agreement(ours, our_side(rounded, run, task))._asdict()
    return row


def _prompts(case: str, count: int, *, vocab_size: int) -> list[list[int]]:
    """Shipped prompts for the shipped target, which drafts well there; random tokens elsewhere."""
    if case == "lab_tiny":
        tokenizer = load_tokenizer(str(LAB_TINY / "target"))
        shipped = load_prompts(None, max_prompts=count)
        return [list(encode_prompt(one, tokenizer))[-_LONGEST_PROMPT:] for one in shipped]
    rng = random.Random(0)
    return [rng.choices(range(vocab_size), k=rng.randint(4, 24)) for _ in range(count)]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--cases", default=",".join(("lab_tiny", *CASES)))
    add("--k", default="1,3", help="drafts per step, comma-separated")
    add("--prompts", type=int, default=24)
    add("--max-new-tokens", type=int, default=64)
    add("--prepare-only", action="store_true", help="no vLLM: ours against itself")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
