"""Exported heads in vLLM against our loop run by vLLM's conventions, round by round, on a GPU.

    python tools/gpu_engines.py --out $OUT                            all cases
    python tools/gpu_engines.py --out $OUT --cases lab_tiny,mimo --k 1,3
    python tools/gpu_engines.py --out /tmp/x --prepare-only           on a CPU: export, our side only

Wants vLLM 0.24 on the path. A case is the shipped target with its trained head, or a random target
of one family with random modules, made on the fly; six tokens or so make random drafts right now
and then. Each is written by `stitch_heads(engine="vllm")`, decoded by both loops greedily from the
same token ids, and compared: equal texts, and in those the rounds. A random head of a family with
every round equal shows names, norms, order of the halves and position 0 at once. Exit status 1: a
case failed, or fewer than `--least-equal` of the rounds of equal texts are equal.

Written before it met a GPU: sizes are what vLLM's kernels are known to take, not what was tried.
"""

import argparse
import json
import os
import random
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch

from mtp_research.evaluation.run.engine_effect import Workload, decode_as
from mtp_research.heads.engines import ENGINES, VERSIONS, trained_run
from mtp_research.heads.export import stitch_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import load_target
from tests import tiny
from tests.heads.release import change_config, write_release

LAB_TINY = ROOT / "assets" / "lab_tiny"
PROMPT_TOKENS = (4, 24)
_SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 16, "eos_token_id": None}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CASES: dict[str, dict[str, object]] = {  # family -> changes of the tiny recipe
    "glm4_moe": {**_SIZES, **_HEADS, "head_dim": 64, "moe_intermediate_size": 128},
    "deepseek_v3": {
        **_SIZES,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 128,
    },
    "mimo": {**_SIZES, **_HEADS},
    "qwen3_next": {
        **_SIZES,
        **_HEADS,
        "head_dim": 64,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
ARCHITECTURES = {"mimo": "MiMoForCausalLM"}  # of those that the library saves under another name


class Decoded(NamedTuple):
    """One prompt's output."""

    token_ids: tuple[int, ...]
    accepted: tuple[int, ...]  # drafts kept, by round


class Agreement(NamedTuple):
    """How far two sides agree; a round counts where both texts are equal, the last one is cut."""

    num_texts: int
    num_equal_texts: int
    num_rounds: int
    num_equal_rounds: int
    length_ours: float  # acceptance length over all prompts
    length_theirs: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case; returns 1 where one failed or differs."""
    options = _parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    is_good, rows = True, []
    for case in options.cases.split(","):
        try:
            heads, folder = prepare(case, options.out / case)
            for num_drafts in map(int, options.k.split(",")):
                row = {
                    "case": case,
                    "k": num_drafts,
                    **_compare(heads, folder, num_drafts, options),
                }
                rows.append(row)
                print(json.dumps(row), flush=True)
                is_good &= bool(row["passed"])
        except Exception as fault:  # the other cases are worth having
            traceback.print_exc()
            rows.append({"case": case, "error": f"{type(fault).__name__}: {fault}"})
            is_good = False
    (options.out / "engines.json").write_text(json.dumps(rows, indent=1))
    return 0 if is_good else 1


def prepare(case: str, folder: Path) -> tuple[MTPHeads, Path]:
    """Heads of a case, read back from what is exported for vLLM, and that folder."""
    source, head = folder / "source", folder / "source"
    if case == "lab_tiny":
        source, head = LAB_TINY / "target", LAB_TINY / "heads" / "ttt_n1"
    else:
        random_target = tiny.tiny_target(case, dtype=torch.float32, seed=1, **CASES[case])
        write_release(random_target, source)
        change_config(source, {"architectures": [_architecture(case, random_target.model)]})
    target = load_target(source, dtype="float32", device="cpu")
    heads = load_heads(head, target)
    stitch_heads(heads, folder / "exported", source=source, engine="vllm")
    # As an engine finds them: rounded to bfloat16, conventions unknown.
    return load_heads(folder / "exported", target), folder / "exported"


def prompts_of(heads: MTPHeads, num_prompts: int) -> list[list[int]]:
    """Random token ids, the same in every run."""
    rng, vocab_size = random.Random(0), heads.target.config.vocab_size
    lengths = [rng.randint(*PROMPT_TOKENS) for _ in range(num_prompts)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def our_side(heads: MTPHeads, workload: Workload) -> list[Decoded]:
    """Our loop, run as the table says that vLLM runs this family."""
    run = ENGINES["vllm"][heads.target.family_name].run
    records = decode_as(heads, run, workload)
    return [Decoded(r.output_token_ids, r.num_accepted_per_round) for r in records]


def vllm_side(
    folder: Path, workload: Workload, *, stop_token_ids: Sequence[int], options: argparse.Namespace
) -> list[Decoded]:
    """vLLM, one request at a time: what a step adds to a text is a round."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the table is about the other one
    import vllm
    from vllm.sampling_params import RequestOutputKind

    assert vllm.__version__.startswith(VERSIONS["vllm"]), vllm.__version__
    drafts = {"method": "mtp", "num_speculative_tokens": workload.num_speculative_tokens}
    engine = vllm.LLM(
        **{"model": str(folder), "skip_tokenizer_init": True, "dtype": options.dtype, "seed": 0},
        **{"max_model_len": 512, "max_num_seqs": 1, "enforce_eager": True},
        **{"enable_prefix_caching": False, "async_scheduling": False},
        **{"gpu_memory_utilization": 0.3, "speculative_config": drafts},
        **({"attention_config": {"backend": options.attention}} if options.attention else {}),
    ).llm_engine
    params = vllm.SamplingParams(
        **{"temperature": 0.0, "max_tokens": workload.max_new_tokens, "detokenize": False},
        **{"stop_token_ids": list(stop_token_ids), "output_kind": RequestOutputKind.DELTA},
    )
    found = []
    for index, prompt in enumerate(workload.prompts):
        engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        pieces: list[list[int]] = []
        while engine.has_unfinished_requests():
            pieces += [list(output.outputs[0].token_ids) for output in engine.step()]
        found.append(decoded([piece for piece in pieces if piece]))
    return found


def decoded(pieces: Sequence[Sequence[int]]) -> Decoded:
    """What each step added: the prompt's token, then per round the kept drafts and one more."""
    return Decoded(tuple(sum(map(list, pieces), [])), tuple(len(one) - 1 for one in pieces[1:]))


def agreement(ours: Sequence[Decoded], theirs: Sequence[Decoded]) -> Agreement:
    """Equal texts, equal rounds in them, and both acceptance lengths."""
    equal = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.token_ids == b.token_ids]
    rounds = [
        pair for a, b in equal for pair in zip(a.accepted[:-1], b.accepted[:-1], strict=False)
    ]
    lengths = []
    for side in (ours, theirs):
        counts = [count for one in side for count in one.accepted[:-1]]
        lengths.append(1 + sum(counts) / max(len(counts), 1))
    same = sum(a == b for a, b in rounds)
    return Agreement(len(ours), len(equal), len(rounds), same, *lengths)


def _compare(
    heads: MTPHeads, folder: Path, num_drafts: int, options: argparse.Namespace
) -> dict[str, object]:
    workload = Workload(prompts_of(heads, options.prompts), num_drafts, options.max_new_tokens)
    ours = theirs = our_side(heads, workload)
    if not options.prepare_only:
        stops = heads.target.stop_token_ids
        theirs = vllm_side(folder, workload, stop_token_ids=stops, options=options)
    found = agreement(ours, theirs)
    share = found.num_equal_rounds / max(found.num_rounds, 1)
    passed = found.num_rounds > 0 and share >= options.least_equal
    return {"passed": passed, **found._asdict(), "read_as": asdict(trained_run(heads))}


def _architecture(case: str, model: torch.nn.Module) -> str:
    return ARCHITECTURES.get(case, type(model).__name__)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--cases", default=",".join(("lab_tiny", *CASES)))
    parser.add_argument("--k", default="1,3", help="drafts per step, comma-separated")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="TRITON_ATTN", help="'' for vLLM's choice (MLA)")
    parser.add_argument("--least-equal", type=float, default=0.99)
    parser.add_argument("--prepare-only", action="store_true", help="no vLLM: ours against itself")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
