"""Lists of values on the command line: from one configuration to one configuration a cell.

`grid` of an evaluation's configuration holds lists for some keys. A *cell* is one combination of
their values: a configuration without lists, checked by the same rules as if it had been typed
alone. Cells of equal batch size and temperature follow each other, because they share a baseline.

Letter: K drafts per step.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

from mtp_research.config.schema import EvalConfig, GridConfig


class Expansion(NamedTuple):
    """The cells of a grid, and a line on every combination that means nothing and is left out."""

    cells: tuple[EvalConfig, ...]
    skipped: tuple[str, ...]


def expand(config: EvalConfig) -> Expansion:
    """Every combination of the lists in `config.grid`; the configuration itself without lists.

    `spec.verify=auto` becomes `greedy` or `standard` by the cell's temperature. Sampled drafts at
    temperature 0 are greedy drafts under another name: such cells are left out of a grid, unless it
    has no other.
    """
    made = tuple(
        _cell(config, *values)
        for values in itertools.product(
            config.grid.max_num_requests or [config.engine.max_num_requests],
            config.grid.temperature or [config.sampling.temperature],
            config.grid.head or [config.spec.head],
            config.grid.num_speculative_tokens or [config.spec.num_speculative_tokens],
            config.grid.draft_sampling or [config.spec.draft_sampling],
        )
    )
    cells = tuple(cell for cell in made if not _samples_at_zero(cell))
    if not cells:
        return Expansion(made, ())
    is_skipped = len(cells) < len(made)
    note = "spec.draft_sampling=sample at temperature 0, where drafts cannot be sampled"
    return Expansion(cells, (note,) if is_skipped else ())


def _cell(
    config: EvalConfig,
    max_num_requests: int,
    temperature: float,
    head: str | None,
    num_speculative_tokens: int,
    draft_sampling: str,
) -> EvalConfig:
    verify = config.spec.verify
    if verify == "auto":
        verify = "standard" if temperature > 0 else "greedy"
    spec = replace(
        config.spec,
        num_speculative_tokens=num_speculative_tokens,
        head=head,
        draft_sampling=draft_sampling,
        verify=verify,
    )
    return replace(
        config,
        spec=spec,
        sampling=replace(config.sampling, temperature=temperature),
        engine=replace(config.engine, max_num_requests=max_num_requests),
        grid=GridConfig(),
    )


def _samples_at_zero(cell: EvalConfig) -> bool:
    return cell.sampling.temperature == 0 and cell.spec.draft_sampling == "sample"
