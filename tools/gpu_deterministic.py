"""Greedy text of K = 0 against drafting, usual and deterministic arithmetic, and what it costs.

    python tools/gpu_deterministic.py --out $OUT --target PATH --heads PATH      200 prompts x 256
    python tools/gpu_deterministic.py --out /tmp/x --target assets/lab_tiny/target \
        --heads assets/lab_tiny/heads/chain_n3 --prompts 3 --tokens 8 --batch 2  tiny, on a CPU

Without --target: random weights of --shape and random prompts, whose drafts are hardly ever right.
Both modes decode with K = 0 and with K drafts of both policies, each also in another batch size,
chunk and order. Printed are match rates against the first, for divergences the gap of the two
largest logits, and the cost in percent, after a warm-up. Steps are captured and not compiled,
unless --compile asks: that takes 20 to 30 s for each loop. After --limit-s no other loop is
started. The result names what is missing, and is written after every loop. Exits 1 if a
deterministic text differs or a deterministic loop is missing, 4 without a GPU and --target.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from mtp_research.kernels.bench.bench_runner import describe_machine

from mtp_research.bench.shapes import SHAPES, random_heads, random_target
from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompt, load_prompts
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.attention.attention import DenseContext
from mtp_research.models.loading.placement import DTYPES, resolve_device
from mtp_research.models.target import Target, load_target, load_tokenizer

MODE_NAMES = {True: "deterministic", False: "usual"}
HALVED = {"batch_share": 0.5, "order": -1}
EXIT_NO_DEVICE = 4
PREFILL_CHUNK = 256
WARM_UP_TOKENS = 8
MAX_GAPS = 200  # divergences of a loop whose logits are computed; all of them are counted

Texts = dict[int, tuple[int, ...]]


class Loop(NamedTuple):
    """One way to decode all prompts; `order` is 1 as given, -1 last prompt first."""

    name: str
    num_drafts: int
    policy: str = "training"
    batch_share: float = 1.0
    order: int = 1


class Decoded(NamedTuple):
    """Output by prompt, seconds after the warm-up and mean acceptance length."""

    texts: Texts
    seconds: float
    acceptance_length: float | None


def main() -> int:
    """Run every loop under both modes; see the module's first lines."""
    options, started = _parse_options(), time.perf_counter()
    if options.target is None and options.shape != "tiny" and not torch.cuda.is_available():
        fault = f"random weights of {options.shape} need a CUDA device, none is visible"
        print(f"error: {fault}; set --target or --shape tiny.", file=sys.stderr)
        return EXIT_NO_DEVICE
    target, heads = load(options)
    prompts = make_prompts(target, options)
    loops = _loops_of(options.k)
    rows: dict[bool, dict[str, dict]] = {True: {}, False: {}}
    names = [loop.name for loop in loops]
    result = summarise(rows, names)
    options.out.mkdir(parents=True, exist_ok=True)
    for deterministic, found in rows.items():
        base: Decoded | None = None
        for loop in loops if deterministic else loops[: options.usual_loops]:
            if time.perf_counter() - started > options.limit_s:
                continue
            decoded = decode(target, heads, prompts, loop, options, deterministic)
            base = base or decoded
            found[loop.name] = compare(target, prompts, base, decoded)
            print(MODE_NAMES[deterministic], loop.name, json.dumps(found[loop.name]), flush=True)
            result = summarise(rows, names)
            write_report(options, target, rows, result)
    print(json.dumps(result))
    return int(not result["all_equal"])


def write_report(
    options: argparse.Namespace, target: Target, rows: dict[bool, dict[str, dict]], result: dict
) -> None:
    """All that is known so far, for a call that is cut off."""
    facts = vars(options) | {"machine": describe_machine(), "dtype": target.dtype, **result}
    facts["rows"] = {MODE_NAMES[mode]: found for mode, found in rows.items()}
    (options.out / "deterministic.json").write_text(json.dumps(facts, indent=1, default=str))


def _loops_of(num_drafts: int) -> list[Loop]:
    """What each mode decodes; the first is what the others are compared with."""
    k = f"K={num_drafts}"
    return [
        Loop("K=0", 0),
        Loop("K=0, half the batch, reversed", 0, **HALVED),
        *(Loop(f"{k} {name}", num_drafts, name) for name in ("eagle", "training")),
        Loop(f"{k} training, half the batch, reversed", num_drafts, **HALVED),
    ]


