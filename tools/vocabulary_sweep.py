"""How many tokens should heads draft from? Acceptance lost against time won, by domain.

    python tools/vocabulary_sweep.py --target GGUF --heads assets/smollm2/heads --json FILE
    python tools/vocabulary_sweep.py --cpu --prompts assets/lab_tiny/prompts --batch 1
    ... --max-prompts 4 --sizes 4096 512 --tokens 16

A smaller `spec.draft_vocabulary_size` makes every draft cheaper and loses those of rare tokens. For
each batch size and each domain of the prompts the sizes decode in turn, forwards and backwards by
pass, whole requests with their prompts, greedily and up to a stop token. A size has one decoder for
all batch sizes, as its steps are compiled once for them; on a GPU only full batches have graphs,
smaller ones are padded to them, and 1 to 2. A row says the acceptance length with its change from
the first size (`--sizes`, the full vocabulary by default; interval over prompts, paired), tokens/s,
and their ratio to the first size: the median of the passes, least and most beside it. Proposed is,
for each domain, for all, and for all batch sizes together, the size with the highest ratio of those
that were faster than the first in every pass, else the first. One JSON line comes last. Letter: K
drafts per step.
"""

import argparse
import json
import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mtp_research.runtime.threads import wait_passively

wait_passively()

import torch
from mtp_research.kernels.bench.bench_runner import describe_machine, drain

from mtp_research.config.schema import EngineConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.pool_size import NUM_SPARE_BLOCKS
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.run.prompts import ChatTokenizer, encode_prompt, load_prompts
from mtp_research.evaluation.stats.statistics import acceptance_statistics, paired_differences
from mtp_research.heads.draft_vocabulary import most_frequent
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.compiling import start_compilers
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.provenance import write_error

SIZES = (32768, 16384, 8192, 4096, 2048)  # beside the full vocabulary
ALL = "all"
Prompts = Mapping[str, Sequence[Sequence[int]]]  # token ids by domain
_LENGTH, _ROOM_TOKENS, _BLOCK = "acceptance_length_micro", 16, 16


