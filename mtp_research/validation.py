"""Every check that needs only the configuration, made before a model is loaded.

A fault line says which key, what was expected, what was got and the override that fixes it. Ranges
and choices stand beside the keys in `mtp_research.config`; here are the rules between keys.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import get_args, get_origin

from mtp_research.config import (
    ARGMAX_RULES,
    CLEAN_POLICIES,
    GRID_AXES,
    MAX_SPECULATIVE_TOKENS,
    EngineConfig,
    EvalConfig,
    GridConfig,
    ObjectiveConfig,
    TrainConfig,
    parse_loss,
)
from mtp_research.errors import ConfigError
from mtp_research.grid import expand
from mtp_research.placing_rules import placing_faults

ALIASES = {"spec.k": "spec.num_speculative_tokens"}

Field = dataclasses.Field[object]


def validate(config: TrainConfig | EvalConfig) -> None:
    """Check all ranges, choices and rules between keys.

    Raises:
        ConfigError: one line per fault.
    """
    faults = list(_value_faults(config))
    if not faults:
        rules = _train_faults(config) if isinstance(config, TrainConfig) else _eval_faults(config)
        faults = [*rules, *(_fault(*fault) for fault in placing_faults(config))]
    if faults:
        raise ConfigError("\n".join(faults))


def check_values(config: object, *, section: str) -> None:
    """Check ranges and choices of one section, as the command line does.

    Args:
        config: a section of the schema, such as `EngineConfig`.
        section: its key, such as `engine`.

    Raises:
        ConfigError: one line per fault.
    """
    if faults := list(_value_faults(config, f"{section}.")):
        raise ConfigError("\n".join(faults))


def schema_keys(schema: type, prefix: str = "") -> dict[str, Field]:
    """Map every dotted key of a schema, such as `spec.policy`, to its dataclass field."""
    keys: dict[str, Field] = {}
    for item in dataclasses.fields(schema):
        key = f"{prefix}{item.name}"
        if isinstance(item.type, type) and dataclasses.is_dataclass(item.type):
            keys |= schema_keys(item.type, f"{key}.")
        else:
            keys[key] = item
    return keys


def legal_values(item: Field) -> str:
    """Describe what a key takes, for fault lines and for `--help`."""
    types = [part for part in get_args(item.type) if part is not NoneType]
    is_union = get_origin(item.type) not in (list, tuple, dict)
    kind = types[0] if is_union and types else item.type  # `list[int] | None` is a list
    none = " or null" if is_union and NoneType in get_args(item.type) else ""
    if get_origin(kind) in (list, tuple):
        return f"a list, each {_one_value(item, get_args(kind)[0])}{',' if none else ''}{none}"
    if get_origin(kind) is dict:
        return f"a mapping{none}"
    return _one_value(item, kind) + none


def _one_value(item: Field, kind: object) -> str:
    if choices := item.metadata.get("choices"):
        return " | ".join(sorted(choices))
    number = {int: "an integer", float: "a number"}.get(kind) if isinstance(kind, type) else None
    if number is not None and "low" in item.metadata:
        low, high = item.metadata["low"], item.metadata["high"]
        interval = f"above {low:g} up to {high:g}" if _is_open(item) else f"in {low}..{high}"
        return f"{number} {interval}"
    if kind is bool:
        return "true or false"
    return number or "text"


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `; nearest: a, b` for the closest valid names, or nothing when none is close."""
    known = sorted(set(choices))
    tail = word.rsplit(".", 1)[-1]
    tails = {name.rsplit(".", 1)[-1] for name in known}
    close_tails = difflib.get_close_matches(tail, sorted(tails), n=1, cutoff=0.75)
    found = [name for name in known if name.rsplit(".", 1)[-1] in close_tails]
    found += difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    names = list(dict.fromkeys(found))[:3]
    return f"; nearest: {', '.join(names)}" if names else ""