def summarise(rows: dict[bool, dict[str, dict]], names: list[str]) -> dict[str, object]:
    """Cost by loop, loops that were not reached, and whether all deterministic texts are equal."""
    fixed, usual = rows[True], rows[False]
    both = [name for name in names if name in fixed and name in usual]
    cost = {name: 100 * fixed[name]["seconds"] / usual[name]["seconds"] - 100 for name in both}
    left = [(MODE_NAMES[mode], name) for mode in rows for name in names if name not in rows[mode]]
    equal = all(name in fixed and fixed[name]["match_rate"] == 1.0 for name in names)
    missing = [f"{mode} {name}" for mode, name in left]
    return {"cost_percent": cost, "all_equal": equal, "missing": missing}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--target", help="folder of a target; default random weights of --shape")
    add("--heads", help="folder of trained heads; default random ones")
    add("--shape", default="dense_1b", choices=SHAPES)
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--k", type=int, default=3)
    add("--prompts", type=int, default=200)
    add("--prompt-tokens", type=int, default=192, help="of the longest prompt")
    add("--tokens", type=int, default=256, help="of each output")
    add("--batch", type=int, default=100)
    add("--limit-s", type=float, default=95, help="start no loop later than this")
    add("--compile", action="store_true", help="captured steps")
    few = "usual arithmetic decodes the first so many loops; 1 gives the cost at K = 0"
    add("--usual-loops", type=int, help=few)
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[Target, MTPHeads]:
    """The target and its heads, random where no folder was given."""
    if options.target is not None:
        target = load_target(options.target, dtype=options.dtype)
    else:
        place, dtype = resolve_device("auto"), DTYPES[options.dtype]
        target = random_target(options.shape, dtype=dtype, device=place)
    if options.heads is not None:
        return target, load_heads(options.heads, target)
    return target, random_heads(target)


def make_prompts(target: Target, options: argparse.Namespace) -> list[list[int]]:
    """Shipped prompts, then their first halves; random ones for random weights."""
    if options.target is None:  # of uneven lengths, so that chunks and batches differ
        generator, half = torch.Generator().manual_seed(0), max(options.prompt_tokens // 2, 1)
        lengths = [half + index % (half + 1) for index in range(options.prompts)]
        size = target.config.vocab_size
        return [torch.randint(size, (n,), generator=generator).tolist() for n in lengths]
    tokenizer = cast(ChatTokenizer, load_tokenizer(options.target))
    encoded = [encode_prompt(prompt, tokenizer) for prompt in load_prompts(None)]
    whole = [list(token_ids[: options.prompt_tokens]) for token_ids in encoded]
    halves = [token_ids[: max(len(token_ids) // 2, 1)] for token_ids in whole]
    return [*whole, *halves][: options.prompts]


def decode(
    target: Target,
    heads: MTPHeads,
    prompts: list[list[int]],
    loop: Loop,
    options: argparse.Namespace,
    deterministic: bool,
) -> Decoded:
    """Decode all prompts in one loop; graphs are captured and tried before the clock."""
    on_gpu = target.device.type == "cuda"
    batch = max(int(options.batch * loop.batch_share), 1)
    engine = EngineConfig(
        **{"max_num_requests": batch, "max_num_batched_tokens": max(4096, batch * (options.k + 1))},
        max_prefill_chunk=int(PREFILL_CHUNK * loop.batch_share),
        max_model_len=options.prompt_tokens + options.tokens + 2,
        compile=on_gpu and options.compile,
        capture_mixed=on_gpu and options.compile,
        **{"deferred_output": True, "cuda_graphs": on_gpu, "audit": False},
        deterministic=deterministic,
    )
    spec = SpecSettings(policy=loop.policy, num_speculative_tokens=loop.num_drafts)
    decoder = SpecDecoder(target, heads if loop.num_drafts else None, spec=spec, engine=engine)
    order = list(range(len(prompts)))[:: loop.order]
    decoder.warm_up(SamplingParams())
    run(decoder, prompts, order[:batch], WARM_UP_TOKENS)
    started = time.perf_counter()
    texts = run(decoder, prompts, order, options.tokens)
    return Decoded(texts, time.perf_counter() - started, decoder.stats.acceptance_length)


def run(decoder: SpecDecoder, prompts: list[list[int]], order: list[int], num_tokens: int) -> Texts:
    """Outputs by prompt; no stop token ends one."""
    sampling = SamplingParams(max_new_tokens=num_tokens)
    records = decoder.generate([prompts[index] for index in order], sampling=sampling)
    return {order[int(r.request_id)]: tuple(r.output_token_ids) for r in records}


def compare(target: Target, prompts: list[list[int]], base: Decoded, found: Decoded) -> dict:
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
        tokens, gap = (expected[index][first], found[index][first]), top.values[0] - top.values[1]
        yield {"prompt": index, "position": first, "tokens": tokens, "logit_gap": float(gap)}


if __name__ == "__main__":
    sys.exit(main())