class Decoded(NamedTuple):
    """A domain's prompts, once through."""

    records: list[RequestRecord]
    wall_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the rows and the proposals of every batch size; returns the exit status."""
    options = _parse(arguments)
    try:
        return _run(options)
    except (ConfigError, EnvironmentFault, IntegrityError) as fault:
        write_error(str(fault))
        return fault.exit_code


def _run(options: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.cpu:
        raise EnvironmentFault("vocabulary_sweep needs a CUDA GPU, got none; set --cpu to try it.")
    if device == "cuda" and not options.no_compile:
        start_compilers()
    dtype = "bfloat16" if device == "cuda" else "float32"
    target = load_target(str(options.target), dtype=dtype, device=device)
    heads = load_heads(str(options.heads), target)
    vocab_size = target.config.vocab_size
    sizes = options.sizes or [vocab_size, *(size for size in SIZES if size < vocab_size)]
    prompts = _prompts(target, options)
    report: dict[str, object] = {"arguments": vars(options), "machine": describe_machine()}
    report |= {"dtype": dtype}
    decoders = {
        size: _decoder(target, heads, options, size=size, prompts=prompts) for size in sizes
    }
    rows: list[dict[str, object]] = []
    for batch in options.batch:
        for found in batch_rows(decoders, prompts[batch], options, batch=batch):
            rows += found
            line = json.dumps(report | {"rows": rows, "proposed": proposals(rows)}, default=str)
            if options.json is not None:
                options.json.write_text(line)
    for name, size in proposals(rows).items():
        print(f"proposed for {name}: spec.draft_vocabulary_size={size}")
    print(line)
    return 0


def _prompts(target: Target, options: argparse.Namespace) -> dict[int, Prompts]:
    """Token ids of first turns by domain, for each batch size."""
    tokenizer = cast(ChatTokenizer, target.tokenizer)
    most = options.max_prompts or [None]
    most = most * len(options.batch) if len(most) == 1 else most
    if len(most) != len(options.batch):
        raise ConfigError(
            f"--max-prompts must say one number or one for each of {len(options.batch)} batch "
            f"sizes, got {len(most)}; set --max-prompts."
        )
    prompts: dict[int, Prompts] = {}
    for batch, count in zip(options.batch, most, strict=True):
        found: dict[str, list[Sequence[int]]] = {}
        for prompt in load_prompts(options.prompts, max_prompts=count):
            found.setdefault(prompt.category, []).append(encode_prompt(prompt, tokenizer))
        prompts[batch] = dict(sorted(found.items()))
    return prompts


def _decoder(
    target: Target,
    heads: MTPHeads,
    options: argparse.Namespace,
    *,
    size: int,
    prompts: Mapping[int, Prompts],
) -> SpecDecoder:
    """A decoder that has compiled and captured what it will run; all have pools of one size."""
    started_s, on_gpu = time.perf_counter(), target.device.type == "cuda"
    domains = [members for found in prompts.values() for members in found.values()]
    longest = max(len(ids) for members in domains for ids in members)
    limit, batch = longest + options.tokens + options.k + _ROOM_TOKENS, max(options.batch)
    engine = EngineConfig(
        block_size=_BLOCK,
        num_blocks=batch * math.ceil((limit + options.k + 1) / _BLOCK) + NUM_SPARE_BLOCKS,
        memory_fraction=1.0,
        max_num_requests=batch,
        max_num_batched_tokens=max(2048, batch * (options.k + 1)),
        max_prefill_chunk=2048,
        max_model_len=limit,
        deferred_output=True,
        cuda_graphs=on_gpu,
        compile=on_gpu and not options.no_compile,
        graph_batch_sizes=sorted({max(one, 2) for one in options.batch}),
        capture_mixed=on_gpu,
        audit=False,
    )
    spec = SpecSettings(
        policy=options.policy,
        num_speculative_tokens=options.k,
        draft_token_ids=None
        if size == target.config.vocab_size
        else most_frequent(options.heads, num_tokens=size, target=target),
    )
    decoder = SpecDecoder(target, heads, spec=spec, engine=engine)
    decoder.warm_up(_sampling(decoder, options))
    for one in options.batch:
        some = next(iter(prompts[one].values()))[:one]
        _decode(decoder, some, options, batch=one, domain="uncounted")
    print(f"{size} tokens: ready in {time.perf_counter() - started_s:.0f} s", flush=True)
    return decoder


def _sampling(decoder: SpecDecoder, options: argparse.Namespace) -> SamplingParams:
    stop = tuple(decoder.target.stop_token_ids)
    return SamplingParams(max_new_tokens=options.tokens, stop_token_ids=stop)


def batch_rows(
    decoders: Mapping[int, SpecDecoder],
    prompts: Prompts,
    options: argparse.Namespace,
    *,
    batch: int,
) -> Iterator[list[dict[str, object]]]:
    """Rows of each size for a domain at a time, then for all; printed as they are there."""
    found: dict[str, dict[int, list[Decoded]]] = {}
    for domain, token_ids in prompts.items():
        passes = {size: [] for size in decoders}
        for number in range(options.passes):
            for size in list(decoders)[:: -1 if number % 2 else 1]:
                decoded = _decode(decoders[size], token_ids, options, batch=batch, domain=domain)
                passes[size].append(decoded)
        found[domain] = passes
        yield domain_rows(passes, batch=batch, domain=domain, num_drafts=options.k)
    if len(found) > 1:
        whole = {size: _joined([one[size] for one in found.values()]) for size in decoders}
        yield domain_rows(whole, batch=batch, domain=ALL, num_drafts=options.k)


def _decode(
    decoder: SpecDecoder,
    token_ids: Sequence[Sequence[int]],
    options: argparse.Namespace,
    *,
    batch: int,
    domain: str,
) -> Decoded:
    """All prompts, `batch` of them at a time."""
    drain()
    started_s, num_seen = time.perf_counter(), len(decoder.stats.records)
    waiting, sampling = deque(enumerate(token_ids)), _sampling(decoder, options)
    while waiting or decoder.has_work:
        while waiting and len(decoder.live_requests) < batch:
            index, prompt = waiting.popleft()
            decoder.add_request(prompt, sampling=sampling, request_id=f"{domain}/{index}")
        decoder.step()
    drain()
    return Decoded(decoder.stats.records[num_seen:], time.perf_counter() - started_s)


def _joined(parts: Sequence[Sequence[Decoded]]) -> list[Decoded]:
    """The passes of all domains together."""
    return [
        Decoded([r for one in same for r in one.records], sum(one.wall_s for one in same))
        for same in zip(*parts, strict=True)
    ]


def domain_rows(
    passes: Mapping[int, Sequence[Decoded]], *, batch: int, domain: str, num_drafts: int
) -> list[dict[str, object]]:
    """A row for each size against the first one, printed."""
    first = next(iter(passes.values()))
    texts = {record.request_id: record.output_token_ids for record in first[0].records}
    rows = []
    for size, decoded in passes.items():
        records = decoded[0].records
        own = acceptance_statistics(records, num_speculative_tokens=num_drafts)
        pair = (records, first[0].records)
        change = paired_differences(*pair, num_speculative_tokens=num_drafts)[_LENGTH]
        rates = [_tokens_per_s(one) for one in decoded]
        ratios = [rate / _tokens_per_s(one) for rate, one in zip(rates, first, strict=True)]
        row = {"batch": batch, "domain": domain, "size": size, "num_prompts": len(records)}
        row |= {"acceptance_length": own.acceptance_length_micro, "change": change}
        row |= {"num_equal": sum(texts[r.request_id] == r.output_token_ids for r in records)}
        row |= {"tokens_per_s": median(rates), "of_first": median(ratios), "ratios": ratios}
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _tokens_per_s(one: Decoded) -> float:
    return sum(len(record.output_token_ids) for record in one.records) / one.wall_s


def _line(row: Mapping) -> str:
    change, ratios = row["change"], row["ratios"]
    equal = f"{row['num_equal']}/{row['num_prompts']}"
    interval = "" if change.low is None else f" [{change.low:+.3f}, {change.high:+.3f}]"
    return (
        f"batch {row['batch']:3} {row['domain']:>12} {row['size']:7} tokens: length "
        f"{row['acceptance_length'].value or 1:.3f}, change {change.value or 0:+.3f}{interval}, "
        f"{row['tokens_per_s']:8.1f} tokens/s, {row['of_first']:.3f} of the first "
        f"[{min(ratios):.3f}, {max(ratios):.3f}], texts equal {equal}"
    )


def proposals(rows: Sequence[Mapping]) -> dict[str, int]:
    """The size for each batch size and domain; for all batch sizes by the product of ratios."""
    by_place: dict[str, dict[int, list[Mapping]]] = {}
    num_domains = len({row["domain"] for row in rows})
    for row in rows:
        places = [f"batch {row['batch']}, {row['domain']}"]
        if row["domain"] == ALL or num_domains == 1:
            places.append("every batch size")
        for place in places:
            by_place.setdefault(place, {}).setdefault(row["size"], []).append(row)
    return {place: _fastest(sizes) for place, sizes in sorted(by_place.items())}


def _fastest(sizes: Mapping[int, Sequence[Mapping]]) -> int:
    least = {size: math.prod(min(row["ratios"]) for row in rows) for size, rows in sizes.items()}
    ratios = {size: math.prod(row["of_first"] for row in rows) for size, rows in sizes.items()}
    faster = [size for size in sizes if least[size] > 1]
    return max(faster, key=ratios.__getitem__) if faster else next(iter(sizes))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add, lab = parser.add_argument, ROOT / "assets" / "lab_tiny"
    add("--target", type=Path, default=lab / "target", help="folder or GGUF file")
    add("--heads", type=Path, default=lab / "heads" / "chain_n3", help="with token_ranking.json")
    add("--prompts", help="as prompts.path; left out: the shipped ones")
    most = "spread over the domains; one number, or one for each batch size"
    add("--max-prompts", nargs="+", type=int, help=most)
    add("--sizes", nargs="+", type=int, help="the first one is what others are compared with")
    add("--batch", nargs="+", type=int, default=[1, 32])
    add("--k", type=int, default=3)
    add("--policy", default="training")
    add("--tokens", type=int, default=128, help="of an answer at most")
    add("--passes", type=int, default=4)
    add("--no-compile", action="store_true")
    add("--cpu", action="store_true", help="run without a GPU, to try the command")
    add("--json", type=Path, help="also write the JSON line to this file, after each domain")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
