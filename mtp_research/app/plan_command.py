"""`mtp plan model=NAME gpus=2xh200`: memory, what fits, times and disk, before a weight is loaded.

Sizes come from the classes that a run would build, on the meta device; the KV pool and the bytes of
a step from the decode engine's own code. A time is a limit over a share of it that was measured of
the nearest shape (`bench/planned.py`); where nothing was measured there is none. Letters: K drafts
per step, N MTP modules.
"""

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mtp_research.app.cli import compose_config
from mtp_research.app.training_fit import GIB, NUM_GPUS, memory_of, other_ways, planned_heads
from mtp_research.bench import planned
from mtp_research.bench.planned import GPUS, DecodeMemory, Gpu, num_bytes
from mtp_research.bench.shapes import Sizes, sizes_only
from mtp_research.config.schema import EngineConfig, EvalConfig, TrainConfig
from mtp_research.config.training_schema import has_teacher
from mtp_research.data.hidden_cache import cached_bytes_per_token
from mtp_research.decode.settings import SpecSettings
from mtp_research.heads.stack import MTPHeads
from mtp_research.models.loading.placement import DATA, resolve_dtype
from mtp_research.models.loading.split_layers import num_sums
from mtp_research.models.target import Target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError, nearest
from mtp_research.runtime.options import OptionParser
from mtp_research.runtime.provenance import write_error
from mtp_research.training.setup import depths_of, needs_layers
from mtp_research.training.step_costs import flops_per_token

BATCHES = (1, 32)
_DEFAULT_LENGTH = 4096  # tokens of a request where engine.max_model_len is not set
OWN_KEYS = {"gpus": "1xh200", "tokens": "1e8", "context": "1024"}
# What is read of either entry's configuration; what a plan would ignore is refused.
READ = {
    EvalConfig: (
        *("model", "model.path", "model.family", "model.dtype", "model.architecture"),
        *("model.keep_fp8", "model.tp_plan", "engine"),
        *("engine.block_size", "engine.num_blocks", "engine.memory_fraction"),
        *("engine.max_num_requests", "engine.max_model_len", "engine.deferred_output"),
        *("spec.k", "spec.num_speculative_tokens", "spec.policy"),
    ),
    TrainConfig: (
        *("model", "model.path", "model.family", "model.dtype", "model.architecture"),
        *("model.keep_fp8", "data.seq_len", "data.hidden_cache", "head", "head.num_mtp_modules"),
        *("head.init", "head.path", "head.hidden_source", "head.lora_rank", "head.freeze"),
        *("objective", "objective.num_depths", "objective.loss", "trainer", "trainer.precision"),
        *("trainer.batch_size", "trainer.gradient_accumulation_steps", "trainer.parallel"),
        *("trainer.shard_target", "trainer.compile"),
    ),
}
KEYS = tuple(dict.fromkeys([*OWN_KEYS, *READ[EvalConfig], *READ[TrainConfig]]))
HELP = f"""Memory by part, what fits, step times, hours and disk of a model, without its weights.

  gpus     1 to 8 of a host, such as 2xh200; kinds h100 and h200; decoding splits the target
  tokens   of head training and of a cache of hidden states, {OWN_KEYS["tokens"]}
  context  tokens of a text while its step is timed, {OWN_KEYS["context"]}

keys: {", ".join(KEYS)}"""


class Line(NamedTuple):
    """One figure of a plan; None where nothing was measured that it could rest on."""

    name: str
    figure: float | None
    unit: str
    rests_on: str


Plan = dict[str, list[Line]]


class Setup(NamedTuple):
    """What is planned."""

    evaluation: EvalConfig
    training: TrainConfig
    kind: str  # key of GPUS
    num_gpus: int
    num_tokens: float  # that heads are trained on
    context: int  # tokens of each text of a timed step
    typed: frozenset[str]  # keys of the command line

    @property
    def gpu(self) -> Gpu:
        """The kind's figures."""
        return GPUS[self.kind]

    @property
    def memory(self) -> int:
        """Bytes of one GPU."""
        return self.gpu.memory_gib * GIB

    @property
    def tp_plan(self) -> str:
        """How several GPUs split the target."""
        return self.evaluation.model.tp_plan.replace("none", "tensor")

    @property
    def counts(self) -> list[int]:
        """Numbers of GPUs for which it is said what fits."""
        return sorted({*NUM_GPUS, self.num_gpus})


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; returns the exit code."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = OptionParser("mtp plan", description=HELP, formatter_class=formatter)
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        plan = make_plan(read_words(options.words))
    except (ConfigError, EnvironmentFault, IntegrityError) as fault:
        write_error(str(fault))
        return fault.exit_code
    text = {section: [line._asdict() for line in lines] for section, lines in plan.items()}
    sys.stdout.write(f"{json.dumps(text) if options.json else as_table(plan)}\n")
    return 0


