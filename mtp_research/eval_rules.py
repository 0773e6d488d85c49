"""Rules between the keys of `eval.py`; `validation` asks for them when every value alone is legal.

A grid is checked cell by cell, as if each had been typed alone. Rules on where the target lies
stand in `placing_rules`.
"""

import dataclasses
from collections.abc import Iterator

from mtp_research.config import EngineConfig, EvalConfig, GridConfig
from mtp_research.config_choices import ARGMAX_RULES, CLEAN_POLICIES
from mtp_research.config_evaluation import GRID_AXES
from mtp_research.grid import expand
from mtp_research.runtime.errors import rule_line


def eval_faults(config: EvalConfig) -> Iterator[str]:
    """Rules of every cell of the grid; one line a key, from the cell with the most rows a step."""
    for key in GRID_AXES:
        values = _grid_values(config.grid)[key]
        if len(set(values)) < len(values):
            full = GRID_AXES[key]
            yield rule_line(full, "must name each value once", values, f"{full}=[A,B]")
    if config.timing.passes > 1 and config.timing.passes % 2:
        expected, passes = "must be 1 or even, as in A B B A", config.timing.passes
        yield rule_line("timing.passes", expected, passes, f"timing.passes={passes + 1}")
    if config.timing.turns is not None and config.model.tp_plan != "none":
        # Every rank would wait for the lock that another rank of its own run holds.
        expected = f"must be null for model.tp_plan={config.model.tp_plan}"
        yield rule_line("timing.turns", expected, config.timing.turns, "timing.turns=null")
    cells = sorted(
        expand(config).cells,
        key=lambda cell: cell.engine.max_num_requests * (cell.spec.num_speculative_tokens + 1),
    )
    lines = {line.split()[0]: line for cell in cells for line in _cell_faults(cell)}
    yield from lines.values()


def _grid_values(grid: GridConfig) -> dict[str, list]:
    return {f"grid.{name}": values for name, values in dataclasses.asdict(grid).items()}


def _cell_faults(config: EvalConfig) -> Iterator[str]:
    spec, engine, max_new_tokens = config.spec, config.engine, config.sampling.max_new_tokens
    if not spec.policy or len(set(spec.policy)) < len(spec.policy):
        expected, fix = "must name at least one policy, each once", "spec.policy=[eagle,training]"
        yield rule_line("spec.policy", expected, spec.policy, fix)
    if engine.block_size < 16 or engine.block_size & (engine.block_size - 1):
        key, fix = "engine.block_size", max(1 << engine.block_size.bit_length(), 16)
        yield rule_line(key, "must be a power of two >= 16", engine.block_size, f"{key}={fix}")
    num_rows = engine.max_num_requests * (spec.num_speculative_tokens + 1)
    if engine.max_num_batched_tokens < num_rows:
        key, expected = (
            "engine.max_num_batched_tokens",
            f"must hold engine.max_num_requests * (spec.k + 1) = {num_rows} rows",
        )
        yield rule_line(key, expected, engine.max_num_batched_tokens, f"{key}={num_rows}")
    unclean = [policy for policy in spec.policy if policy not in CLEAN_POLICIES]
    if engine.prefix_caching and unclean:
        key, expected = "engine.prefix_caching", f"must be false for spec.policy={unclean[0]}"
        yield rule_line(key, expected, "true", f"{key}=false")
    yield from _capture_faults(engine)
    if engine.max_model_len is not None and engine.max_model_len <= max_new_tokens:
        key, expected = "engine.max_model_len", f"must exceed max_new_tokens={max_new_tokens}"
        yield rule_line(key, expected, engine.max_model_len, f"{key}={2 * max_new_tokens}")
    if config.logger.tensorboard:
        key, expected = "logger.tensorboard", "must be false for eval.py, which draws no curves"
        yield rule_line(key, expected, "true", f"{key}=false")
    yield from _sampling_faults(config)


def _capture_faults(engine: EngineConfig) -> Iterator[str]:
    """Keys of compiled and captured steps that exclude or need one another."""
    if engine.deterministic and engine.compile:
        key, fix = "engine.compile", "engine=h200_deterministic"
        yield rule_line(key, "must be false for engine.deterministic=true", "true", fix)
    if engine.compile and not engine.cuda_graphs:  # what is not captured is not compiled
        key, expected = "engine.compile", "must be false for engine.cuda_graphs=false"
        yield rule_line(key, expected, "true", f"{key}=false")
    if engine.capture_mixed and not engine.cuda_graphs:
        key, expected = "engine.capture_mixed", "must be false for engine.cuda_graphs=false"
        yield rule_line(key, expected, "true", f"{key}=false")
    sizes, key = engine.graph_batch_sizes, "engine.graph_batch_sizes"
    if sizes is not None and not engine.cuda_graphs:
        yield rule_line(key, "must be null for engine.cuda_graphs=false", sizes, f"{key}=null")
    elif sizes is not None and (not sizes or sizes != sorted(set(sizes))):
        fix = f"{key}={sorted(set(sizes)) or 'null'}".replace(" ", "")
        yield rule_line(key, "must be one or more sizes in ascending order", sizes, fix)


def _sampling_faults(config: EvalConfig) -> Iterator[str]:
    """An option that the chosen mode would ignore is a fault, not a silent no-op."""
    spec, sampling = config.spec, config.sampling
    if sampling.temperature > 0:
        if spec.verify in ARGMAX_RULES:
            expected = f"must be 0 for spec.verify={spec.verify}"
            fix = "spec.verify=auto"
            yield rule_line("sampling.temperature", expected, sampling.temperature, fix)
        return
    fix = "sampling.temperature=1"
    if sampling.top_k:
        yield rule_line("sampling.top_k", "must be 0 at temperature 0", sampling.top_k, fix)
    if sampling.top_p != 1:
        yield rule_line("sampling.top_p", "must be 1 at temperature 0", sampling.top_p, fix)
    if sampling.min_p:
        yield rule_line("sampling.min_p", "must be 0 at temperature 0", sampling.min_p, fix)
    if spec.draft_sampling == "sample":
        yield rule_line("spec.draft_sampling", "must be greedy at temperature 0", "sample", fix)
