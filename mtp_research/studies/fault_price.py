"""What the slots that unclean policies leave behind cost: each against its own clean form.

    python eval.py experiment=fault_price             K = 3 and 5, three shipped heads
    mtp tables fault results/fault_price      the table again, from JSON

An unclean policy loses acceptance for two reasons: it feeds the modules other vectors than they
were trained on, and it leaves stale, mixed or missing slots behind. Only the second is a fault. So
the reference is not the head's best policy but the same procedure without the fault:

    training_norefresh -> training       eagle_norefresh, window -> eagle
    target_roll -> target_roll_rerun: target_roll that reruns the last K rows, as `training` does

Greedy decoding, so that all conditions write the same text and the slots compared hold the same
tokens; the tables say where rounding (bfloat16) made a text differ.
Letters: K drafts per step, N MTP modules.
"""

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

from mtp_research.config.ranges import schema_keys
from mtp_research.config.rules import expand
from mtp_research.config.schema import EngineConfig, EvalConfig
from mtp_research.decode.decoder import SpecDecoder
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.settings import SpecSettings
from mtp_research.decode.stats import RequestRecord
from mtp_research.evaluation.report.wandb_log import ReportRun, publish
from mtp_research.evaluation.run.conditions import head_names
from mtp_research.evaluation.run.decoders import check_backend, head_facts
from mtp_research.evaluation.run.prompts import (
    ChatTokenizer,
    EncodedPrompts,
    encode_prompts,
    first_turns,
    load_prompts,
)
from mtp_research.evaluation.stats.fault_study import (
    STUDY_FILE,
    UNFINISHED,
    FaultCondition,
    FaultStudy,
    read_study,
)
from mtp_research.evaluation.stats.statistics import FINISHED
from mtp_research.heads.stack import MTPHeads
from mtp_research.heads.weights import load_heads
from mtp_research.models.target import Target, load_target, load_tokenizer, target_hashes
from mtp_research.policy.fields import POLICIES, HiddenPolicy
from mtp_research.runtime.errors import ConfigError, IntegrityError, stopped_by_signals
from mtp_research.runtime.progress import WorkProgress
from mtp_research.runtime.provenance import run_record
from mtp_research.studies.study_tables import price_markdown, price_rows, write_study

if TYPE_CHECKING:
    from mtp_research.evaluation.report.page import Section

RERUN_ROLL = dataclasses.replace(
    POLICIES["target_roll"], name="target_roll_rerun", rows="anchored", clean=True, seen_in="none"
)
_NUM_DIGITS = 16  # of a text's hash
CLEAN_FORM: dict[str, HiddenPolicy] = {
    "training_norefresh": POLICIES["training"],
    "eagle_norefresh": POLICIES["eagle"],
    "window": POLICIES["eagle"],
    "target_roll": RERUN_ROLL,
}
# What a study reads: these sections but for some keys, and these keys. All else keeps its default.
_READ_SECTIONS = ("model", "engine", "prompts", "logger", "seed", "output_dir", "task")
_NOT_READ = ("model.tp_plan", "prompts.score", "prompts.run_code")
_READ_KEYS = {  # `spec.verify` is checked on its own
    *("spec.policy", "spec.head", "spec.num_speculative_tokens", "spec.verify"),
    *("grid.head", "grid.num_speculative_tokens"),
    *("sampling.temperature", "sampling.max_new_tokens"),
}
_FIXED_KEYS = {"engine.audit": True, "engine.audit_every": 1}  # every slot is looked at


@dataclass(frozen=True)
class _Asked:
    """What every condition decodes, and on what."""

    target: Target
    encoded: EncodedPrompts
    sampling: SamplingParams
    engine: EngineConfig


