"""Every check that needs only the configuration: the values first, then the rules between keys.

Values are `ranges`' business. A rule says that a key does not go with others, and which override
mends it; an option that the chosen mode would ignore is a fault, not a silent no-op. A *cell* is
one combination of the values that `grid` lists, checked as if it had been typed alone. Cells of
equal batch size and temperature follow each other: they share a baseline.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from operator import attrgetter
from typing import NamedTuple

from mtp_research.config.ranges import check_values, schema_keys
from mtp_research.config.schema import (
    ARGMAX_RULES,
    GRID_AXES,
    OWN,
    RULES,
    EngineConfig,
    EvalConfig,
    GridConfig,
    PromptsConfig,
    SpecConfig,
    TrainConfig,
)
from mtp_research.config.training_schema import (
    MAX_SPECULATIVE_TOKENS,
    HeadConfig,
    LauncherConfig,
    MatrixConfig,
    ObjectiveConfig,
    PretrainConfig,
    TrainerConfig,
    parse_loss,
)
from mtp_research.policy.fields import POLICIES, HiddenPolicy
from mtp_research.runtime.errors import ConfigError, rule_line

# Settings of one rule for the number of drafts, by key of `spec`; others ignore them.
LENGTH_SETTINGS = {
    "draft_p_min": "confidence",
    "draft_table": "batch_table",
    "draft_cost_ratio": "expected_gain",
}

# Keys that other engines do not read, or read otherwise; with them these keep their defaults.
_OF_OWN_LOOP = (
    *("model.tp_plan", "model.device_map", "model.keep_fp8", "engine.prefix_caching"),
    *("spec.module_schedule", "spec.draft_length", "spec.draft_sampling"),
    *("spec.draft_vocabulary_size", "sampling.dry_multiplier", "sampling.min_tokens"),
    *("sampling.repetition_penalty", "sampling.frequency_penalty", "sampling.presence_penalty"),
)


def is_valid(config: TrainConfig | EvalConfig) -> bool:
    """Whether `validate` has nothing to say."""
    try:
        validate(config)
    except ConfigError:
        return False
    return True


def validate(config: TrainConfig | EvalConfig) -> None:
    """Check all ranges, choices and rules between keys; a `ConfigError` has one line per fault."""
    check_values(config)
    model = config.model
    faults = []
    if model.tp_plan != "none" and model.device_map != "none":
        expected = f"must be none for model.tp_plan={model.tp_plan}"
        faults.append(
            rule_line("model.device_map", expected, model.device_map, "model.device_map=none")
        )
    if model.weights == "random" and model.device_map != "none":
        expected = "must be none for model.weights=random"
        faults.append(
            rule_line("model.device_map", expected, model.device_map, "model.device_map=none")
        )
    faults += _fp8_faults(config) if model.keep_fp8 else ()
    faults += _train_faults(config) if isinstance(config, TrainConfig) else _eval_faults(config)
    if faults:
        raise ConfigError("\n".join(faults))


def _fp8_faults(config: TrainConfig | EvalConfig) -> Iterator[str]:
    """Keys that want weights in the arithmetic of the rows, or layers in parts."""
    condition, model = "model.keep_fp8=true", config.model
    for key, value in {"tp_plan": model.tp_plan, "device_map": model.device_map}.items():
        if value != "none":
            name = f"model.{key}"
            yield rule_line(name, f"must be none for {condition}", value, f"{name}=none")
    if model.experts == "grouped_mm":
        key = "model.experts"
        yield rule_line(key, f"must be auto for {condition}", model.experts, f"{key}=auto")
    if model.dtype == "float64":
        key, expected = "model.dtype", f"must be float32, bfloat16 or float16 for {condition}"
        yield rule_line(key, expected, model.dtype, f"{key}=float32")
    if isinstance(config, EvalConfig):
        if config.engine.deterministic:
            yield _must_be_false("engine.deterministic", condition)
        return
    if config.task == "target":
        yield _must_be_false("model.keep_fp8", "task=target, which draws its own weights")


def _must_be_false(key: str, condition: str, fix: str | None = None) -> str:
    return rule_line(key, f"must be false for {condition}", "true", fix or f"{key}=false")


def _train_faults(config: TrainConfig) -> Iterator[str]:
    if config.launcher.kind == "local":
        for name, value in vars(config.launcher).items():
            if value != (default := getattr(LauncherConfig, name)):
                key, expected = f"launcher.{name}", f"must be {default} for launcher.kind=local"
                yield rule_line(key, expected, value, "launcher=slurm")
    if config.task in ("cache", "target") and config.logger.wandb != "disabled":
        expected = f"must be disabled for task={config.task}, which logs to its run folder only"
        yield rule_line("logger.wandb", expected, config.logger.wandb, "logger=none")
    if config.task == "target":
        if config.model.weights != "stored":
            expected = "must be stored for task=target, which draws its own"
            yield rule_line("model.weights", expected, config.model.weights, "model.weights=stored")
        if not config.model.architecture:
            expected = "must be set for task=target"
            yield rule_line("model.architecture", expected, "nothing", "model=lab_tiny")
        yield from _pretrain_faults(config.model.pretrain)
    else:
        yield from _heads_faults(config)
        yield from _loss_faults(config.objective)
        yield from _task_faults(config)
        yield from _sharing_faults(config)
    yield from _served_faults(config)
    yield from _train_placing_faults(config)


def _pretrain_faults(pretrain: PretrainConfig) -> Iterator[str]:
    if pretrain.warmup_steps >= pretrain.max_steps:
        key = "model.pretrain.warmup_steps"
        expected = f"must be below max_steps={pretrain.max_steps}"
        yield rule_line(key, expected, pretrain.warmup_steps, f"{key}={pretrain.max_steps // 20}")
    count, default = pretrain.num_mtp_modules, PretrainConfig.mtp_loss_weight
    if count >= pretrain.seq_len:
        key = "model.pretrain.num_mtp_modules"
        expected = f"must be below model.pretrain.seq_len={pretrain.seq_len}"
        yield rule_line(key, expected, count, f"{key}=1")
    if count == 0 and pretrain.mtp_loss_weight != default:
        key = "model.pretrain.mtp_loss_weight"
        expected = f"must be {default} for model.pretrain.num_mtp_modules=0"
        yield rule_line(key, expected, pretrain.mtp_loss_weight, f"{key}={default}")
    key, weights = "model.pretrain.domain_weights", pretrain.domain_weights
    for domain, weight in weights.items():
        if not 0 <= weight < float("inf"):
            name = f"{key}.{domain}"
            yield rule_line(name, "must be a finite number >= 0", weight, f"{name}=0")
    if weights and not any(weights.values()):
        yield rule_line(key, "must have a weight above 0", "only zeros", f"{key}.{min(weights)}=1")


def _heads_faults(config: TrainConfig) -> Iterator[str]:
    head, objective, seq_len = config.head, config.objective, config.data.seq_len
    num_modules = head.num_mtp_modules
    num_depths = objective.num_depths or max(num_modules, 3)
    if num_depths < num_modules:
        key = "objective.num_depths"
        expected = f"must be at least head.num_mtp_modules={num_modules}"
        yield rule_line(key, expected, num_depths, f"{key}={num_modules}")
    for condition, is_set in {
        "objective.unroll=ttt": objective.unroll == "ttt",
        "head.module_schedule=first": head.module_schedule == "first",
    }.items():
        if is_set and num_modules != 1:
            expected = f"must be 1 for {condition}"
            yield rule_line("head.num_mtp_modules", expected, num_modules, "head=shared_n1")
    if head.init == "replicate" and head.path is None:
        expected = "must be set for head.init=replicate"
        yield rule_line("head.path", expected, "nothing", "head.path=PATH")
    is_copy = head.init in ("auto", "target_last_layer") and head.path is None
    if not is_copy and head.init_noise not in (0, HeadConfig.init_noise):
        key = "head.init_noise"
        expected = "must be left alone for heads that do not start from the target's last layer"
        yield rule_line(key, expected, head.init_noise, f"{key}={HeadConfig.init_noise}")
    if seq_len < num_depths + 2:
        key = "data.seq_len"
        expected = f"must be at least objective.num_depths + 2 = {num_depths + 2}"
        yield rule_line(key, expected, seq_len, f"{key}={num_depths + 2}")


def _loss_faults(objective: ObjectiveConfig) -> Iterator[str]:
    try:
        terms = parse_loss(objective.loss)
    except ConfigError as fault:
        yield str(fault)
        return
    ignored: dict[str, str] = (
        {}
        if "lk" in terms
        else dict.fromkeys(
            ("lk_eta", "lk_acceptance"), f"objective.loss={objective.loss}, which has no lk"
        )
    )
    if objective.depth_weights != "decay":
        ignored["depth_decay"] = f"objective.depth_weights={objective.depth_weights}"
    for name, condition in ignored.items():
        value, default = getattr(objective, name), getattr(ObjectiveConfig, name)
        if value != default:
            key, expected = f"objective.{name}", f"must be {default} for {condition}"
            yield rule_line(key, expected, value, f"{key}={default}")


def _task_faults(config: TrainConfig) -> Iterator[str]:
    if config.task == "matrix":
        yield from _matrix_faults(config)
    seeds = config.matrix.seeds
    if seeds is not None and (len(set(seeds)) < max(len(seeds), 1) or min(seeds) < 0):
        expected = "must hold at least one number >= 0, each once"
        yield rule_line("matrix.seeds", expected, seeds, "matrix.seeds=[0,1,2]")
    if config.data.check_hidden_cache and config.data.hidden_cache is None:
        yield _must_be_false("data.check_hidden_cache", "data.hidden_cache=null", "data=cached")
    if config.task == "cache" and config.data.hidden_cache is None:
        yield rule_line("data.hidden_cache", "must be set for task=cache", "nothing", "data=cached")
    if config.data.import_hidden is not None and config.task != "cache":
        key, expected = "data.import_hidden", f"must be null for task={config.task}"
        yield rule_line(key, expected, config.data.import_hidden, "task=cache data=cached")


def _matrix_faults(config: TrainConfig) -> Iterator[str]:
    """Heads that cannot be, or none at all."""
    matrix, key = config.matrix, "matrix.num_mtp_modules"
    most = config.objective.num_depths or MAX_SPECULATIVE_TOKENS
    for count in matrix.num_mtp_modules:
        if not 1 <= count <= most:
            yield rule_line(key, f"must lie in 1..{most}", count, f"{key}=[1,{min(3, most)}]")
    if set(matrix.unrolls) == {"ttt"} and 1 not in matrix.num_mtp_modules:
        expected = "must hold 1 for matrix.unrolls=[ttt]"
        yield rule_line(key, expected, matrix.num_mtp_modules, f"{key}=[1]")
    for name in ("num_mtp_modules", "unrolls", "policies"):
        if not getattr(matrix, name):
            fix = f"matrix.{name}=[{getattr(MatrixConfig(), name)[0]}]"
            yield rule_line(f"matrix.{name}", "must hold at least one", [], fix)


def _served_faults(config: TrainConfig) -> Iterator[str]:
    data = config.data
    key, got = "data.states_endpoint", data.states_endpoint
    if got is None:
        for unread in ("data.states_model", "data.states_ahead"):
            value, usual = attrgetter(unread)(config), schema_keys(TrainConfig)[unread].default
            if value != usual:
                text = json.dumps(usual)
                yield rule_line(unread, f"must be {text} for {key}=null", value, f"{unread}={text}")
        return
    reasons = {
        "beside data.hidden_cache": data.hidden_cache is not None,
        f"for task={config.task}": config.task != "heads",
        "for trainer.shard_target=true": config.trainer.shard_target,
    }
    for reason, holds in reasons.items():
        if holds:
            yield rule_line(key, f"must be null {reason}", got, f"{key}=null")


def _sharing_faults(config: TrainConfig) -> Iterator[str]:
    trainer, head = config.trainer, config.head
    if len(trainer.betas) != 2 or not all(0 <= beta < 1 for beta in trainer.betas):
        key, expected = "trainer.betas", "must be two numbers in [0, 1)"
        yield rule_line(key, expected, list(trainer.betas), f"{key}=[0.9,0.95]")
    if trainer.decode_eval_prompts and (_is_gathered(trainer) or trainer.shard_target):
        key, expected = "trainer.decode_eval_prompts", "must be 0 with weights spread over ranks"
        yield rule_line(key, expected, trainer.decode_eval_prompts, f"{key}=0")
    if head.lora_rank and trainer.parallel != "ddp":
        expected = f"must be 0 for trainer.parallel={trainer.parallel}, which shards whole weights"
        yield rule_line("head.lora_rank", expected, head.lora_rank, "head.lora_rank=0")
    if trainer.deepspeed_config is not None and not trainer.parallel.startswith("zero"):
        key, expected = "trainer.deepspeed_config", f"must be null for {trainer.parallel}"
        yield rule_line(key, expected, trainer.deepspeed_config, "trainer.parallel=zero2")
    if trainer.compile and _is_gathered(trainer):  # their hooks inside the modules break the graph
        yield _must_be_false("trainer.compile", f"trainer.parallel={trainer.parallel}")
    if trainer.cuda_graphs:
        reasons = {
            f"trainer.parallel={trainer.parallel}": trainer.parallel != "ddp",
            "trainer.shard_target=true": trainer.shard_target,
            # it saves the state of the random numbers, which a capture cannot
            "trainer.activation_checkpointing=true": trainer.activation_checkpointing,
            # a decoder may move the modules' weights from where the graphs read them
            "trainer.decode_eval_prompts above 0": trainer.decode_eval_prompts > 0,
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            yield _must_be_false("trainer.cuda_graphs", reason)


def _is_gathered(trainer: TrainerConfig) -> bool:
    return trainer.parallel in ("fsdp2", "zero3")


def _train_placing_faults(config: TrainConfig) -> Iterator[str]:
    model, trainer = config.model, config.trainer
    if model.tp_plan != "none":
        expected = "must be none for train.py, which spreads a target by trainer.shard_target"
        fix = "model.tp_plan=none trainer.shard_target=true"
        yield rule_line("model.tp_plan", expected, model.tp_plan, fix)
    if model.device_map == "none":
        return
    # Hooks that move inputs break the graph, and ranks need the whole device.
    for name in ("shard_target", "compile", "cuda_graphs"):
        if getattr(trainer, name):
            yield _must_be_false(f"trainer.{name}", f"model.device_map={model.device_map}")


def _eval_faults(config: EvalConfig) -> Iterator[str]:
    """Rules of every cell of the grid; one line a key, from the cell with the most rows a step."""
    for key, values in asdict(config.grid).items():
        if len(set(values)) < len(values):
            full = GRID_AXES[f"grid.{key}"]
            yield rule_line(full, "must name each value once", values, f"{full}=[A,B]")
    if config.timing.passes > 1 and config.timing.passes % 2:
        expected, passes = "must be 1 or even, as in A B B A", config.timing.passes
        yield rule_line("timing.passes", expected, passes, f"timing.passes={passes + 1}")
    yield from _prompts_faults(config.prompts)
    yield from _table_faults(config)
    cells = sorted(expand(config).cells, key=_num_rows)
    lines = {line.split()[0]: line for cell in cells for line in _cell_faults(cell)}
    yield from lines.values()
    yield from _eval_placing_faults(config)
    if config.backend != [OWN]:
        yield from _backend_faults(config)


def _table_faults(config: EvalConfig) -> Iterator[str]:
    """A table may give more drafts than some K of a grid, but not more than all."""
    spec, most = config.spec, max(config.spec.draft_table.values(), default=0)
    drafts = max(config.grid.num_speculative_tokens or [spec.num_speculative_tokens])
    if "batch_table" in draft_lengths(config) and most > drafts:
        key, expected = "spec.draft_table", f"must give at most spec.k={drafts} drafts"
        yield rule_line(key, expected, dict(spec.draft_table), f"spec.k={most}")


def _backend_faults(config: EvalConfig) -> Iterator[str]:
    """Of a run with other engines, which know neither our rules nor our ways to spread a model."""
    engines = config.backend
    if OWN not in engines or len(set(engines)) < len(engines):
        expected = f"must name {OWN}, which others are compared with, and each engine once"
        yield rule_line("backend", expected, engines, "backend=[own,vllm]")
        return
    shown = f"backend=[{','.join(engines)}]"
    most = max([config.engine.max_num_requests, *config.grid.max_num_requests])
    if "transformers" in engines and most > 1:
        key = "engine.max_num_requests"
        expected = f"must be 1 for {shown}, as transformers drafts for one text at a time"
        yield rule_line(key, expected, most, f"{key}=1")
    hottest = max([config.sampling.temperature, *config.grid.temperature])
    if hottest > 0:
        key = "sampling.temperature"
        expected = f"must be 0 for {shown}, whose texts are compared"
        yield rule_line(key, expected, hottest, f"{key}=0")
    if config.spec.verify not in ("auto", "greedy"):
        expected = f"must be greedy for {shown}"
        yield rule_line("spec.verify", expected, config.spec.verify, "spec.verify=greedy")
    fields = schema_keys(EvalConfig)
    cells = expand(config).cells
    for key in _OF_OWN_LOOP:
        usual = fields[key].default
        others = [value for value in map(attrgetter(key), cells) if value != usual]
        if others:
            text = json.dumps(usual).strip('"')
            yield rule_line(key, f"must be {text} for {shown}", others[0], f"{key}={text}")
    heads = config.grid.head or [config.spec.head]
    drafts = max([config.spec.num_speculative_tokens, *config.grid.num_speculative_tokens])
    special = [head or "null" for head in heads if head in (None, "oracle")]
    if drafts and special:
        expected = f"must be a folder for {shown}"
        yield rule_line("spec.head", expected, special[0], "spec.head=FOLDER")


def _prompts_faults(prompts: PromptsConfig) -> Iterator[str]:
    markers, key = prompts.thinking_markers, "prompts.thinking_markers"
    if markers is not None and (len(markers) != 2 or not all(markers)):
        expected, fix = "must be a begin and an end", f"{key}=['<think>','</think>']"
        yield rule_line(key, expected, markers, fix)
    if prompts.score == "tests" and not prompts.run_code:
        expected = "must be true for prompts.score=tests, which runs code that the model wrote"
        yield rule_line("prompts.run_code", expected, "false", "prompts.run_code=true")
    if prompts.run_code and prompts.score not in ("auto", "tests"):
        score = prompts.score or "null"
        yield _must_be_false("prompts.run_code", f"prompts.score={score}, which runs none")


def _num_rows(cell: EvalConfig) -> int:
    return cell.engine.max_num_requests * (cell.spec.num_speculative_tokens + 1)


def _cell_faults(config: EvalConfig) -> Iterator[str]:
    spec, engine, max_new_tokens = config.spec, config.engine, config.sampling.max_new_tokens
    if strangers := list(_strangers(spec)):
        yield from strangers
        return
    if not spec.policy or len(set(spec.policy)) < len(spec.policy):
        expected, fix = "must name at least one policy, each once", "spec.policy=[eagle,training]"
        yield rule_line("spec.policy", expected, spec.policy, fix)
    for policy in spec.policy:
        if (own := POLICIES[policy].name) != policy:
            expected, known = "must be what the policy is called", f"POLICIES[{policy!r}]"
            fix = f"{known} = dataclasses.replace({known}, name={policy!r})"
            yield rule_line("spec.policy", expected, f"{policy} for {own}", fix)
    if engine.block_size < 16 or engine.block_size & (engine.block_size - 1):
        key, fix = "engine.block_size", max(1 << engine.block_size.bit_length(), 16)
        yield rule_line(key, "must be a power of two >= 16", engine.block_size, f"{key}={fix}")
    num_rows = _num_rows(config)
    if engine.max_num_batched_tokens < num_rows:
        key = "engine.max_num_batched_tokens"
        expected = f"must hold engine.max_num_requests * (spec.k + 1) = {num_rows} rows"
        yield rule_line(key, expected, engine.max_num_batched_tokens, f"{key}={num_rows}")
    unclean = [policy for policy in spec.policy if not POLICIES[policy].clean]
    if engine.prefix_caching and unclean:
        yield _must_be_false("engine.prefix_caching", f"spec.policy={unclean[0]}")
    yield from _capture_faults(engine)
    if engine.max_model_len is not None and engine.max_model_len <= max_new_tokens:
        key, expected = "engine.max_model_len", f"must exceed max_new_tokens={max_new_tokens}"
        yield rule_line(key, expected, engine.max_model_len, f"{key}={2 * max_new_tokens}")
    yield from _sampling_faults(config)


def _strangers(spec: SpecConfig) -> Iterator[str]:
    """Names of one's own that stand for something else; a `Rule` is told without loading torch."""
    for policy in spec.policy:
        if not isinstance(own := POLICIES[policy], HiddenPolicy):
            fix = f"POLICIES[{policy!r}] = HiddenPolicy(...)"
            yield rule_line("spec.policy", "must name a HiddenPolicy", type(own).__name__, fix)
    rule = RULES.get(spec.verify)  # None: built in
    if rule is not None and not hasattr(rule, "is_greedy_at_zero"):
        fix = f"RULES[{spec.verify!r}] = Rule(...)"
        yield rule_line("spec.verify", "must name a Rule", type(rule).__name__, fix)


