"""The sections of a page for the two studies that are no `results.json`: seed matrix, fault prices.

Every number is computed from the counters of `matrix.json` and `fault_price.json`, by the modules
that wrote them; figures that the files hold must be the same. Letters: K drafts per step, N MTP
modules.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mtp_research.evaluation.entries import machine_of
from mtp_research.evaluation.fault_table import (
    PriceRow,
    price_grids,
    price_rows,
    read_checked_study,
)
from mtp_research.evaluation.figures import PROMPT_INTERVAL, UNDEFINED_FIGURE, Figure, Missing
from mtp_research.evaluation.runs import mapping
from mtp_research.evaluation.sections import Section, command_of, record_facts
from mtp_research.evaluation.seed_charts import matrix_figures
from mtp_research.evaluation.seed_figures import read_checked_matrix
from mtp_research.evaluation.seed_tables import (
    matrix_grids,
    matrix_warnings,
    prompts_by_domain,
    verdict,
)
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS, Estimate
from mtp_research.evaluation.stats.fault_study import study_warnings
from mtp_research.evaluation.stats.fault_study import verdict as fault_verdict
from mtp_research.evaluation.stats.matrix_seeds import SeedMatrix, column_name, row_name
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.evaluation.svg import Axes, Series, interval_chart
from mtp_research.evaluation.words import FAULT_WORDS, HEAD_WORDS, LETTERS, POLICY_WORDS

_PERCENT = f"{100 * LEVEL:.0f} %"
_LENGTH_NOTES = (
    f"acceptance length (micro) = {FORMULAS['acceptance_length_micro']}",
    FORMULAS["acceptance_rate_per_position"],
    ACCEPTED_WARNING,
)
_SEED_NOTES = (
    f"[low, high] over training seeds = {_PERCENT} two-level bootstrap, {NUM_DRAWS} draws: as "
    "many seeds and as many prompts as there are, each with replacement, every drawn seed over the "
    "drawn prompts; the value is the mean over seeds. Few seeds are few: read it beside the seeds' "
    "own values.",
    "A difference takes the same drawn seeds and prompts on both sides.",
    "The match of heads (*) is the policy that shows them in decoding what training showed them.",
)
_RERUN_NOTE = "if rerun: the length if the rows of rejected drafts were rerun, by the replay walk."
_PRICE_NOTES = (
    "share of WRONG, MIXED, HOLE = slots with that fault / all slots <= p of all draft layers, "
    "prompt included, in percent",
    "clean form = the same procedure without the fault; lost = its acceptance length - the "
    "policy's, same prompts; lost per 1 % = lost / share of WRONG + MIXED + HOLE",
    "price by kind = least squares without intercept over a head's rows, lost = sum over kinds of "
    "price x share; it takes prices to add up, which nothing here proves",
    f"[low, high] of a price = {_PERCENT} cluster bootstrap over prompts, {NUM_DRAWS} draws, one "
    "training seed; shares count as known",
)
_PRICE_NOTE = (
    "Tokens per round that a policy loses against its clean form, same prompts; below 0 it is "
    f"ahead. Whiskers: {PROMPT_INTERVAL}"
)


def matrix_section(folder: Path, *, name: str) -> Section:
    """The policy matrix over training seeds in `folder`.

    Raises:
        IntegrityError: see `read_checked_matrix`.
    """
    matrix = read_checked_matrix(folder)
    done = matrix.done_seeds
    return Section(
        name=name,
        title=f"{name}: heads by training unroll and seed, under each decode policy",
        figures=matrix_figures(matrix),
        grids=matrix_grids(matrix) if done else [],
        caption=f"{len(done)} of {len(matrix.seeds)} training seeds, "
        f"{matrix.settings.get('dtype')}, {machine_of(matrix.run)}",
        command=command_of(matrix.run),
        facts=record_facts(matrix.run) | _matrix_facts(matrix),
        warnings=[f"warning: {text}" for text in matrix_warnings(matrix)],
        notes=[
            *(LETTERS, HEAD_WORDS, POLICY_WORDS),
            *_LENGTH_NOTES,
            *_SEED_NOTES,
            *([_RERUN_NOTE] if any(cell.clean_per_round for cell in matrix.cells) else []),
        ],
        empty=[
            f"{name}: {row_name(cell.key)} seed {cell.seed} under {column_name(cell.key)}"
            for cell in matrix.cells
            if not any(cell.accepted_per_round)
        ],
    )


def fault_section(folder: Path, *, name: str) -> Section:
    """The price of faulty draft slots in `folder`.

    Raises:
        IntegrityError: see `read_checked_study`.
    """
    study = read_checked_study(folder)
    rows, drafts = price_rows(study), {c.num_speculative_tokens for c in study.conditions}
    facts = {
        "joined from": "; ".join(map(_part_words, study.parts)),
        "target": _listed(dict.fromkeys(map(_model_words, study.parts or [study.run]))),
        "heads": _listed(head.get("name") for head in study.heads),
        "drafts K": _listed(sorted(drafts)),
        "prompts": str(len(study.prompts)),
        "new tokens": f"at most {study.max_new_tokens} a prompt",
        "sampling": "greedy",
        "dtype, seed": f"{study.dtype}, {study.seed}",
        "conditions": f"{len(study.conditions)} of {study.num_asked}",
        "lossless": fault_verdict(study),
    }
    return Section(
        name=name,
        title=f"{name}: what faulty draft slots cost",
        figures=[_lost(rows)],
        grids=price_grids(study),
        caption=f"n = {len(study.prompts)} prompts, {study.dtype}, {machine_of(study.run)}",
        command=command_of(study.run),
        facts=record_facts(study.run) | _known(facts),
        warnings=[f"warning: {text}" for text in study_warnings(study)],
        notes=[LETTERS, HEAD_WORDS, POLICY_WORDS, FAULT_WORDS, *_LENGTH_NOTES, *_PRICE_NOTES],
        prompts=study.prompts,
        empty=[
            f"{name}: {c.head} K={c.num_speculative_tokens} {c.policy}"
            for c in study.conditions
            if not any(c.accepted_per_round)
        ],
    )


def _matrix_facts(matrix: SeedMatrix) -> dict[str, str]:
    """What was trained and decoded."""
    config = mapping(matrix.settings, "config")
    model, trainer, asked = (mapping(config, key) for key in ("model", "trainer", "matrix"))
    most, domains = asked.get("max_new_tokens"), prompts_by_domain(matrix)
    facts = {
        "target": " ".join(str(model.get(key) or "") for key in ("name", "path")).strip(),
        "drafts K": _listed(sorted({cell.num_speculative_tokens for cell in matrix.cells})),
        "prompts": f"{len(matrix.prompts)}: "
        + ", ".join(f"{count} {domain}" for domain, count in domains.items()),
        "new tokens": f"at most {most} a prompt" if most else "",
        "sampling": "greedy",
        "training": _pairs(trainer, ("max_steps", "batch_size", "learning_rate")),
        "training data": " ".join(
            str(mapping(config, "data").get(k) or "") for k in ("name", "path")
        ),
        "dtype": f"decoded in {matrix.settings.get('dtype')}, trained in {model.get('dtype')}",
        "seeds": ", ".join(map(str, matrix.done_seeds)),
        "lossless": verdict(matrix),
    }
    return _known(facts)


def _model_words(record: Mapping[str, object]) -> str:
    """The target as the command names it: a price study keeps no configuration."""
    argv = record.get("argv")
    words = [str(word) for word in argv] if isinstance(argv, list) else []
    return " ".join(word for word in words if word.startswith(("model=", "model.path=")))


def _part_words(record: Mapping[str, object]) -> str:
    """Command, start and seconds of decoding of a part that a study was joined from."""
    spent = record.get("seconds")
    words = [str(record.get("started_at") or ""), "" if spent is None else f"{spent} s"]
    known = ", ".join(filter(None, words))
    return f"{command_of(record)} ({known})" if known else command_of(record)


def _known(facts: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if value.strip()}


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _pairs(values: Mapping[str, object], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {values[name]}" for name in names if name in values)


def _lost(rows: Sequence[PriceRow]) -> Figure | Missing:
    title = "Acceptance length lost to faulty slots"
    priced = [row for row in rows if row.lost is not None]
    if not priced:
        return Missing(title, "no policy was decoded beside its clean form")
    policies = list(dict.fromkeys(row.condition.policy for row in priced))
    by_head: dict[str, dict[str, Estimate]] = {}
    for row in priced:
        head = f"{row.condition.head} K={row.condition.num_speculative_tokens}"
        by_head.setdefault(head, {})[row.condition.policy] = row.lost or UNDEFINED_FIGURE
    series = [
        Series(head, tuple(found.get(policy, UNDEFINED_FIGURE) for policy in policies))
        for head, found in by_head.items()
    ]
    axes = Axes("policy", "tokens per round lost", tuple(policies))
    least = min((figure.low or 0.0 for one in series for figure in one.points), default=0.0)
    floor = min(0.0, math.floor(10 * least) / 10)
    markup = interval_chart(series, axes=axes, floor=floor, is_connected=False)
    return Figure(title, markup, _PRICE_NOTE)
