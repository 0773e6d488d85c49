"""Exported heads in vLLM against our loop run by vLLM's conventions, round by round, on a GPU.

    python tools/gpu_engines.py --out $OUT                          all cases; wants vLLM 0.24
    python tools/gpu_engines.py --out /tmp/x --prepare-only         on a CPU: our side alone

A case is the shipped target with its head, or a small target and module of one family, trained so
that rounding tips neither texts nor drafts and that other conventions give other drafts. Both loops
decode the exported one greedily: equal texts are counted, and equal rounds in them. Our loop runs
by other conventions too: `control` (the target's states across a norm), `recycling` (the module's,
for K > 1), `position_0` (its embedding; float32 cases). vLLM has no float32 kernels for latent
attention and for gated delta rules: these cases are decoded in bfloat16, and `rounding` is our loop
in float32 against our loop in bfloat16.
Our side runs on the CPU. Exit status 1: a case failed or too few rounds are equal.

Letters: K drafts per step, N rows, D hidden, V vocabulary.
"""

import argparse
import itertools
import json
import random
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from torch import Tensor

from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.backends.protocol import StepLog
from mtp_research.evaluation.backends.vllm_backend import (
    drive,
    engine_words,
    load_vllm,
    sampling_params,
)
from mtp_research.evaluation.run.engine_effect import DecodeTask, decode_as
from mtp_research.evaluation.run.prompts import encode_prompt, load_prompts
from mtp_research.heads.engines import ENGINES, HeadRun, run_as
from mtp_research.heads.export import stitch_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.family import NormPoint
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
_LATENT |= {"num_attention_heads": 16, "num_key_value_heads": 16}
# In bfloat16 every expert takes part: a router whose best two scores round to one picks another.
_ALL_EXPERTS = {"num_experts_per_tok": 8}
_NEXT = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
CASES: dict[str, dict[str, object]] = {  # family -> changes of the tiny recipe
    "glm4_moe": {**_MOE, "head_dim": 64},
    "deepseek_v3": {**_MOE, **_LATENT, **_ALL_EXPERTS},
    "mimo": _SIZES,
    "qwen3_next": {**(_MOE | _NEXT | _ALL_EXPERTS), "shared_expert_intermediate_size": 128},
}
# The type of MiMo's configuration is remote code; vLLM goes by the architecture.
CONFIGS = {"mimo": {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}}
BFLOAT16 = ("deepseek_v3", "qwen3_next")
NUM_STEPS = 60  # where rounding is bfloat16's, else a fifth
_TRAINED_ON = (4, 48)  # texts, tokens
_HERE, _ELSEWHERE = (0, 3, 10), (5, 8, 15)  # tokens after which drafts are wrong
_SKIPS = ((_HERE,) * 3, (_ELSEWHERE,), (_HERE, _ELSEWHERE))  # by `sides`, then by draft


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
        for norm in (target.final_norm.weight, heads.mtp_modules[0].shared_head.norm.weight):
            norm.data += torch.linspace(-0.8, 4, len(norm)).roll(17)
        train(heads, num_steps=NUM_STEPS if case in BFLOAT16 else NUM_STEPS // 5)
        write_release(target, source)
    stitch_heads(heads, folder / "exported", source=source, engine="vllm")
    change_config(folder / "exported", CONFIGS.get(case, {}))
    return load_heads(folder / "exported", target)  # rounded to bfloat16, of the family's way


def sides(heads: MTPHeads) -> list[HeadRun]:
    """Conventions of vLLM; the same with the target's states, with a module's, across the norm."""
    run = ENGINES["vllm"][heads.target.family_name].run
    other: dict[str | None, NormPoint] = {"post_norm": "pre_norm", "pre_norm": "post_norm"}
    control = replace(run, hidden_source=other[run.hidden_source])
    return [run, control, replace(run, recycle_norm=other[run.recycle_norm])]


def train(heads: MTPHeads, *, num_steps: int) -> None:
    """Train target and module until neither texts nor drafts are close calls, in place.

    Texts are random tokens, then count on through the vocabulary. Drafts do too, but skip a token
    after some: the lengths lie well between 1 and K + 1. Run by other conventions than the first,
    they skip after other tokens, from the first draft on that the conventions reach. Few steps
    leave close calls, and drafts that hang on the first token's embedding.
    """
    target, generator = heads.target, torch.Generator().manual_seed(0)
    vocab_size = target.config.vocab_size
    twins = [run_as(heads, side) for side in sides(heads)]
    for twin in twins:
        twin.mtp_modules = heads.mtp_modules  # one set of weights
    weights = [*target.model.requires_grad_().parameters(), *heads.requires_grad_().parameters()]
    optimizer = torch.optim.Adam(weights, lr=1e-3)
    for step in range(num_steps):
        ids = torch.randint(vocab_size, _TRAINED_ON, generator=generator)
        ids[:, 12:] = (ids[:, 11:12] + torch.arange(1, ids.shape[1] - 11)) % vocab_size
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        seen = target.forward(ids, position_ids=positions, context=DenseContext(None))
        loss = _cross_entropy(target.logits(seen.post_norm), (ids + 1) % vocab_size)
        for twin, skips in zip(twins, _SKIPS, strict=True):
            inputs = RowInputs(ids, twin.source(seen), positions, torch.zeros_like(ids))
            drafted = unroll(twin, inputs, num_depths=len(skips), kind="ttt", schedule="first")
            for depth, (output, after) in enumerate(zip(drafted, skips, strict=True), start=1):
                named = (ids + 1 + torch.isin(ids, torch.tensor(after))) % vocab_size
                logits = twin.logits(output.post_norm[:, :-depth])
                loss = loss + _cross_entropy(logits, named[:, depth:])
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, 2 - 2 * step / num_steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    target.model.requires_grad_(False)


def _cross_entropy(logits: Tensor, named: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), named.flatten())