def read_words(words: Sequence[str]) -> Setup:
    """What a command line asks for; ConfigError for what it cannot mean."""
    own, entries = dict(OWN_KEYS), {schema: [] for schema in READ}
    typed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    for key, value in typed.items():
        name = "model.architecture" if key.startswith("model.architecture.") else key
        if name not in KEYS:
            raise ConfigError(
                f"plan does not read {key}{nearest(key, KEYS)}; mtp plan --help lists."
            )
        if key in own:
            own[key] = value
        for schema, read in READ.items():
            entries[schema] += [f"{key}={value}"] * (name in read)
    match = re.fullmatch(r"([1-8])x(\w+)", own["gpus"])
    if match is None or match[2] not in GPUS:
        raise ConfigError(
            f"gpus must be 1 to 8 of {' or '.join(sorted(GPUS))}, such as 2xh200, got "
            f"{own['gpus']}; CPUs are not planned: set gpus=1xh200."
        )
    evaluation = compose_config(EvalConfig, entries[EvalConfig])
    lists = [name for name, value in vars(evaluation.grid).items() if value]
    if lists or (len({*evaluation.spec.policy}) > 1 and "spec.policy" in typed):
        raise ConfigError(
            f"plan takes one value a key, got a list for {', '.join(lists) or 'spec.policy'}; "
            "run it once for each."
        )
    return Setup(
        evaluation,
        compose_config(TrainConfig, entries[TrainConfig]),
        match[2],
        int(match[1]),
        num_tokens=_number(own, "tokens"),
        context=int(_number(own, "context")),
        typed=frozenset(typed),
    )


def _number(own: Mapping[str, str], key: str) -> float:
    try:
        value = float(own[key])
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(
            f"{key} must be a number of tokens, got {own[key]}; set {key}={OWN_KEYS[key]}."
        )
    return value


def make_plan(setup: Setup) -> Plan:
    """Every figure, section by section; `setup.training.head` takes what the release says of it."""
    device = torch.device("cuda")  # nothing is put there
    dtype = resolve_dtype(setup.evaluation.model.dtype, device)
    whole = sizes_only(setup.evaluation.model, dtype=dtype)
    origin = _adopt_release(setup, whole)
    heads = trained = planned_heads(whole.target, head=setup.training.head)
    if setup.training.trainer.precision != "auto":
        precision = resolve_dtype(setup.training.trainer.precision, device)
        sizes = sizes_only(setup.evaluation.model, dtype=precision)
        trained = planned_heads(sizes.target, head=setup.training.head)
    place = f"{setup.num_gpus}x{setup.kind}"
    return {
        "model": _model_lines(setup, heads, origin=origin, source=whole.source),
        f"weights, {dtype}".replace("torch.", ""): [*_weight_lines(heads)],
        f"decoding on {place}, each GPU": [*_decode_lines(setup, dtype)],
        f"a decode step on {place}": [*_step_lines(setup, dtype)],
        f"head training on {place}, each GPU": [*_training_lines(setup, trained)],
        "hidden states on disk": [*_cache_lines(setup, trained)],
    }


def _adopt_release(setup: Setup, sizes: Sizes) -> str:
    """Take number and source of the release's own modules unless typed; says where N is from."""
    head, count = setup.training.head, sizes.num_published_modules
    is_typed = bool({"head", "head.num_mtp_modules"} & setup.typed)
    if is_typed or not count or head.init not in ("auto", "native"):
        return "head.num_mtp_modules"
    head.num_mtp_modules, head.init = count, "native"
    if "head.hidden_source" not in setup.typed:
        head.hidden_source = sizes.target.family.hidden_source
    return "the release's own"