def price_faults(
    config: EvalConfig, output_dir: Path, *, on_start: Callable[[], object] | None = None
) -> dict[str, object]:
    """Decode all conditions, print the tables and write `fault_price.json` after each.

    A run that was stopped goes on with what `output_dir` holds; `on_start` is called when that is
    known to be no study of other settings. Returns what the last line shows:
    numbers of prompts and conditions, and where the results are.
    """
    cells = expand(config).cells
    pairs = [(cell.spec.head, cell.spec.num_speculative_tokens) for cell in cells]
    check_asked(config, pairs)
    target = load_target(
        config.model.path,
        dtype=config.model.dtype,
        device=config.model.device,
        device_map=config.model.device_map,
        experts=config.model.experts,
        weights=config.model.weights_form,
    )
    check_backend(config.engine.backend, target.device)
    asked = _ask(config, target)
    names = {head: name for head, name in head_names(cells).items() if head and name}
    num_conditions = len(pairs) * len(policies_of(config.spec.policy))
    study = _start(config, asked, names=names, num_conditions=num_conditions, output_dir=output_dir)
    if on_start is not None:
        on_start()
    with ReportRun(config.logger) as wandb_run:
        wandb_run.open(output_dir, config=dataclasses.asdict(config), job_type="study")
        done = len(study.conditions)
        progress = WorkProgress("pricing", total=num_conditions, unit="conditions", first=done)
        with progress, _resumable(output_dir):
            for head, num_drafts in pairs:
                heads, name = load_heads(str(head), target), names[str(head)]
                for policy in policies_of(config.spec.policy):
                    study = _measure(
                        study, asked, heads, name=name, policy=policy, num_drafts=num_drafts
                    )
                    write_study(output_dir, study)
                    progress.done(len(study.conditions), note=f"{name} {policy.name}")
        sys.stdout.write(price_markdown(study) + "\n")
        publish(
            lambda: _sections(output_dir),
            results=output_dir / STUDY_FILE,
            run=wandb_run,
            scalars=study_scalars(study),
        )
    require_outputs(study, output_dir)
    return {
        "num_prompts": len(study.prompts),
        "num_conditions": len(study.conditions),
        "results": str(output_dir / STUDY_FILE),
    }


@contextmanager
def _resumable(output_dir: Path) -> Iterator[None]:
    """Say of a stop that the conditions so far are kept."""
    goes_on = f"the same command with output_dir={output_dir} goes on with the next condition."
    with stopped_by_signals(goes_on):
        yield


def _sections(output_dir: Path) -> "list[Section]":
    """Of the page; its libraries are needed only where it is sent."""
    from mtp_research.studies.study_pages import fault_section

    return [fault_section(output_dir, name=output_dir.name)]


def policies_of(names: Sequence[str]) -> list[HiddenPolicy]:
    """The policies asked for and the clean forms of the unclean ones, clean ones first."""
    asked = [POLICIES[name] for name in names]
    lacking = [one.name for one in asked if not one.clean and one.name not in CLEAN_FORM]
    if lacking:
        raise ConfigError(
            f"spec.policy must have a clean form to be priced against, got {', '.join(lacking)}; "
            "add the form to CLEAN_FORM of mtp_research/studies/fault_price.py."
        )
    forms = [CLEAN_FORM[policy.name] for policy in asked if not policy.clean]
    found = {policy.name: policy for policy in [*asked, *forms]}
    return sorted(found.values(), key=lambda policy: not policy.clean)


def _ask(config: EvalConfig, target: Target) -> _Asked:
    tokenizer = cast(ChatTokenizer, load_tokenizer(config.model.path))  # fields set at run time
    prompts = load_prompts(
        config.prompts.path,
        domains=config.prompts.domains,
        max_prompts=config.prompts.max_prompts,
        seed=config.seed,
    )
    limit = config.engine.max_model_len or target.config.max_position_embeddings
    encoded = encode_prompts(
        first_turns(prompts),
        tokenizer,
        max_model_len=limit,
        thinking=config.prompts.thinking,
        thinking_markers=config.prompts.thinking_markers,
    )
    longest = min(limit, encoded.longest_text(config.sampling.max_new_tokens))
    engine = dataclasses.replace(config.engine, audit=True, audit_every=1, max_model_len=longest)
    sampling = SamplingParams(
        max_new_tokens=config.sampling.max_new_tokens, stop_token_ids=target.stop_token_ids
    )
    return _Asked(target, encoded, sampling, engine)


def _start(
    config: EvalConfig,
    asked: _Asked,
    *,
    names: Mapping[str, str],
    num_conditions: int,
    output_dir: Path,
) -> FaultStudy:
    study = FaultStudy(
        heads=tuple((head_facts(head) or {}) | {"name": name} for head, name in names.items()),
        prompts=asked.encoded.entries,
        conditions=(),
        dtype=str(asked.target.dtype).removeprefix("torch."),
        max_new_tokens=asked.sampling.max_new_tokens,
        seed=config.seed,
        run=run_record()
        | {"num_conditions": num_conditions, "seconds": 0.0, "target": target_hashes(asked.target)},
    )
    if not (output_dir / STUDY_FILE).is_file():
        return study
    stored = read_study(output_dir)
    if stored.parts:
        fix = "was joined from parts; finish those and join them again."
        raise IntegrityError(f"{output_dir / STUDY_FILE} {fix}")
    if dataclasses.replace(stored, conditions=(), run=study.run) != study:
        fix = "holds other heads, prompts or settings; set another output_dir."
        raise IntegrityError(f"{output_dir / STUDY_FILE} {fix}")
    return stored