def fault_line(key: str, item: Field, value: object) -> str:
    """Compose the line for a value that a key does not take."""
    if key in GRID_AXES:  # a value of a list: say it of the key that takes one
        key = GRID_AXES[key]
        item = schema_keys(EvalConfig)[key]
    short = next((alias for alias, full in ALIASES.items() if full == key), key)
    line = f"{key} must be {legal_values(item)}, got {value}"
    if choices := item.metadata.get("choices"):
        return f"{line}{nearest(str(value), choices)}."
    if "low" not in item.metadata:
        return f"{line}."
    bounded = item.default
    if isinstance(value, int | float) and not isinstance(bounded, NoneType) and value == value:
        bounded = min(max(value, item.metadata["low"]), item.metadata["high"])
    if _is_open(item) and bounded == item.metadata["low"]:
        bounded = item.default
    return f"{line}; set {short}={'null' if bounded is None else bounded}."


def _is_open(item: Field) -> bool:
    return bool(item.metadata.get("open_low"))


def _value_faults(config: object, prefix: str = "") -> Iterator[str]:
    assert dataclasses.is_dataclass(config), f"{prefix} must be a dataclass, got {type(config)}"
    for item in dataclasses.fields(config):
        value, key = getattr(config, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(value):
            yield from _value_faults(value, f"{key}.")
        elif value is None and NoneType in get_args(item.type):
            continue
        elif "low" in item.metadata:
            low, high = item.metadata["low"], item.metadata["high"]
            for number in value if isinstance(value, list) else [value]:
                if not (low <= number <= high) or (_is_open(item) and number == low):
                    yield fault_line(key, item, number)
        elif "choices" in item.metadata:
            for choice in value if isinstance(value, list) else [value]:
                if choice not in item.metadata["choices"]:
                    yield fault_line(key, item, choice)


def _fault(key: str, expected: str, got: object, fix: str) -> str:
    return f"{key} {expected}, got {got}; set {fix}."


def _train_faults(config: TrainConfig) -> Iterator[str]:
    if config.task in ("cache", "target"):
        yield from _logger_faults(config)
    yield from _pretrain_faults(config) if config.task == "target" else _heads_faults(config)


def _logger_faults(config: TrainConfig) -> Iterator[str]:
    """Tasks without a curve, whose services would stay empty."""
    logger, expected = config.logger, f"for task={config.task}, which logs to its run folder only"
    if logger.wandb != "disabled":
        yield _fault("logger.wandb", f"must be disabled {expected}", logger.wandb, "logger=none")
    if logger.tensorboard:
        key = "logger.tensorboard"
        yield _fault(key, f"must be false {expected}", "true", f"{key}=false")


def _pretrain_faults(config: TrainConfig) -> Iterator[str]:
    pretrain = config.model.pretrain
    if not config.model.architecture:
        expected = "must be set for task=target"
        yield _fault("model.architecture", expected, "nothing", "model=lab_tiny")
    if pretrain.warmup_steps >= pretrain.max_steps:
        key, expected = (
            "model.pretrain.warmup_steps",
            f"must be below max_steps={pretrain.max_steps}",
        )
        yield _fault(key, expected, pretrain.warmup_steps, f"{key}={pretrain.max_steps // 20}")
    weights = pretrain.domain_weights
    for domain, weight in weights.items():
        if not 0 <= weight < float("inf"):
            key = f"model.pretrain.domain_weights.{domain}"
            yield _fault(key, "must be a finite number >= 0", weight, f"{key}=0")
    if weights and not any(weights.values()):
        key = "model.pretrain.domain_weights"
        yield _fault(key, "must have a weight above 0", "only zeros", f"{key}.{min(weights)}=1")


def _heads_faults(config: TrainConfig) -> Iterator[str]:
    head, objective, seq_len = config.head, config.objective, config.data.seq_len
    num_modules = head.num_mtp_modules
    num_depths = objective.num_depths or max(num_modules, 3)
    if num_depths < num_modules:
        key, expected = (
            "objective.num_depths",
            f"must be at least head.num_mtp_modules={num_modules}",
        )
        yield _fault(key, expected, num_depths, f"{key}={num_modules}")
    key, fix = "head.num_mtp_modules", "head=shared_n1"
    if objective.unroll == "ttt" and num_modules != 1:
        yield _fault(key, "must be 1 for objective.unroll=ttt", num_modules, fix)
    if head.module_schedule == "first" and num_modules != 1:
        yield _fault(key, "must be 1 for head.module_schedule=first", num_modules, fix)
    yield from _loss_faults(config)
    for count in config.matrix.num_mtp_modules if config.task == "matrix" else ():
        most = objective.num_depths or MAX_SPECULATIVE_TOKENS
        if not 1 <= count <= most:
            key, expected = "matrix.num_mtp_modules", f"must lie in 1..{most}"
            yield _fault(key, expected, count, f"{key}=[1,{min(3, most)}]")
    seeds = config.matrix.seeds
    if seeds is not None and (len(set(seeds)) < max(len(seeds), 1) or min(seeds) < 0):
        expected = "must hold at least one number >= 0, each once"
        yield _fault("matrix.seeds", expected, seeds, "matrix.seeds=[0,1,2]")
    if config.task == "cache" and config.data.hidden_cache is None:
        yield _fault("data.hidden_cache", "must be set for task=cache", "nothing", "data=cached")
    if seq_len < num_depths + 2:
        least = num_depths + 2
        expected = f"must be at least objective.num_depths + 2 = {least}"
        yield _fault("data.seq_len", expected, seq_len, f"data.seq_len={least}")
    betas = config.trainer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        key, expected = "trainer.betas", "must be two numbers in [0, 1)"
        yield _fault(key, expected, list(betas), f"{key}=[0.9,0.95]")
    yield from _scale_faults(config)


def _scale_faults(config: TrainConfig) -> Iterator[str]:
    trainer, head = config.trainer, config.head
    if head.init == "replicate" and head.path is None:
        expected = "must be set for head.init=replicate"
        yield _fault("head.path", expected, "nothing", "head.path=PATH")
    is_gathered = trainer.parallel in ("fsdp2", "zero3")
    if trainer.decode_eval_prompts and (is_gathered or trainer.shard_target):
        key, expected = "trainer.decode_eval_prompts", "must be 0 with weights spread over ranks"
        yield _fault(key, expected, trainer.decode_eval_prompts, f"{key}=0")
    if head.lora_rank and trainer.parallel != "ddp":
        expected = f"must be 0 for trainer.parallel={trainer.parallel}, which shards whole weights"
        yield _fault("head.lora_rank", expected, head.lora_rank, "head.lora_rank=0")
    if trainer.compile and is_gathered:  # their hooks inside the modules break the graph
        expected = f"must be false for trainer.parallel={trainer.parallel}"
        yield _fault("trainer.compile", expected, "true", "trainer.compile=false")


def _loss_faults(config: TrainConfig) -> Iterator[str]:
    """A key that the chosen loss ignores is a fault, not a silent no-op."""
    objective, plain = config.objective, ObjectiveConfig()
    try:
        terms = parse_loss(objective.loss)
    except ConfigError as fault:
        yield str(fault)
        return
    for key in ("lk_eta", "lk_acceptance") if "lk" not in terms else ():
        value, default = getattr(objective, key), getattr(plain, key)
        if value != default:
            expected = f"must be {default} for objective.loss={objective.loss}, which has no lk"
            yield _fault(f"objective.{key}", expected, value, f"objective.{key}={default}")
    if objective.depth_weights != "decay" and objective.depth_decay != plain.depth_decay:
        key, default = "objective.depth_decay", plain.depth_decay
        expected = f"must be {default} for objective.depth_weights={objective.depth_weights}"
        yield _fault(key, expected, objective.depth_decay, f"{key}={default}")


def _eval_faults(config: EvalConfig) -> Iterator[str]:
    """Rules of every cell of the grid; one line a key, from the cell with the most rows a step."""
    for key in GRID_AXES:
        values = _grid_values(config.grid)[key]
        if len(set(values)) < len(values):
            full = GRID_AXES[key]
            yield _fault(full, "must name each value once", values, f"{full}=[A,B]")
    if config.timing.passes > 1 and config.timing.passes % 2:
        expected, passes = "must be 1 or even, as in A B B A", config.timing.passes
        yield _fault("timing.passes", expected, passes, f"timing.passes={passes + 1}")
    if config.timing.turns is not None and config.model.tp_plan != "none":
        # Every rank would wait for the lock that another rank of its own run holds.
        expected = f"must be null for model.tp_plan={config.model.tp_plan}"
        yield _fault("timing.turns", expected, config.timing.turns, "timing.turns=null")
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
        yield _fault("spec.policy", expected, spec.policy, fix)
    if engine.block_size < 16 or engine.block_size & (engine.block_size - 1):
        key, fix = "engine.block_size", max(1 << engine.block_size.bit_length(), 16)
        yield _fault(key, "must be a power of two >= 16", engine.block_size, f"{key}={fix}")
    num_rows = engine.max_num_requests * (spec.num_speculative_tokens + 1)
    if engine.max_num_batched_tokens < num_rows:
        key, expected = (
            "engine.max_num_batched_tokens",
            f"must hold engine.max_num_requests * (spec.k + 1) = {num_rows} rows",
        )
        yield _fault(key, expected, engine.max_num_batched_tokens, f"{key}={num_rows}")
    unclean = [policy for policy in spec.policy if policy not in CLEAN_POLICIES]
    if engine.prefix_caching and unclean:
        key, expected = "engine.prefix_caching", f"must be false for spec.policy={unclean[0]}"
        yield _fault(key, expected, "true", f"{key}=false")
    yield from _capture_faults(engine)
    if engine.max_model_len is not None and engine.max_model_len <= max_new_tokens:
        key, expected = "engine.max_model_len", f"must exceed max_new_tokens={max_new_tokens}"
        yield _fault(key, expected, engine.max_model_len, f"{key}={2 * max_new_tokens}")
    if config.logger.tensorboard:
        key, expected = "logger.tensorboard", "must be false for eval.py, which draws no curves"
        yield _fault(key, expected, "true", f"{key}=false")
    yield from _sampling_faults(config)


def _capture_faults(engine: EngineConfig) -> Iterator[str]:
    """Keys of compiled and captured steps that exclude or need one another."""
    if engine.deterministic and engine.compile:
        key, fix = "engine.compile", "engine=h200_deterministic"
        yield _fault(key, "must be false for engine.deterministic=true", "true", fix)
    if engine.compile and not engine.cuda_graphs:  # what is not captured is not compiled
        key, expected = "engine.compile", "must be false for engine.cuda_graphs=false"
        yield _fault(key, expected, "true", f"{key}=false")
    if engine.capture_mixed and not engine.cuda_graphs:
        key, expected = "engine.capture_mixed", "must be false for engine.cuda_graphs=false"
        yield _fault(key, expected, "true", f"{key}=false")
    sizes, key = engine.graph_batch_sizes, "engine.graph_batch_sizes"
    if sizes is not None and not engine.cuda_graphs:
        yield _fault(key, "must be null for engine.cuda_graphs=false", sizes, f"{key}=null")
    elif sizes is not None and (not sizes or sizes != sorted(set(sizes))):
        fix = f"{key}={sorted(set(sizes)) or 'null'}".replace(" ", "")
        yield _fault(key, "must be one or more sizes in ascending order", sizes, fix)


def _sampling_faults(config: EvalConfig) -> Iterator[str]:
    """An option that the chosen mode would ignore is a fault, not a silent no-op."""
    spec, sampling = config.spec, config.sampling
    if sampling.temperature > 0:
        if spec.verify in ARGMAX_RULES:
            expected = f"must be 0 for spec.verify={spec.verify}"
            fix = "spec.verify=auto"
            yield _fault("sampling.temperature", expected, sampling.temperature, fix)
        return
    fix = "sampling.temperature=1"
    if sampling.top_k:
        yield _fault("sampling.top_k", "must be 0 at temperature 0", sampling.top_k, fix)
    if sampling.top_p != 1:
        yield _fault("sampling.top_p", "must be 1 at temperature 0", sampling.top_p, fix)
    if sampling.min_p:
        yield _fault("sampling.min_p", "must be 0 at temperature 0", sampling.min_p, fix)
    if spec.draft_sampling == "sample":
        yield _fault("spec.draft_sampling", "must be greedy at temperature 0", "sample", fix)