def _model_lines(setup: Setup, heads: MTPHeads, *, origin: str, source: str) -> list[Line]:
    own, modules = (planned.num_parameters(part) / 1e6 for part in (heads.target.model, heads))
    return [
        Line("target", own, "M", f"parameters; {source}"),
        Line("MTP modules", modules, "M", f"N = {len(heads.mtp_modules)}, {origin}"),
        Line(f"memory of one {setup.kind}", setup.gpu.memory_gib, "GiB", "that torch can use"),
    ]


def _weight_lines(heads: MTPHeads) -> Iterator[Line]:
    parts = planned.weight_parts(heads.target) | {"MTP modules": num_bytes(heads)}
    for part, size in parts.items():
        tied = "; lm_head is the same" if part == "embedding" and "lm_head" not in parts else ""
        yield Line(part, size / GIB, "GiB", f"parameters of the built classes{tied}")


def _spec(setup: Setup, num_drafts: int) -> SpecSettings:
    return SpecSettings(num_drafts, setup.evaluation.spec.policy[0])


def _engine(setup: Setup, target: Target) -> EngineConfig:
    """The engine's memory; how it runs is another matter, and needs a device."""
    engine, most = setup.evaluation.engine, target.config.max_position_embeddings
    length = engine.max_model_len or min(_DEFAULT_LENGTH, most)
    off = ("cuda_graphs", "compile", "capture_mixed", "audit", "deterministic", "few_rows_kernel")
    plain = dict.fromkeys(off, False)
    return dataclasses.replace(engine, max_model_len=length, backend="auto", **plain)


def _decode_lines(setup: Setup, dtype: torch.dtype) -> Iterator[Line]:
    found: dict[int, DecodeMemory] = {}
    for count in setup.counts:
        try:
            sizes = sizes_only(setup.evaluation.model, dtype=dtype, num_ranks=count)
        except ConfigError as fault:
            yield Line(f"needed on each of {count}", None, "GiB", str(fault))
            continue
        spec = _spec(setup, setup.evaluation.spec.num_speculative_tokens)
        engine = _engine(setup, sizes.target)
        length = engine.max_model_len or _DEFAULT_LENGTH
        heads = planned_heads(sizes.target, head=setup.training.head)
        found[count] = planned.decode_memory(heads, spec=spec, engine=engine, max_model_len=length)
        if count == setup.num_gpus:
            requests = f"{engine.max_num_requests} requests of {length:,} tokens"
            yield from _decode_parts(setup, found[count], requests=requests)
    yield from (_verdict(setup, count, one.needed) for count, one in found.items())
    own = found.get(setup.num_gpus)
    if own is not None and own.needed > setup.memory:
        yield from _decode_fixes(setup, own, found)


def _decode_parts(setup: Setup, own: DecodeMemory, *, requests: str) -> Iterator[Line]:
    plan, how = setup.tp_plan, "whole"
    if setup.num_gpus > 1:
        how = f"{'experts ' * (plan == DATA)}split by model.tp_plan={plan}"
    yield Line("target", own.weights / GIB, "GiB", how)
    yield Line("MTP modules", own.modules / GIB, "GiB", how)
    if own.states:
        yield Line("recurrent states", own.states / GIB, "GiB", "the engine's own, of all requests")
    pool = f"{requests}: {own.num_blocks:,} blocks, the engine's own count"
    yield Line("KV pool", own.pool / GIB, "GiB", pool)
    rest, note = own.needed - own.fixed - own.pool, "what captured graphs take was not measured"
    yield Line("left to activations and graphs", rest / GIB, "GiB", note)
    yield Line("requests that fit", own.num_requests(setup.memory), "", "at their longest")


def _verdict(setup: Setup, count: int, needed: float) -> Line:
    word, left = ("fits", "free") if needed <= setup.memory else ("does not fit", "missing")
    rests_on = f"{word}: {abs(setup.memory - needed) / GIB:,.1f} GiB {left}"
    return Line(f"needed on each of {count}", needed / GIB, "GiB", rests_on)


