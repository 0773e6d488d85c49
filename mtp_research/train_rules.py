"""Rules between the keys of `train.py`; `validation` asks for them when every value alone is legal.

Rules on where the target lies stand in `placing_rules`.
"""

from collections.abc import Iterator

from mtp_research.config import ObjectiveConfig, TrainConfig
from mtp_research.config_choices import MAX_SPECULATIVE_TOKENS, parse_loss
from mtp_research.runtime.errors import ConfigError, rule_line


def train_faults(config: TrainConfig) -> Iterator[str]:
    """Fault lines of a configuration of `train.py`."""
    if config.task in ("cache", "target"):
        yield from _logger_faults(config)
    yield from _pretrain_faults(config) if config.task == "target" else _heads_faults(config)


def _logger_faults(config: TrainConfig) -> Iterator[str]:
    """Tasks without a curve, whose services would stay empty."""
    logger, expected = config.logger, f"for task={config.task}, which logs to its run folder only"
    if logger.wandb != "disabled":
        yield rule_line("logger.wandb", f"must be disabled {expected}", logger.wandb, "logger=none")
    if logger.tensorboard:
        key = "logger.tensorboard"
        yield rule_line(key, f"must be false {expected}", "true", f"{key}=false")


def _pretrain_faults(config: TrainConfig) -> Iterator[str]:
    pretrain = config.model.pretrain
    if not config.model.architecture:
        expected = "must be set for task=target"
        yield rule_line("model.architecture", expected, "nothing", "model=lab_tiny")
    if pretrain.warmup_steps >= pretrain.max_steps:
        key, expected = (
            "model.pretrain.warmup_steps",
            f"must be below max_steps={pretrain.max_steps}",
        )
        yield rule_line(key, expected, pretrain.warmup_steps, f"{key}={pretrain.max_steps // 20}")
    weights = pretrain.domain_weights
    for domain, weight in weights.items():
        if not 0 <= weight < float("inf"):
            key = f"model.pretrain.domain_weights.{domain}"
            yield rule_line(key, "must be a finite number >= 0", weight, f"{key}=0")
    if weights and not any(weights.values()):
        key = "model.pretrain.domain_weights"
        yield rule_line(key, "must have a weight above 0", "only zeros", f"{key}.{min(weights)}=1")


def _heads_faults(config: TrainConfig) -> Iterator[str]:
    head, objective, seq_len = config.head, config.objective, config.data.seq_len
    num_modules = head.num_mtp_modules
    num_depths = objective.num_depths or max(num_modules, 3)
    if num_depths < num_modules:
        key, expected = (
            "objective.num_depths",
            f"must be at least head.num_mtp_modules={num_modules}",
        )
        yield rule_line(key, expected, num_depths, f"{key}={num_modules}")
    key, fix = "head.num_mtp_modules", "head=shared_n1"
    if objective.unroll == "ttt" and num_modules != 1:
        yield rule_line(key, "must be 1 for objective.unroll=ttt", num_modules, fix)
    if head.module_schedule == "first" and num_modules != 1:
        yield rule_line(key, "must be 1 for head.module_schedule=first", num_modules, fix)
    yield from _loss_faults(config)
    for count in config.matrix.num_mtp_modules if config.task == "matrix" else ():
        most = objective.num_depths or MAX_SPECULATIVE_TOKENS
        if not 1 <= count <= most:
            key, expected = "matrix.num_mtp_modules", f"must lie in 1..{most}"
            yield rule_line(key, expected, count, f"{key}=[1,{min(3, most)}]")
    seeds = config.matrix.seeds
    if seeds is not None and (len(set(seeds)) < max(len(seeds), 1) or min(seeds) < 0):
        expected = "must hold at least one number >= 0, each once"
        yield rule_line("matrix.seeds", expected, seeds, "matrix.seeds=[0,1,2]")
    if config.task == "cache" and config.data.hidden_cache is None:
        yield rule_line("data.hidden_cache", "must be set for task=cache", "nothing", "data=cached")
    if seq_len < num_depths + 2:
        least = num_depths + 2
        expected = f"must be at least objective.num_depths + 2 = {least}"
        yield rule_line("data.seq_len", expected, seq_len, f"data.seq_len={least}")
    betas = config.trainer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        key, expected = "trainer.betas", "must be two numbers in [0, 1)"
        yield rule_line(key, expected, list(betas), f"{key}=[0.9,0.95]")
    yield from _scale_faults(config)


def _scale_faults(config: TrainConfig) -> Iterator[str]:
    trainer, head = config.trainer, config.head
    if head.init == "replicate" and head.path is None:
        expected = "must be set for head.init=replicate"
        yield rule_line("head.path", expected, "nothing", "head.path=PATH")
    is_gathered = trainer.parallel in ("fsdp2", "zero3")
    if trainer.decode_eval_prompts and (is_gathered or trainer.shard_target):
        key, expected = "trainer.decode_eval_prompts", "must be 0 with weights spread over ranks"
        yield rule_line(key, expected, trainer.decode_eval_prompts, f"{key}=0")
    if head.lora_rank and trainer.parallel != "ddp":
        expected = f"must be 0 for trainer.parallel={trainer.parallel}, which shards whole weights"
        yield rule_line("head.lora_rank", expected, head.lora_rank, "head.lora_rank=0")
    if trainer.compile and is_gathered:  # their hooks inside the modules break the graph
        expected = f"must be false for trainer.parallel={trainer.parallel}"
        yield rule_line("trainer.compile", expected, "true", "trainer.compile=false")


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
            yield rule_line(f"objective.{key}", expected, value, f"objective.{key}={default}")
    if objective.depth_weights != "decay" and objective.depth_decay != plain.depth_decay:
        key, default = "objective.depth_decay", plain.depth_decay
        expected = f"must be {default} for objective.depth_weights={objective.depth_weights}"
        yield rule_line(key, expected, objective.depth_decay, f"{key}={default}")