def _capture_faults(engine: EngineConfig) -> Iterator[str]:
    if engine.deterministic and engine.compile and not engine.layer_regions:
        key, expected = "engine.layer_regions", "must be true for compiled deterministic steps"
        yield rule_line(key, expected, "false", f"{key}=true")
    for name in ("compile", "capture_mixed"):  # what is not captured is not compiled
        if getattr(engine, name) and not engine.cuda_graphs:
            yield _must_be_false(f"engine.{name}", "engine.cuda_graphs=false")
    sizes, key = engine.graph_batch_sizes, "engine.graph_batch_sizes"
    if sizes is not None and not engine.cuda_graphs:
        yield rule_line(key, "must be null for engine.cuda_graphs=false", sizes, f"{key}=null")
    elif sizes is not None and (not sizes or sizes != sorted(set(sizes))):
        fix = f"{key}={sorted(set(sizes)) or 'null'}".replace(" ", "")
        yield rule_line(key, "must be one or more sizes in ascending order", sizes, fix)


def _sampling_faults(config: EvalConfig) -> Iterator[str]:
    spec, sampling = config.spec, config.sampling
    if sampling.temperature > 0:
        rule = RULES.get(spec.verify)  # None: built in, and torch is not loaded
        if spec.verify in ARGMAX_RULES or not getattr(rule, "samples", True):
            key, expected = "sampling.temperature", f"must be 0 for spec.verify={spec.verify}"
            yield rule_line(key, expected, sampling.temperature, "spec.verify=auto")
        return
    neutral = {"sampling.top_k": 0, "sampling.top_p": 1, "sampling.min_p": 0}
    for key, value in neutral.items():
        got = getattr(sampling, key.removeprefix("sampling."))
        if got != value:
            yield rule_line(key, f"must be {value} at temperature 0", got, "sampling.temperature=1")
    if spec.draft_sampling == "sample":
        expected = "must be greedy at temperature 0"
        yield rule_line("spec.draft_sampling", expected, "sample", "sampling.temperature=1")


