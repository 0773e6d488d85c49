"""Figures over settings and runs: policy matrices, acceptance and speed against batch size and K.

A *sweep* is a set of conditions that agree in everything of `Setting` but one part, such as the
batch size. Conditions that differ in target, machine, dtype or verification rule never share a
chart. Those that differ in prompts share one of speeds alone, and only along the batch size: a
sweep in parts gives small batches few prompts, and every point has plain decoding of its own.
Letters: K drafts per step, R requests decoded at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtp_research.evaluation.batch_table import ratio_of
from mtp_research.evaluation.entries import Entry, Setting, drafting
from mtp_research.evaluation.figures import (
    PROMPT_INTERVAL,
    TOKENS_PER_ROUND,
    UNDEFINED_FIGURE,
    Figure,
    Missing,
)
from mtp_research.evaluation.policy_matrix import describe, policy_matrices, told_apart
from mtp_research.evaluation.stats.bootstrap import Estimate
from mtp_research.evaluation.svg import Axes, Series, heat_map, interval_chart
from mtp_research.evaluation.svg_parts import MAX_SERIES

SweptPart = Literal["batch_size", "num_speculative_tokens", "temperature"]
_TITLES: dict[SweptPart, str] = {
    "batch_size": "batch size",
    "num_speculative_tokens": "number of drafts",
    "temperature": "temperature",
}
_AXES: dict[SweptPart, str] = {
    "batch_size": "batch size R [requests]",
    "num_speculative_tokens": "drafts per step K",
    "temperature": "sampling temperature",
}


@dataclass(frozen=True)
class Sweep:
    """Conditions that differ in one part of their setting.

    Attributes:
        part: what differs.
        shared: the rest in words.
        values: of that part, ascending.
        rows: by name of head and policy, the entry at each value; None where there is none.
        has_parts: values differ in their prompts too, so that acceptance cannot be compared.
    """

    part: SweptPart
    shared: str
    values: tuple[float, ...]
    rows: dict[str, tuple[Entry | None, ...]]
    has_parts: bool = False


def sweep_figures(entries: Sequence[Entry]) -> list[Figure | Missing]:
    """Policy matrices, then acceptance and tokens/s along every part that is swept."""
    figures: list[Figure | Missing] = []
    matrices = policy_matrices(entries)
    apart = told_apart([describe(matrix.setting) for matrix in matrices])
    for matrix, which in zip(matrices, apart, strict=True):
        markup = heat_map(
            matrix.values, rows=matrix.rows, columns=matrix.columns, outlined=matrix.matches
        )
        figures.append(Figure(f"{matrix.title}{which}", markup, matrix.note))
    if not matrices:
        reason = "fewer than two heads decoded the same prompts under one setting"
        figures.append(Missing("Policy matrix", reason))
    for part in _TITLES:
        found = sweeps(entries, part)
        if found:
            names = told_apart([sweep.shared for sweep in found])
            for sweep, which in zip(found, names, strict=True):
                figures += _charts(sweep, f"{_TITLES[part]}{which}")
        else:
            reason = f"all comparable conditions ran at one {_TITLES[part]}"
            figures.append(Missing(f"Acceptance and speed by {_TITLES[part]}", reason))
    return figures


def sweeps(entries: Sequence[Entry], part: SweptPart) -> list[Sweep]:
    """Sweeps of one part over at least two values, in the order of the entries."""
    groups: dict[Setting, list[Entry]] = {}
    for entry in drafting(entries):
        if _number(entry, part) is not None:
            groups.setdefault(_without(entry.setting, part), []).append(entry)
    made = [_sweep(setting, members, part) for setting, members in groups.items()]
    if part != "batch_size":
        return [sweep for sweep in made if len(sweep.values) > 1]
    parts: dict[Setting, list[Entry]] = {}
    for sweep, (setting, members) in zip(made, groups.items(), strict=True):
        if len(sweep.values) == 1:
            blank = setting._replace(num_prompts=0, prompts_sha256="")
            parts.setdefault(blank, []).extend(members)
    made += [
        replace(_sweep(setting, members, part), has_parts=True)
        for setting, members in parts.items()
    ]
    return [sweep for sweep in made if len(sweep.values) > 1]


def _without(setting: Setting, part: SweptPart) -> Setting:
    """The setting with the swept part blanked, so that only the others tell groups apart."""
    if part == "num_speculative_tokens":
        return setting._replace(num_speculative_tokens=0)
    if part == "batch_size":
        return setting._replace(batch_size="")
    # The rule that suits a temperature changes with it: greedy at 0, standard above.
    return setting._replace(temperature="", verify="")


def _number(entry: Entry, part: SweptPart) -> float | None:
    try:
        return float(entry.setting._asdict()[part])
    except ValueError:
        return None


def _sweep(setting: Setting, members: Sequence[Entry], part: SweptPart) -> Sweep:
    values = sorted({value for entry in members if (value := _number(entry, part)) is not None})
    at: dict[str, dict[float, Entry]] = {}
    for entry in members:
        value, name = _number(entry, part) or 0.0, entry.series_name
        if value in at.get(name, {}):  # another run has this point already
            name = f"{name}, {entry.run.name}"
        at.setdefault(name, {})[value] = entry
    rows = {name: tuple(found.get(value) for value in values) for name, found in at.items()}
    return Sweep(part, describe(setting, without=part), tuple(values), rows)


def _charts(sweep: Sweep, name: str) -> Iterator[Figure]:
    """Charts of a sweep, which ends their titles as `name`."""
    shared, note = sweep.shared, ""
    if len(sweep.rows) > MAX_SERIES:
        note = f"The first {MAX_SERIES} of {len(sweep.rows)} heads and policies. "
    if sweep.has_parts:
        note += f"Prompts: {_prompts_by_value(sweep)}; each point over its own. "
    else:
        lengths = _chart(sweep, lambda e: e.summary.acceptance.acceptance_length_micro,
                         TOKENS_PER_ROUND, floor=1.0)  # fmt: skip
        yield Figure(f"Acceptance length by {name}", lengths,
                     f"{note}Whiskers: {PROMPT_INTERVAL} {shared}.")  # fmt: skip
    if sweep.part == "temperature":
        return
    speeds = _chart(_with_baselines(sweep), lambda e: e.tokens_per_s, "tokens/s, end to end")
    passes = "Whiskers: slowest and fastest pass. " if _has_passes(sweep) else ""
    yield Figure(f"Tokens per second by {name}", speeds, f"{note}{passes}{shared}.")
    if any(entry.baseline for entry in _members(sweep)):
        ratios = _chart(sweep, ratio_of, "tokens/s over that of K = 0")
        spread = "Whiskers: slowest pass over the fastest of K = 0, and the other way round. "
        spread = spread if _has_passes(sweep) else ""
        yield Figure(f"Speed-up over K = 0 by {name}", ratios, f"{note}{spread}{shared}.")


def _prompts_by_value(sweep: Sweep) -> str:
    """How many prompts each value has, such as `16 at batch size 1, 32 at 8`."""
    counts: dict[float, set[int]] = {value: set() for value in sweep.values}
    for row in sweep.rows.values():
        for value, entry in zip(sweep.values, row, strict=True):
            if entry is not None:
                counts[value].add(entry.setting.num_prompts)
    shown = (
        f"{' or '.join(map(str, sorted(found)))} at {_TITLES[sweep.part]} {value:g}"
        for value, found in counts.items()
    )
    return ", ".join(shown)


def _with_baselines(sweep: Sweep) -> Sweep:
    """The sweep with plain decoding as its last row, where it ran at the same values."""
    plain = tuple(
        next((e.baseline for row in sweep.rows.values() if (e := row[i]) and e.baseline), None)
        for i in range(len(sweep.values))
    )
    return replace(sweep, rows=sweep.rows | {"K = 0": plain}) if any(plain) else sweep


def _has_passes(sweep: Sweep) -> bool:
    return any(entry.summary.speed.num_passes > 1 for entry in _members(sweep))


def _members(sweep: Sweep) -> list[Entry]:
    return [entry for row in sweep.rows.values() for entry in row if entry is not None]


def _chart(sweep: Sweep, figure: Callable[[Entry], Estimate], y: str, *, floor: float = 0.0) -> str:
    series = [
        Series(name, tuple(UNDEFINED_FIGURE if e is None else figure(e) for e in row))
        for name, row in sweep.rows.items()
    ]
    ticks = tuple(f"{value:g}" for value in sweep.values)
    return interval_chart(series, axes=Axes(_AXES[sweep.part], y, ticks), floor=floor)
