"""The sections of a page that are no `results.json`: seed matrix, fault prices, a training run.

Every number is computed from the counters of `matrix.json` and `fault_price.json`, and must equal
those that the files hold; curves are those of `metrics.jsonl`. Letters: K drafts per step, N MTP
modules.
"""

# pandas ships no stubs, so that a selection of rows is taken for a Series, a DataFrame or an array.
# pyright: reportArgumentType=false

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from mtp_research.evaluation.report import page
from mtp_research.evaluation.report.charts import (
    MAX_SERIES,
    Chart,
    Missing,
    curves,
    heat_map,
    interval_chart,
)
from mtp_research.evaluation.report.comparable import machine_of
from mtp_research.evaluation.report.frame import ALL, LENGTH, Row, estimate_of, make_frame, row_of
from mtp_research.evaluation.report.notes import (
    FAULT_WORDS,
    HEAD_WORDS,
    LETTERS,
    POLICY_WORDS,
    interval,
)
from mtp_research.evaluation.report.run_charts import (
    FRAMED,
    PROMPT_INTERVAL,
    TOKENS_PER_ROUND,
    position_charts,
)
from mtp_research.evaluation.report.stored import mapping
from mtp_research.evaluation.stats.bootstrap import LEVEL, NUM_DRAWS, Estimate
from mtp_research.evaluation.stats.fault_study import FAULTS, FaultStudy, study_warnings
from mtp_research.evaluation.stats.fault_study import verdict as fault_verdict
from mtp_research.evaluation.stats.matrix_seeds import (
    GroupKey,
    MatchPair,
    SeedMatrix,
    column_name,
    group_figures,
    match_pairs,
    row_name,
)
from mtp_research.evaluation.stats.statistics import ACCEPTED_WARNING, FORMULAS
from mtp_research.runtime.errors import IntegrityError
from mtp_research.studies import study_tables

_PERCENT = f"{100 * LEVEL:.0f} %"
_INTERVAL = f"{_PERCENT} two-level bootstrap over seeds and prompts."
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
_WALK_NOTE = (
    "replay walk = the greedy loop replayed on held-out text: its length is the loop's acceptance "
    "length (micro) on that text, [low, high] = value +- 1.96 standard errors over documents"
)


def matrix_section(folder: Path, *, name: str) -> page.Section:
    """The policy matrix over training seeds in `folder`."""
    matrix = study_tables.read_checked_matrix(folder)
    done = matrix.done_seeds
    frame = make_frame(list(_matrix_rows(matrix, name)))
    return page.Section(
        name=name,
        title=f"{name}: heads by training unroll and seed, under each decode policy",
        charts=_matrix_charts(matrix, frame),
        grids=study_tables.matrix_grids(matrix) if done else [],
        frame=frame,
        headline=_matrix_headline(matrix),
        caption=f"{len(done)} of {len(matrix.seeds)} training seeds, "
        f"{matrix.settings.get('dtype')}, {machine_of(matrix.run)}",
        command=page.command_of(matrix.run),
        facts=page.record_facts(matrix.run) | _matrix_facts(matrix),
        warnings=[f"warning: {text}" for text in study_tables.matrix_warnings(matrix)],
        notes=[
            *(LETTERS, HEAD_WORDS, POLICY_WORDS, *_LENGTH_NOTES, *_SEED_NOTES),
            *([_RERUN_NOTE] if any(cell.clean_per_round for cell in matrix.cells) else []),
        ],
        empty=[
            f"{name}: {row_name(cell.key)} seed {cell.seed} under {column_name(cell.key)}"
            for cell in matrix.cells
            if not any(cell.accepted_per_round)
        ],
    )


def fault_section(folder: Path, *, name: str) -> page.Section:
    """The price of faulty draft slots in `folder`."""
    study = study_tables.read_checked_study(folder)
    frame = make_frame(list(_price_rows(study, name)))
    return page.Section(
        name=name,
        title=f"{name}: what faulty draft slots cost",
        charts=[_lost_chart(frame)],
        grids=study_tables.price_grids(study),
        frame=frame,
        headline=_price_headline(study, frame),
        caption=f"n = {len(study.prompts)} prompts, {study.dtype}, {machine_of(study.run)}",
        command=page.command_of(study.run),
        facts=page.record_facts(study.run) | _price_facts(study),
        warnings=[f"warning: {text}" for text in study_warnings(study)],
        notes=[LETTERS, HEAD_WORDS, POLICY_WORDS, FAULT_WORDS, *_LENGTH_NOTES, *_PRICE_NOTES],
        prompts=study.prompts,
        empty=[
            "{}: {} K={} {}".format(name, *one.key)
            for one in study.conditions
            if not any(one.accepted_per_round)
        ],
    )