def our_side(heads: MTPHeads, run: HeadRun, task: DecodeTask) -> list[Decoded]:
    """Our loop, with the heads run as `run` says."""
    return _decoded(decode_as(heads, run, task))


def vllm_side(folder: Path, task: DecodeTask, stop_token_ids: Sequence[int]) -> list[Decoded]:
    """Eight requests side by side: what a step adds to a text is a round."""
    family = folder.parent.name
    vllm = load_vllm()
    words = engine_words(
        folder,
        dtype="bfloat16" if family in BFLOAT16 else "float32",
        num_drafts=task.spec.num_speculative_tokens,
        max_model_len=256,
        max_num_seqs=8,
    )
    words |= {"enforce_eager": True, "gpu_memory_utilization": 0.05}
    attention = "TRITON_MLA" if family == "deepseek_v3" else "TRITON_ATTN"
    words["attention_config"] = {"backend": attention}
    if family == "qwen3_next":  # the other kernel is FlashInfer's
        words["gdn_prefill_backend"] = "triton"
    engine = vllm.LLM(**words).llm_engine
    params = sampling_params(
        vllm, max_new_tokens=task.max_new_tokens, stop_token_ids=stop_token_ids
    )
    log = StepLog("vllm", num_drafts=task.spec.num_speculative_tokens)
    asked = {str(index): prompt for index, prompt in enumerate(task.prompts)}
    drive(engine, asked, params, log=log)
    engine.engine_core.shutdown()  # the next case needs its memory
    return _decoded(map(log.record, asked))


def _decoded(records: Iterable[RequestRecord]) -> list[Decoded]:
    return [Decoded(one.token_ids, one.num_accepted_per_round) for one in records]


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
    run, *others = sides(heads)
    others.append(replace(run, zero_position_0=not run.zero_position_0))
    ours = theirs = our_side(heads, run, task)
    if not options.prepare_only:
        theirs = vllm_side(folder, task, heads.target.stop_token_ids)
    found = agreement(ours, theirs)
    controls = [agreement(our_side(heads, other, task), theirs)._asdict() for other in others]
    passed = found.num_equal_rounds >= LEAST_EQUAL * found.num_rounds > 0
    passed = passed and found.num_whole_texts >= LEAST_WHOLE * found.num_equal_texts
    row: dict[str, object] = {"passed": passed, **found._asdict()}
    row |= dict(zip(("control", "recycling", "position_0"), controls, strict=True))
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
