"""The columns of an evaluation: K = 0 and every policy in every cell of the grid, and their names.

Another engine has K = 0 and one column a cell, beside one of our loop run by its conventions.

Between configuration and decode loop; imports no torch, so that a wrong list is refused before a
model is loaded. A *group* is the conditions of one batch size and temperature: it has its own
K = 0 baseline. Letter: K drafts per step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import NamedTuple

from mtp_research.config.rules import expand
from mtp_research.config.schema import OWN, EvalConfig
from mtp_research.runtime.errors import ConfigError

BASELINE = "baseline"
Head = str | None  # `spec.head`: a folder, `oracle`, or None


class Group(NamedTuple):
    """What conditions must share to be compared in speed."""

    max_num_requests: int
    temperature: float


@dataclass(frozen=True)
class Condition:
    """One column of the table."""

    label: str  # unique; names only what differs between the conditions
    policy: str | None  # hidden-state policy; None for K = 0, and for drafts that need none
    num_speculative_tokens: int  # K; 0 is a baseline
    # Name of the heads, unique among those of the evaluation; None for K = 0 and for
    # `spec.head=null`
    head: str | None
    config: EvalConfig  # the configuration of this cell alone, without lists
    backend: str = OWN  # the engine
    # Engine whose conventions our loop runs the heads by, its policy too; None for their own
    conventions: str | None = None

    @property
    def group(self) -> Group:
        """Batch size and temperature."""
        return Group(self.config.engine.max_num_requests, self.config.sampling.temperature)


def conditions_of(config: EvalConfig) -> list[Condition]:
    """Every condition, group by group; in each group K = 0 first, where it is asked for."""
    cells = expand(config).cells
    names, others = head_names(cells), [name for name in config.backend if name != OWN]
    conditions: list[Condition] = []
    for group in dict.fromkeys(map(_group_of, cells)):
        members = [cell for cell in cells if _group_of(cell) == group]
        num_drafts = [cell.spec.num_speculative_tokens for cell in members]
        drafting = [cell for cell in members if cell.spec.num_speculative_tokens > 0]
        has_baseline = config.baseline or 0 in num_drafts
        if has_baseline:
            label = _label(BASELINE, members[0], cells, names, is_baseline=True)
            conditions.append(Condition(label, None, 0, None, members[0]))
        for cell in drafting:
            conditions += _drafting(cell, cells, names)
            conditions += [_as_engine(name, cell, cells, names) for name in others]
        for name in others:
            if has_baseline:
                label = _label(f"{name} {BASELINE}", members[0], cells, names, is_baseline=True)
                conditions.append(Condition(label, None, 0, None, members[0], backend=name))
            conditions += [
                replace(
                    _as_engine(name, cell, cells, names),
                    label=_label(name, cell, cells, names, is_baseline=False),
                    backend=name,
                    conventions=None,
                )
                for cell in drafting
            ]
    _check_reference(config.reference, conditions)
    return conditions


def head_names(cells: Iterable[EvalConfig]) -> dict[Head, str | None]:
    """A short name for every head, see `short_names`; None for none."""
    heads = (cell.spec.head for cell in cells)
    return {None: None, **short_names(head for head in heads if head is not None)}


def short_names(heads: Iterable[str]) -> dict[str, str]:
    """As many last parts of each path as tell it from the others."""
    paths = {head: PurePath(head).parts or (head,) for head in heads}
    longest = max(map(len, paths.values()), default=1)
    tails: dict[str, str] = {}
    for num_parts in range(1, longest + 1):
        tails = {head: "/".join(parts[-num_parts:]) for head, parts in paths.items()}
        if len(set(tails.values())) == len(tails):
            break
    return tails


def _drafting(
    cell: EvalConfig, cells: Sequence[EvalConfig], names: dict[Head, str | None]
) -> list[Condition]:
    head = cell.spec.head
    policies: list[str | None] = [None] if head in (None, "oracle") else [*cell.spec.policy]
    return [
        Condition(
            label=_label(policy or head or "null", cell, cells, names, is_baseline=False),
            policy=policy,
            num_speculative_tokens=cell.spec.num_speculative_tokens,
            head=names[head],
            config=cell,
        )
        for policy in policies
    ]


def _as_engine(
    name: str, cell: EvalConfig, cells: Sequence[EvalConfig], names: dict[Head, str | None]
) -> Condition:
    """Our loop, the heads run as engine `name` does; its policy is known with the target."""
    return Condition(
        label=_label(f"own as {name}", cell, cells, names, is_baseline=False),
        policy=None,
        num_speculative_tokens=cell.spec.num_speculative_tokens,
        head=names[cell.spec.head],
        config=cell,
        conventions=name,
    )


def _label(
    first: str,
    cell: EvalConfig,
    cells: Sequence[EvalConfig],
    names: dict[Head, str | None],
    *,
    is_baseline: bool,
) -> str:
    """`training`, or `training ttt_n1 K=3 sample fixed T=0.6 R=8` where all of these differ."""
    drafting = [other for other in cells if other.spec.num_speculative_tokens > 0]
    words = [first]
    if not is_baseline:
        name = names[cell.spec.head]
        if name not in (None, "oracle") and _differ(names[other.spec.head] for other in drafting):
            words.append(str(name))
        if _differ(other.spec.num_speculative_tokens for other in drafting):
            words.append(f"K={cell.spec.num_speculative_tokens}")
        if _differ(other.spec.draft_sampling for other in drafting):
            words.append(cell.spec.draft_sampling)
        if _differ(other.spec.draft_length for other in drafting):
            words.append(cell.spec.draft_length)
    if _differ(other.sampling.temperature for other in cells):
        words.append(f"T={cell.sampling.temperature:g}")
    if _differ(other.engine.max_num_requests for other in cells):
        words.append(f"R={cell.engine.max_num_requests}")
    return " ".join(words)


def _differ(values: Iterable[object]) -> bool:
    return len(set(values)) > 1


def _group_of(cell: EvalConfig) -> Group:
    return Group(cell.engine.max_num_requests, cell.sampling.temperature)


def _check_reference(reference: str | None, conditions: Sequence[Condition]) -> None:
    drafting = [c for c in conditions if c.num_speculative_tokens > 0]
    known = {name for c in drafting for name in (c.label, c.policy) if name is not None}
    if reference is not None and reference not in known:
        raise ConfigError(
            f"reference must be the label or policy of a condition that drafts "
            f"({', '.join(sorted(known)) or 'there is none'}), got {reference}; leave it out for "
            "the first one."
        )