def training_section(file: Path, *, name: str) -> page.Section:
    """The curves of a `train.py` folder, from its `metrics.jsonl`."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
        kinds = ("train", "eval", "result")
        steps, walks, results = ([one for one in lines if one["kind"] == kind] for kind in kinds)
        charts, frame = _training_charts(steps, walks), make_frame(list(_walk_rows(walks, name)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as fault:
        raise IntegrityError(f"{file} is not a readable metrics file: {fault!r}.") from None
    wanted = ("unroll", "num_mtp_modules", "num_steps", "num_skipped", "best_step", "seconds")
    facts = {key: str(results[-1].get(key, "")) for key in wanted} if results else {}
    unfinished = "warning: the run has not finished, its last lines are shown"
    headline = ""
    if walks:
        best = max(walks, key=lambda one: one["acceptance_length"])
        lengths = (f"{one['acceptance_length']:.3f} at step {one['step']}" for one in
                   (walks[0], best))  # fmt: skip
        headline = f"replay walk: acceptance length {', '.join(lengths)}"
    return page.Section(
        name=name,
        title=f"{name}: training",
        charts=charts,
        grids=[],
        frame=frame,
        headline=headline,
        caption=f"{len(steps)} steps",
        facts=page.known_facts(facts),
        warnings=[] if results else [unfinished],
        notes=[LETTERS, HEAD_WORDS, _WALK_NOTE],
    )


def _matrix_rows(matrix: SeedMatrix, name: str) -> Iterator[Row]:
    for domain, num_prompts in study_tables.prompt_counts(matrix).items():
        shown: Row = {"domain": domain or ALL, "n": num_prompts}
        for one in group_figures(matrix, domain=domain):
            drafts = next(c.num_speculative_tokens for c in matrix.cells if c.key == one.key)
            identity = {"run": name, "head": row_name(one.key), "policy": column_name(one.key),
                        "condition": _group_name(one.key), "K": drafts}  # fmt: skip
            yield row_of(identity, LENGTH, one.length, **shown)
            for seed, value in zip(matrix.done_seeds, one.by_seed, strict=True):
                yield row_of(identity, f"{LENGTH}_seed_{seed}", Estimate(value), **shown)
            for i, figure in enumerate(one.positions, start=1):
                yield row_of(identity, f"p_{i}", figure, **shown)
            if one.clean_length is not None:
                yield row_of(identity, f"{LENGTH}_if_rerun", one.clean_length, **shown)
            if one.minus_match is not None:
                match = {**shown, "reference": "the match of the heads"}
                yield row_of(identity, f"{LENGTH}_difference", one.minus_match, **match)
        for pair in match_pairs(matrix, domain=domain):
            identity = {"run": name, "head": row_name(pair.ours), "policy": pair.ours.policy,
                        "condition": _group_name(pair.ours)}  # fmt: skip
            match = {**shown, "reference": _group_name(pair.theirs)}
            yield row_of(identity, "match_difference", pair.difference, **match)
            for seed, value in zip(matrix.done_seeds, pair.by_seed, strict=True):
                yield row_of(identity, f"match_difference_seed_{seed}", Estimate(value), **match)


def _group_name(key: GroupKey) -> str:
    return f"{row_name(key)} {column_name(key)}"


def _matrix_charts(matrix: SeedMatrix, frame: pd.DataFrame) -> list[Chart | Missing]:
    """Differences of the matching cells, positions by N, then heat maps, all prompts first."""
    title = "Acceptance length by training unroll and decode policy"
    if not matrix.done_seeds:
        return [Missing(title, "no seed has all its cells")]
    groups = group_figures(matrix)
    matches = {_group_name(one.key): one.key.num_mtp_modules for one in groups if one.is_match}
    maps = []
    for domain, part in frame[frame["figure"] == LENGTH].groupby("domain", sort=False):
        where = "" if domain == ALL else f", {domain}"
        cells = part.assign(row=part["head"], column=part["policy"],
                            is_match=part["condition"].isin(matches))  # fmt: skip
        note = f"n = {part['n'].iloc[0]} prompts. Interval: {_INTERVAL} {FRAMED}"
        maps.append(heat_map(f"{title}{where}", cells, rows="heads", unit=TOKENS_PER_ROUND,
                             note=note))  # fmt: skip
    title = "Acceptance by draft position of the matching cells"
    rows = frame[frame["figure"].str.fullmatch(r"p_\d+") & (frame["domain"] == ALL)]
    positions: list[Chart | Missing] = []
    for num_modules in dict.fromkeys(matches.values()):
        names = [one for one, count in matches.items() if count == num_modules]
        own = rows[rows["condition"].isin(names)]
        if len(own):
            positions += position_charts(own, f"{title}, N={num_modules}", _INTERVAL)
    reason = "the matrix has no matching cell that drafts"
    return [maps[0], _difference_chart(matrix), *(positions or [Missing(title, reason)]), *maps[1:]]


def _difference_chart(matrix: SeedMatrix) -> Chart | Missing:
    title = "Heads for training under training minus heads for eagle under eagle"
    pairs = match_pairs(matrix)
    if not pairs:
        return Missing(title, "the matrix has no two matching cells of equal N")
    seeds = matrix.done_seeds[: MAX_SERIES - 1]
    rows = []
    for pair in pairs:
        shown = {"mean over seeds": pair.difference}
        shown |= {f"seed {seed}": Estimate(pair.by_seed[i]) for i, seed in enumerate(seeds)}
        tick = _pair_tick(pair)
        rows += [{"series": name, "tick": tick, **one._asdict()} for name, one in shown.items()]
    note = (
        f"n = {len(matrix.prompts)} prompts. Above 0: training is ahead. Same seeds and prompts; "
        f"by domain: in the table. Interval: {_INTERVAL}"
    )
    data = pd.DataFrame(rows).astype({"value": float, "low": float, "high": float})
    return interval_chart(title, data, x="chain minus these heads", floor=None, note=note,
                          y="difference, tokens per round", is_connected=False)  # fmt: skip


def _pair_tick(pair: MatchPair) -> str:
    norm = pair.ours.recycle_norm
    unusual = f" {norm}" if norm != "post_norm" else ""
    return f"N={pair.theirs.num_mtp_modules} {pair.theirs.unroll}{unusual}"


def _matrix_headline(matrix: SeedMatrix) -> str:
    pairs = [pair for pair in match_pairs(matrix) if pair.difference.value is not None]
    if not pairs:
        return study_tables.matrix_verdict(matrix) if matrix.done_seeds else ""
    pair = max(pairs, key=lambda pair: abs(pair.difference.value or 0.0))
    return (
        f"{row_name(pair.ours)} under {pair.ours.policy} {interval(pair.difference, '+.3f')} "
        f"accepted tokens over {row_name(pair.theirs)} under {pair.theirs.policy}, "
        f"{len(matrix.done_seeds)} seeds, the largest of {len(pairs)} differences; "
        f"{study_tables.matrix_verdict(matrix)}"
    )


def _matrix_facts(matrix: SeedMatrix) -> dict[str, str]:
    config = mapping(matrix.settings, "config")
    model, trainer, asked = (mapping(config, key) for key in ("model", "trainer", "matrix"))
    data, most = mapping(config, "data"), asked.get("max_new_tokens")
    domains = study_tables.prompts_by_domain(matrix)
    return page.known_facts({
        "target": " ".join(str(model.get(key) or "") for key in ("name", "path")).strip(),
        "head conventions": "; ".join(study_tables.matrix_conventions(matrix)),
        "drafts K": _listed(sorted({cell.num_speculative_tokens for cell in matrix.cells})),
        "prompts": f"{len(matrix.prompts)}: "
        + ", ".join(f"{count} {domain}" for domain, count in domains.items()),
        "new tokens": f"at most {most} a prompt" if most else "",
        "sampling": "greedy",
        "training": page.pairs_text(trainer, ("max_steps", "batch_size", "learning_rate")),
        "training data": str(data.get("path") or ""),
        "dtype": f"decoded in {matrix.settings.get('dtype')}, trained in {model.get('dtype')}",
        "seeds": _listed(matrix.done_seeds),
        "lossless": study_tables.matrix_verdict(matrix),
    })  # fmt: skip


def _price_rows(study: FaultStudy, name: str) -> Iterator[Row]:
    shown: Row = {"n": len(study.prompts)}
    for row in study_tables.price_rows(study):
        one = row.condition
        identity: Row = {"run": name, "head": one.head, "policy": one.policy,
                         "K": one.num_speculative_tokens,
                         "condition": "{} K={} {}".format(*one.key)}  # fmt: skip
        yield row_of(identity, LENGTH, row.length, **shown)
        for fault, share in zip(FAULTS, one.shares, strict=True):
            yield row_of(identity, f"share_{fault}_percent", Estimate(share), **shown)
        clean = {**shown, "reference": one.reference}
        figures = {"clean_form_length": row.reference_length, "lost": row.lost,
                   "lost_percent": row.lost_pct, "lost_per_percent": row.lost_per_pct}  # fmt: skip
        for figure, value in figures.items():
            if value is not None:
                yield row_of(identity, figure, value, **clean)
    for split in study_tables.split_prices(study):
        identity = {"run": name, "head": split.head, "condition": f"{split.head}, all K"}
        for fault, price in zip(FAULTS, split.prices, strict=True):
            yield row_of(identity, f"price_{fault}", price, **shown)


def _lost_chart(frame: pd.DataFrame) -> Chart | Missing:
    title = "Acceptance length lost to faulty slots"
    lost = frame[frame["figure"] == "lost"]
    if not len(lost):
        return Missing(title, "no policy was decoded beside its clean form")
    note = (
        "Tokens per round that a policy loses against its clean form, same prompts; below 0 it is "
        f"ahead. Whiskers: {PROMPT_INTERVAL}"
    )
    data = lost.assign(series=lost["head"] + " K=" + lost["K"].astype(str), tick=lost["policy"])
    return interval_chart(title, data, x="policy", y="tokens per round lost", floor=None,
                          is_connected=False, note=note)  # fmt: skip


def _price_headline(study: FaultStudy, frame: pd.DataFrame) -> str:
    lost = frame[(frame["figure"] == "lost") & frame["value"].notna()]
    if not len(lost):
        return fault_verdict(study)
    one = lost.loc[lost["value"].idxmax()]
    return (
        f"{one['policy']} loses {interval(estimate_of(one), '+.3f')} accepted tokens against "
        f"{one['reference']}, the most of {len(lost)} losses ({one['head']}, K = {one['K']}); "
        f"{fault_verdict(study)}"
    )


def _price_facts(study: FaultStudy) -> dict[str, str]:
    return page.known_facts({
        "joined from": "; ".join(map(_part_words, study.parts)),
        "target": _listed(dict.fromkeys(map(_model_words, study.parts or [study.run]))),
        "heads": _listed(head.get("name") for head in study.heads),
        "head conventions": "; ".join(study_tables.price_head_lines(study)),
        "drafts K": _listed(sorted({c.num_speculative_tokens for c in study.conditions})),
        "prompts": str(len(study.prompts)),
        "new tokens": f"at most {study.max_new_tokens} a prompt",
        "sampling": "greedy",
        "dtype, seed": f"{study.dtype}, {study.seed}",
        "conditions": f"{len(study.conditions)} of {study.num_asked}",
        "lossless": fault_verdict(study),
    })  # fmt: skip


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
    return f"{page.command_of(record)} ({known})" if known else page.command_of(record)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _walk_rows(walks: Sequence[Mapping], name: str) -> Iterator[Row]:
    for walk in walks:
        value, error = walk["acceptance_length"], walk["standard_error"]
        one = Estimate(value, value - 1.96 * error, value + 1.96 * error)
        identity: Row = {"run": name, "condition": f"step {walk['step']}"}
        yield row_of(identity, "walk_acceptance_length", one, n=walk["num_documents"])


def _training_charts(steps: Sequence[Mapping], walks: Sequence[Mapping]) -> list[Chart | Missing]:
    """Loss and accuracy of each depth by step; a skipped step, which has no loss, is left out."""
    known = [one for one in steps if one["loss"] is not None]
    walk_title = "Acceptance length of the replay walk"
    charts: list[Chart | Missing] = []
    if known:
        places = [one["step"] for one in known]
        loss = {"loss": (places, [one["loss"] for one in known])}
        depths = {
            f"depth {i + 1}": (places, [one["accuracy"][i] for one in known])
            for i in range(len(known[0]["accuracy"]))
        }
        charts.append(curves("Training loss", loss, x="step", y="loss"))
        charts.append(curves("Training accuracy by depth", depths, x="step", y="share of targets"))
    else:
        charts.append(Missing("Training curves", "no step has been finished"))
    if not walks:
        return [*charts, Missing(walk_title, "no walk has been measured")]
    places = [one["step"] for one in walks]
    lengths = {"all documents": (places, [one["acceptance_length"] for one in walks])}
    for domain in walks[0].get("length_by_domain") or {}:
        lengths[domain] = (places, [one["length_by_domain"].get(domain) for one in walks])
    note = f"On {walks[0]['num_documents']} held-out documents."
    return [*charts, curves(walk_title, lengths, x="step", y=TOKENS_PER_ROUND, note=note)]