def _measure(
    study: FaultStudy,
    asked: _Asked,
    heads: MTPHeads,
    *,
    name: str,
    policy: HiddenPolicy,
    num_drafts: int,
) -> FaultStudy:
    if (name, num_drafts, policy.name) in {condition.key for condition in study.conditions}:
        return study
    began = time.perf_counter()
    spec = SpecSettings(policy=policy, num_speculative_tokens=num_drafts, verify="greedy")
    decoder = SpecDecoder(asked.target, heads, spec=spec, engine=asked.engine)
    found = decoder.generate(asked.encoded.token_ids, sampling=asked.sampling)
    records = sorted(found, key=lambda record: int(record.request_id))
    made = FaultCondition(
        head=name,
        num_mtp_modules=heads.spec.num_mtp_modules,
        num_speculative_tokens=num_drafts,
        policy=policy.name,
        reference=None if policy.clean else CLEAN_FORM[policy.name].name,
        audit=dict(decoder.stats.audit or {}),
        # What a non-finite target left behind is no measurement; the prompt keeps its place.
        accepted_per_round=tuple(
            one.num_accepted_per_round if one.finish_reason in FINISHED else () for one in records
        ),
        text_sha256=tuple(map(_text_hash, records)),
    )
    record, spent = dict(study.run), study.run.get("seconds")
    if isinstance(spent, float):  # a study begun before it was kept has none
        record["seconds"] = round(spent + time.perf_counter() - began, 3)
    return dataclasses.replace(study, conditions=(*study.conditions, made), run=record)


def _text_hash(record: RequestRecord) -> str:
    digest = hashlib.sha256(json.dumps(list(record.output_token_ids)).encode()).hexdigest()
    return digest[:_NUM_DIGITS] if record.finish_reason in FINISHED else UNFINISHED


def check_asked(config: EvalConfig, pairs: Sequence[tuple[str | None, int]]) -> None:
    """Refuse what a study cannot measure, before anything is loaded."""
    if all(POLICIES[policy].clean for policy in config.spec.policy):
        raise ConfigError(
            f"spec.policy must name an unclean policy, got {config.spec.policy}; "
            f"set spec.policy=[{','.join(CLEAN_FORM)}]."
        )
    if config.sampling.temperature > 0:
        raise ConfigError(
            f"sampling.temperature must be 0 for task=fault_price, got "
            f"{config.sampling.temperature}; set sampling=greedy."
        )
    if config.spec.verify not in ("auto", "greedy"):
        raise ConfigError(
            f"spec.verify must be greedy for task=fault_price, got {config.spec.verify}; "
            "set spec.verify=greedy."
        )
    _check_read(config)
    for head, num_drafts in pairs:
        if head in (None, "oracle") or num_drafts == 0:
            raise ConfigError(
                f"spec.head and spec.k must be trained heads and at least 1 for task=fault_price, "
                f"got {head} and {num_drafts}; set spec.head=PATH spec.k=3."
            )


def require_outputs(study: FaultStudy, output_dir: Path) -> None:
    """Say which prompts are in no figure; refuse a study with a condition that has none."""
    empty = []
    for one in study.conditions:
        label = "{} K={} {}".format(*one.key)
        num_unfinished = one.text_sha256.count(UNFINISHED)
        if num_unfinished == len(one.text_sha256):
            empty.append(label)
        elif num_unfinished:
            sys.stderr.write(
                f"warning: {num_unfinished} of {len(one.text_sha256)} prompts did not finish under "
                f"{label} and are in none of its lengths\n"
            )
    if empty:
        raise IntegrityError(
            f"expected finished generations, got none for {', '.join(empty)}: the target's logits "
            f"are not finite; check model.path and model.dtype. Results: {output_dir}"
        )


def study_scalars(study: FaultStudy) -> dict[str, float | str]:
    """Acceptance length and loss of every condition, for the summary of a W&B run."""
    scalars: dict[str, float | str] = {}
    for row in price_rows(study):
        label = "{} K={} {}".format(*row.condition.key)
        found = {"acceptance_length": row.length, "lost": row.lost}
        for name, figure in found.items():
            if figure is not None and figure.value is not None:
                scalars[f"{label}/{name}"] = figure.value
    return scalars


def _check_read(config: EvalConfig) -> None:
    """A key that a study ignores is a fault, not a silent no-op; one line a key."""
    faults = []
    for key, item in schema_keys(EvalConfig).items():
        is_read = key in _READ_KEYS or key.split(".")[0] in _READ_SECTIONS
        if is_read and key not in _NOT_READ and key not in _FIXED_KEYS:
            continue
        default = item.default
        if item.default_factory is not dataclasses.MISSING:
            default = item.default_factory()
        expected = _FIXED_KEYS.get(key, default)
        if (value := attrgetter(key)(config)) != expected:
            typed = json.dumps(expected).strip('"')
            faults.append(
                f"{key} must be {typed} for task=fault_price, got {value}; set {key}={typed}."
            )
    if faults:
        raise ConfigError("\n".join(faults))