def _decode_fixes(
    setup: Setup, own: DecodeMemory, found: Mapping[int, DecodeMemory]
) -> Iterator[Line]:
    enough = next((count for count, one in found.items() if one.needed <= setup.memory), None)
    if enough is not None:
        yield Line("would fit: GPUs", enough, "", f"gpus={enough}x{setup.kind}")
    if (count := own.num_requests(setup.memory)) > 0:
        fix = f"engine.max_num_requests={count}: the others wait"
        yield Line("would fit: requests at a time", count, "", fix)
    whole = found.get(1)  # on several GPUs such weights are refused
    halved = math.inf if whole is None else whole.needed - whole.weights / 2
    if halved <= setup.memory and not setup.evaluation.model.keep_fp8:
        note = "about; model.keep_fp8=true with a checkpoint that is stored as FP8, on one GPU"
        yield Line("would fit: FP8 weights", halved / GIB, "GiB", note)


def _step_lines(setup: Setup, dtype: torch.dtype) -> Iterator[Line]:
    if setup.num_gpus > 1 and setup.tp_plan != "tensor":
        yield Line("step", None, "ms", f"not planned for model.tp_plan={setup.tp_plan}")
        return
    try:
        sizes = sizes_only(setup.evaluation.model, dtype=dtype, num_ranks=setup.num_gpus)
    except ConfigError as fault:
        yield Line("step", None, "ms", str(fault))
        return
    heads, drafts = (
        planned_heads(sizes.target, head=setup.training.head),
        setup.evaluation.spec.num_speculative_tokens,
    )
    for batch in BATCHES:
        for num_drafts in dict.fromkeys((0, drafts)):
            yield from _step(setup, sizes, heads, batch=batch, num_drafts=num_drafts)


def _step(
    setup: Setup, sizes: Sizes, heads: MTPHeads, *, batch: int, num_drafts: int
) -> Iterator[Line]:
    name, gpu, target = f"batch {batch}, K = {num_drafts}: ", setup.gpu, sizes.target
    spec, engine = _spec(setup, num_drafts), _engine(setup, target)
    limit = planned.step_limit(
        heads, gpu=gpu, batch=batch, context=setup.context, spec=spec, engine=engine
    )
    rate, unique = f"{gpu.copy_tb_per_s or gpu.peak_tb_per_s} TB/s", limit.unique_experts
    rate += " as copied" if gpu.copy_tb_per_s else ", the vendor's figure"
    experts = "" if unique is None else f", {unique:.1f} experts a layer if drawn evenly"
    rests_on = f"{limit.gigabytes:.2f} GB read{experts}, at {rate}"
    yield Line(f"{name}limit", limit.limit_ms, "ms", rests_on)
    case = {"batch": batch, "num_drafts": num_drafts, "limit_ms": limit.limit_ms}
    row, link_ms, note, count = planned.nearest_step(target, **case), 0.0, "", setup.num_gpus
    expected = limit.limit_ms / row.share
    if count > 1:
        link_ms = planned.link_time_ms(heads, limit, gpu=gpu, num_gpus=count)
        sent = f"{num_sums(target.model)} sums of {limit.num_rows} rows, of drafts, best tokens"
        rests_on = f"{sent}, at the vendor's {gpu.link_gb_per_s:g} GB/s, without latency"
        yield Line(f"{name}link", link_ms, "ms", rests_on)
        on_two = planned.step_on_two(target, **case) if count == 2 else None
        if on_two is not None:
            row, note = on_two, " on two GPUs"
            expected = (limit.limit_ms + link_ms) / row.share
        else:
            expected += link_ms + planned.latency_ms(heads, num_drafts=num_drafts)
            note = f", and {1e3 * planned.SUM_MS:.1f} us a sum as two GPUs take; not measured"
    rests_on = f"share {row.share:.3f} of {row.shape}, batch {row.batch}, K = {row.num_drafts}"
    if gpu.copy_tb_per_s is None or target.dtype != torch.bfloat16:
        expected, rests_on, note = None, "shares were measured on an H200 in bfloat16 only", ""
    yield Line(f"{name}step", expected, "ms", rests_on + note)