def _eval_placing_faults(config: EvalConfig) -> Iterator[str]:
    model, engine, spec = config.model, config.engine, config.spec
    if model.device_map != "none" and engine.cuda_graphs:  # weights move during a step
        fix = "engine.cuda_graphs=false engine.compile=false"
        yield _must_be_false("engine.cuda_graphs", f"model.device_map={model.device_map}", fix)
    if model.tp_plan in ("none", "data"):
        return
    if "expected_gain" in draft_lengths(config) and spec.draft_cost_ratio is None:
        # A clock would let ranks take different decisions, and wait for each other for ever.
        expected = f"must be set for model.tp_plan={model.tp_plan}, whose ranks cannot use a clock"
        yield rule_line("spec.draft_cost_ratio", expected, "null", "spec.draft_cost_ratio=0.1")


class Expansion(NamedTuple):
    """The cells of a grid, and a line on every combination that means nothing and is left out."""

    cells: tuple[EvalConfig, ...]
    skipped: tuple[str, ...]


def expand(config: EvalConfig) -> Expansion:
    """Every combination of the lists in `config.grid`; the configuration itself without lists.

    `spec.verify=auto` becomes `greedy` or `standard` by the cell's temperature. Sampled drafts at
    temperature 0 are greedy drafts under another name: such cells are left out of a grid, unless it
    has no other. So are rules that are listed beside `fixed`: with fewer drafts than the most, of
    which they choose, and without heads.
    """
    made = tuple(
        _cell(config, *values)
        for values in itertools.product(
            config.grid.max_num_requests or [config.engine.max_num_requests],
            config.grid.temperature or [config.sampling.temperature],
            config.grid.head or [config.spec.head],
            config.grid.num_speculative_tokens or [config.spec.num_speculative_tokens],
            config.grid.draft_sampling or [config.spec.draft_sampling],
            draft_lengths(config),
        )
    )
    reasons = [_why_skipped(cell, config.grid) for cell in made]
    cells = tuple(cell for cell, reason in zip(made, reasons, strict=True) if reason is None)
    if not cells:
        return Expansion(made, ())
    return Expansion(cells, tuple(dict.fromkeys(reason for reason in reasons if reason)))


