"""`mtp export`: heads in published names, and what an engine makes of them.

    mtp export --model FOLDER --head RUN/head --out NEW_FOLDER
    mtp export ... --for vllm [--prompts FILE] [--k 3] [--max-prompts 32]
    mtp export ... --alone

`--for` names the engine that is to load the checkpoint. A table says which conventions it runs the
head with, and what each one costs: measured by our loop on the head itself, before it is written.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from mtp_research.config.ranges import in_own_words
from mtp_research.config.schema import VERSIONS
from mtp_research.decode.settings import SpecSettings
from mtp_research.evaluation.backends.transformers_backend import library_steps
from mtp_research.evaluation.run.engine_effect import DecodeTask, Effects, measure_effects
from mtp_research.evaluation.run.prompts import encode_prompts, load_prompts
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.heads.engines import (
    ENGINES,
    Engine,
    HeadRun,
    differences,
    engine_for,
    trained_run,
)
from mtp_research.heads.export import LM_HEAD, export_heads, stitch_heads
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.loading.gguf import unpacked
from mtp_research.models.target import Target, load_target
from mtp_research.runtime.errors import ConfigError, EnvironmentFault, IntegrityError
from mtp_research.runtime.options import OptionParser, positive
from mtp_research.runtime.provenance import write_error

_HEADER = ("convention", "trained with", "engine does", "effect on acceptance length")
# What loaders and writers call it, by what this command does.
_OPTIONS = {
    "spec.head": "--head",
    "spec.k": "--k",
    "backend": "--for",
    "head.path": "--head",
    "model.path": "--model",
    "prompts.path": "--prompts",
    "prompts.max_prompts": "--max-prompts",
    "out must": "--out must",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parse(arguments)
    try:
        _run(options)
    except (ConfigError, IntegrityError, EnvironmentFault) as fault:
        write_error(in_own_words(str(fault), _OPTIONS))
        return fault.exit_code
    return 0


def comparison_table(
    trained: HeadRun, engine: HeadRun, effects: Effects | None, *, num_modules: int
) -> str:
    """Rows `convention | trained with | engine does | effect`; without `effects` none is measured.

    A row of one convention is what it costs alone; the last one is what all of them cost together.
    """
    differing = differences(trained, engine, num_modules=num_modules)
    rows: list[tuple[str, ...]] = [_HEADER]
    for item in fields(HeadRun):
        ours, theirs = getattr(trained, item.name), getattr(engine, item.name)
        if item.name in differing:
            effect = "not measured" if effects is None else _signed(effects.single[item.name])
        elif None in (ours, theirs):
            effect = "not known"
        else:
            effect = "none: the same" if ours == theirs else "none: one module"
        rows.append((item.name, _word(ours), _word(theirs), effect))
    if effects is not None:
        lengths = (_plain(effects.trained), _plain(effects.engine), _signed(effects.total))
        rows.append(("acceptance length", *lengths))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = [" | ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)) for row in rows]
    lines.insert(1, "-|-".join("-" * width for width in widths))
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _run(options: argparse.Namespace) -> None:
    if options.alone and options.engine is not None:
        raise ConfigError(
            f"--for must go with a whole checkpoint, got --for {options.engine} and --alone; leave "
            "one of them out."
        )
    target = load_target(options.model, dtype="float32", device=options.device)
    heads = load_heads(options.head, target)
    report = "" if options.engine is None else _engine_report(options, heads)
    source = Path(unpacked(str(options.model)))
    if options.alone:
        written = export_heads(heads, options.out, source=source)
    else:
        written = stitch_heads(heads, options.out, source=source, engine=options.engine)
    modules = [name for name in written.names if name != LM_HEAD]
    print(
        f"{written.folder}: {heads.spec.num_mtp_modules} MTP modules of family "
        f"{target.family_name}, {len(modules)} tensors, {modules[0]} ..."
    )
    if len(modules) < len(written.names):
        print(f"{LM_HEAD}: a copy of the embedding, tie_word_embeddings false")
    print(report, end="")


def _engine_report(options: argparse.Namespace, heads: MTPHeads) -> str:
    """What the engine does with the heads; refuses what it would refuse."""
    name, num_modules = options.engine, heads.spec.num_mtp_modules
    steps: list[str] = []
    if name == "transformers":
        steps = library_steps(heads.target, num_modules=num_modules)
    usual = num_modules if name == "transformers" else 3
    num_drafts = usual if options.k is None else options.k
    engine = engine_for(name, heads, num_drafts=num_drafts if _is_measured(options) else None)
    if engine is None:
        return (
            f"warning: {name} {VERSIONS[name]}: how it runs heads of family "
            f"{heads.target.family_name} is not recorded (mtp_research/heads/engines.py), nor "
            "whether it runs them at all; nothing is compared.\n"
        )
    trained, effects, measured = trained_run(heads), None, "not measured (--no-measure)"
    if _is_measured(options):
        prompts = _prompts(options, heads.target)
        spec = SpecSettings(num_speculative_tokens=num_drafts)
        task = DecodeTask(prompts, spec, options.max_new_tokens)
        effects = measure_effects(heads, trained=trained, engine=engine.run, task=task)
        measured = (
            f"measured by our loop: K = {num_drafts}, {len(prompts)} prompts, up to "
            f"{options.max_new_tokens} new tokens, greedy, float32; [95 % interval, paired]"
        )
    table = comparison_table(trained, engine.run, effects, num_modules=num_modules)
    return "\n".join((_title(name, engine), measured, table + "".join(f"{s}\n" for s in steps)))


def _title(name: str, engine: Engine) -> str:
    return f"\n{name} {VERSIONS[name]}, read in its source ({engine.source}), not run here"


def _is_measured(options: argparse.Namespace) -> bool:
    return not options.no_measure


def _prompts(options: argparse.Namespace, target: Target) -> list[tuple[int, ...]]:
    prompts = load_prompts(options.prompts, max_prompts=options.max_prompts)
    limit = target.config.max_position_embeddings
    return list(encode_prompts(prompts, target.tokenizer, max_model_len=limit).token_ids)  # type: ignore[arg-type]


def _word(value: object) -> str:
    if value is None:
        return "not known"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _plain(estimate: Estimate) -> str:
    return "-" if estimate.value is None else f"{estimate.value:.3f}"


def _signed(estimate: Estimate) -> str:
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "-"
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = OptionParser(
        prog="mtp export",
        description="Write heads in the tensor names of the target's family: links to the target's "
        "files and one new shard, in bfloat16 or the dtypes of the target's own modules.",
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the target in Hugging Face format")
    add("--head", type=Path, required=True, help="RUN/head that train.py wrote")
    add("--out", type=Path, required=True, help="new folder, missing or empty")
    add("--alone", action="store_true", help="write the modules without the target")
    add("--for", dest="engine", choices=sorted(ENGINES), help="the engine that is to load it")
    add("--no-measure", action="store_true", help="with --for: decode nothing")
    add("--prompts", help="with --for: prompt file or set; default: the shipped prompts")
    add("--k", type=positive, help="drafts per step that are compared, default 3")
    add("--max-prompts", type=positive, default=32, help="default 32")
    add("--max-new-tokens", type=positive, default=64, help="default 64")
    add("--device", default="cpu", help="where it is measured, default cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