def _training_lines(setup: Setup, heads: MTPHeads) -> Iterator[Line]:
    config = setup.training
    own = memory_of(config, heads, num_gpus=setup.num_gpus)
    row = planned.measured_training(config.trainer.compile)
    tokens = config.trainer.batch_size * config.data.seq_len
    notes = {
        "target": "frozen"
        + ("; its layers are not loaded" if needs_layers(config) is None else ""),
        "weights": "MTP modules",
        "gradients": "of backward, and in float32",
        "optimizer": "float32 masters and two moments",
        "gathered": "whole for a while, of what GPUs share; by the libraries' code, not measured",
        "activations": f"{tokens:,} tokens x {depths_of(config)} depths, as {row.shape}'s peak had",
    }
    for part, size in own._asdict().items():
        yield Line(part, size / GIB, "GiB", notes[part])
    for count in setup.counts:
        yield _verdict(setup, count, memory_of(config, heads, num_gpus=count).needed)
    if own.needed > setup.memory:
        ways = other_ways(config, heads, num_gpus=setup.num_gpus, memory=setup.memory)
        for words, count, needed in ways:
            yield Line("would fit", needed / GIB, "GiB", f"gpus={count}x{setup.kind} {words}")
    yield from _training_times(setup, heads)


def _training_times(setup: Setup, heads: MTPHeads) -> Iterator[Line]:
    config, gpu, count = setup.training, setup.gpu, setup.num_gpus
    trainer, seq_len = config.trainer, config.data.seq_len
    parts = flops_per_token(
        heads,
        seq_len=seq_len,
        num_depths=depths_of(config),
        has_teacher=has_teacher(config.objective.loss),
        runs_target=needs_layers(config) is not None,
    )
    tokens = trainer.batch_size * trainer.gradient_accumulation_steps * seq_len
    tflop = sum(parts.values()) * tokens / 1e12
    shares = (f"{name} {value * tokens / tflop / 1e12:.0%}" for name, value in parts.items())
    rests_on = f"{tokens:,} tokens a GPU: {', '.join(shares)}"
    yield Line("operations of a step", tflop, "TFLOP", rests_on)
    if gpu.product_tflops is None or heads.target.dtype != torch.bfloat16:
        yield Line("step", None, "ms", "rates were measured on an H200 in bfloat16 only")
        return
    row = planned.nearest_training(is_compiled=trainer.compile, tflop=tflop)
    seconds = tflop / (row.mfu * gpu.product_tflops)
    if trainer.shard_target and count > 1 and needs_layers(config) is not None:
        received = planned.received_bytes(heads, trainer, num_gpus=count) / 1e9
        received *= trainer.gradient_accumulation_steps
        seconds += received / planned.RECEIVED_GB_PER_S
        note = f", and {received:.1f} GB received at {planned.RECEIVED_GB_PER_S:g} GB/s"
        note += " as GLM-4.5-Air split over two" + (count > 2) * ": not measured on more"
    else:
        gain, note = planned.speedup(trainer.parallel, count)
        seconds *= count / gain
    how = "compiled" if trainer.compile else "not compiled"
    rests_on = f"{row.mfu:.1%} of {gpu.product_tflops:g} TFLOP/s, as {row.shape}, {how}{note}"
    yield Line("step", seconds * 1e3, "ms", rests_on)
    hours = seconds * setup.num_tokens / (tokens * count) / 3600
    yield Line(f"{setup.num_tokens:,.0f} tokens", hours, "h", "steps alone, no evaluation")


def _cache_lines(setup: Setup, heads: MTPHeads) -> Iterator[Line]:
    source, width = setup.training.head.hidden_source, heads.target.config.hidden_size
    size = cached_bytes_per_token(width, dtype=heads.target.dtype, hidden_source=source)
    yield Line("a token", size, "bytes", f"as task=cache writes them, {source}")
    total = size * setup.num_tokens / GIB
    yield Line(f"{setup.num_tokens:,.0f} tokens", total, "GiB", "and the padding of packed rows")


def as_table(plan: Plan) -> str:
    """The plan for people."""
    lines = []
    for section, found in plan.items():
        lines += ["", section]
        for line in found:
            figure = "-" if line.figure is None else _figure(line.figure)
            lines.append(f"  {line.name:<32} {figure:>10} {line.unit:<6} {line.rests_on}")
    return "\n".join(lines[1:])


def _figure(value: float) -> str:
    if value == int(value) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{2 if value >= 1 else 4}f}"