def draft_lengths(config: EvalConfig) -> list[str]:
    """The rules for the number of drafts that are measured."""
    return config.grid.draft_length or [config.spec.draft_length]


def _cell(
    config: EvalConfig,
    max_num_requests: int,
    temperature: float,
    head: str | None,
    num_speculative_tokens: int,
    draft_sampling: str,
    draft_length: str,
) -> EvalConfig:
    verify = config.spec.verify
    if verify == "auto":
        verify = "standard" if temperature > 0 else "greedy"
    spec = replace(
        config.spec,
        num_speculative_tokens=num_speculative_tokens,
        head=head,
        draft_sampling=draft_sampling,
        draft_length=draft_length,
        verify=verify,
    )
    usual = SpecConfig()
    for name, rule in LENGTH_SETTINGS.items():
        if rule != draft_length and rule in config.grid.draft_length:  # another cell reads it
            setattr(spec, name, getattr(usual, name))
    return replace(
        config,
        spec=spec,
        sampling=replace(config.sampling, temperature=temperature),
        engine=replace(config.engine, max_num_requests=max_num_requests),
        grid=GridConfig(),
    )


def _why_skipped(cell: EvalConfig, grid: GridConfig) -> str | None:
    spec, most = cell.spec, max(grid.num_speculative_tokens, default=0)
    if cell.sampling.temperature == 0 and spec.draft_sampling == "sample":
        return "spec.draft_sampling=sample at temperature 0, where drafts cannot be sampled"
    if "fixed" not in grid.draft_length or spec.draft_length == "fixed":
        return None
    rule = f"spec.draft_length={spec.draft_length}"
    if spec.num_speculative_tokens < most:
        return f"{rule} with spec.k below {most}: it makes fewer than {most} by itself"
    if spec.head in (None, "oracle"):
        return f"{rule} with spec.head={spec.head or 'null'}, which has no passes to leave out"
    return None
