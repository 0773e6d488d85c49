"""What each key of `train.py` promises: the rows of `TrainConfig`, section by section.

The baselines are in `lab`: chain, N = 1, two steps on a tiny dense target; `task=target` two steps
on a corpus of two domains; a matrix of one head and one policy.
"""

from mtp_research.config.training_schema import DEPTH_WEIGHTS, LOSS_TERMS, UNROLLS
from tests.keys.row import Row, fault

GPU = "needs a GPU; here what reaches the place where it is read"
RANKS = "needs ranks, which tests/training/test_parallel.py has"
SERVER = "needs a server, which tests/training/test_served_states.py has"
_LAB_TINY = "assets/lab_tiny"


def _heads(key: str, value: object, changes: str, keeps: str = "", **more: object) -> Row:
    return Row(key, value, "heads", changes, keeps, **more)  # type: ignore[arg-type]


def _target(key: str, value: object, changes: str, keeps: str = "", **more: object) -> Row:
    return Row(f"model.{key}", value, "target", changes, keeps, **more)  # type: ignore[arg-type]


def _matrix(key: str, value: object, changes: str, keeps: str = "", **more: object) -> Row:
    return Row(f"matrix.{key}", value, "matrix", changes, keeps, **more)  # type: ignore[arg-type]


def _slurm(key: str, value: object, **more: object) -> Row:
    base = {"launcher.kind": "slurm", "output_dir": "run"}
    return Row(f"launcher.{key}", value, "train_entry", "job", "started_in code", base, **more)  # type: ignore[arg-type]


MODEL = [
    Row("model.name", "mine", "train_entry", "started_in", "code"),
    _heads("model.family", "llama", "warnings", "weights"),
    _heads("model.path", "other target", "hidden weights", "rows"),
    _heads("model.dtype", "bfloat16", "dtype loss loaded"),
    _heads("model.device", "cuda", "fault", shows=fault("model.device=cuda"), reason=GPU),
    _heads("model.tp_plan", "tensor", "fault", shows=fault("trainer.shard_target"), reason=RANKS),
    _heads("model.device_map", "auto", "loaded", "weights", reason="one device: the same weights"),
    _heads("model.weights", "random", "hidden weights", "rows"),
    _heads("model.keep_fp8", True, "loaded", "rows", base={"model.path": "fp8 target"}),
    _heads("model.experts", "grouped_mm", "loaded", "weights", reason=GPU),
    _target("family", "qwen3", "start weights num_parameters", "rows"),
    _target("dtype", "bfloat16", "start weights"),
    _target("device", "cuda", "fault", shows=fault("model.device=cuda"), reason=GPU),
    _target("weights", "random", "fault", shows=fault("must be stored for task=target")),
    _target("keep_fp8", True, "fault", shows=fault("must be false for task=target")),
    _target("architecture", "one layer", "start weights num_parameters", "rows"),
]
PRETRAIN = [
    _target("pretrain.vocab_size", 264, "rows start weights num_parameters"),
    _target("pretrain.seq_len", 16, "rows weights num_tokens", "start"),
    _target("pretrain.batch_size", 2, "rows weights num_tokens", "start"),
    _target("pretrain.max_steps", 3, "rows rates weights num_steps", "start"),
    _target("pretrain.max_seconds", 1e-9, "rows num_steps", "start"),
    _target("pretrain.learning_rate", 0.003, "rates weights", "rows start"),
    _target(
        "pretrain.warmup_steps",
        0,
        "rates",
        "rows start",
        base={"model.pretrain.warmup_steps": 2, "model.pretrain.max_steps": 3},
    ),
    _target("pretrain.min_learning_rate_ratio", 0.5, "rates weights", "rows start"),
    _target("pretrain.weight_decay", 0.5, "rates weights", "rows start"),
    _target("pretrain.grad_clip", 1e-6, "weights", "rates rows start"),
    _target("pretrain.corpus_dir", "other corpus", "data rows weights"),
    _target("pretrain.domain_weights", {"arith": 1.0}, "data rows weights"),
    _target("pretrain.compile", False, "model", "weights rows", reason=GPU),
    _target("pretrain.log_every", 1, "logged", "weights rows"),
    _target("pretrain.router_bias_rate", 0.5, "bias", "rows start"),
    _target("pretrain.num_mtp_modules", 1, "weights", "rows start"),
    _target(
        "pretrain.mtp_loss_weight",
        0.9,
        "weights",
        "rows start",
        base={"model.pretrain.num_mtp_modules": 1},
    ),
]
DATA = [
    _heads("data.path", "other documents", "rows weights", "start"),
    _heads("data.kind", "original", "warnings data_kind", "weights"),
    _heads("data.seq_len", 40, "rows weights", "start"),
    _heads("data.eval_documents", 4, "rows weights walk"),
    _heads("data.max_documents", 18, "rows weights walk"),
    _heads("data.hidden_cache", "written cache", "num_forwards", "weights walk rows"),
    _heads(
        "data.check_hidden_cache",
        True,
        "num_forwards",
        "weights walk rows",
        base={"data.hidden_cache": "written cache"},
    ),
    Row("data.import_hidden", "engine states", "cache", "cache"),
    _heads(
        "data.states_endpoint", "here", "fault", shows=fault("must be an address"), reason=SERVER
    ),
    _heads("data.states_model", "x", "fault", shows=fault("data.states_model"), reason=SERVER),
    _heads("data.states_ahead", 2, "fault", shows=fault("data.states_ahead"), reason=SERVER),
    Row("data.seq_len", 40, "cache", "cache"),
    Row("data.eval_documents", 4, "cache", "cache"),
]
HEAD = [
    _heads("head.num_mtp_modules", 2, "start weights spec"),
    _heads("head.init", "random", "start weights", "rows"),
    _heads(
        "head.num_mtp_modules",
        2,
        "start",
        base={"head.init": "replicate", "head.path": "finished heads"},
        shows=lambda a, b: all(
            b["start"][name.replace("modules.0", f"modules.{index}")] == old
            for name, old in a["start"].items()
            for index in (0, 1)
        ),
    ),
    _heads("head.path", "finished heads", "start weights", "rows"),
    _heads(
        "head.freeze",
        ["eh_proj"],
        "weights",
        "start rows",
        shows=lambda _, after: all(
            (after["weights"][name] == old) == ("eh_proj" in name)
            for name, old in after["start"].items()
        ),
    ),
    _heads(
        "head.lora_rank",
        2,
        "start weights",
        "rows",
        shows=lambda _, after: all(
            (after["weights"][name] == old) == (".lora_" not in name)
            for name, old in after["start"].items()
        ),
    ),
    _heads("head.init_noise", 0.2, "start weights", "rows"),
    _heads("head.hidden_source", "pre_norm", "hidden weights spec", "rows start"),
    _heads("head.recycle_norm", "pre_norm", "weights spec walk", "rows hidden start"),
    _heads("head.concat_order", "hidden_first", "weights spec", "rows hidden"),
    _heads("head.zero_position_0", True, "weights spec", "rows hidden start"),
    _heads(
        "head.module_schedule",
        "last",
        "weights walk",
        "rows start",
        base={"head.num_mtp_modules": 2, "objective.num_depths": 3},
    ),
    _heads("head.module_schedule", "first", "settings", "weights"),
    Row("head.hidden_source", "pre_norm", "cache", "cache"),
]
OBJECTIVE = [
    *(
        _heads("objective.unroll", name, "weights spec", "rows start")
        for name in UNROLLS
        if name != "chain"
    ),
    _heads("objective.num_depths", 2, "loss weights", "rows start"),
    *(
        _heads("objective.loss", name, "loss weights", "rows start")
        for name in LOSS_TERMS
        if name != "ce"
    ),
    _heads("objective.loss", "ce+0.5*kl", "loss weights", "rows start"),
    *(
        _heads("objective.depth_weights", name, "loss weights", "rows start")
        for name in DEPTH_WEIGHTS
        if name != "decay"
    ),
    _heads("objective.depth_decay", 0.3, "loss weights", "rows start"),
    _heads("objective.lk_eta", 0.1, "loss weights", "rows start", base={"objective.loss": "lk"}),
    _heads(
        "objective.lk_acceptance",
        "batch",
        "loss weights",
        "rows start",
        base={"objective.loss": "lk"},
    ),
    _heads("objective.half_logits", False, "loss_spec settings", "weights", reason=GPU),
]
TRAINER = [
    _heads("trainer.precision", "bfloat16", "dtype loss loaded"),
    _heads(
        "trainer.max_steps", 3, "rates rows saved", "start", shows=lambda a, b: len(b["loss"]) == 3
    ),
    _heads("trainer.batch_size", 2, "rows weights", "start rates"),
    _heads(
        "trainer.gradient_accumulation_steps",
        2,
        "rows weights",
        "start rates",
        shows=lambda a, b: (len(a["rows"]), len(b["rows"])) == (2, 4),
    ),
    _heads("trainer.learning_rate", 1e-3, "rates weights", "rows start"),
    _heads("trainer.warmup_fraction", 1.0, "rates weights", "rows start"),
    _heads("trainer.betas", (0.5, 0.6), "rates weights moments", "rows start"),
    _heads("trainer.weight_decay", 0.5, "rates weights", "rows start"),
    _heads("trainer.grad_clip", 1e-3, "weights moments", "rates rows start"),
    _heads("trainer.eval_every", 1, "measured", "weights saved"),
    _heads("trainer.save_every", 1, "saved", "weights measured"),
    _heads("trainer.keep_last", 1, "saved", "weights", base={"trainer.save_every": 1}),
    Row("trainer.resume", "never", "again", "fault", shows=fault("trainer.resume is never")),
    Row(
        "trainer.resume",
        "step_000001",
        "again",
        "rows",
        shows=lambda a, b: (len(a["rows"]), len(b["rows"])) == (0, 1),
    ),
    Row(
        "trainer.allow_drift",
        ["trainer.grad_clip"],
        "again",
        "fault",
        base={"trainer.grad_clip": 2.0},
        shows=lambda a, b: "trainer.grad_clip: checkpoint 1.0" in a["fault"] and b["fault"] is None,
    ),
    _heads(
        "trainer.early_stopping_patience",
        1,
        "loss measured saved",
        base={"trainer.max_steps": 4, "trainer.eval_every": 1, "trainer.learning_rate": 1e-9},
        shows=lambda a, b: len(b["loss"]) < len(a["loss"]),
    ),
    _heads(
        "trainer.decode_eval_prompts",
        1,
        "decoded pools",
        "weights",
        base={
            "model.path": f"{_LAB_TINY}/target",
            "model.dtype": "float32",
            "data.path": f"{_LAB_TINY}/regenerated.jsonl.xz",
            "data.max_documents": 12,
            "data.eval_documents": 4,
            "trainer.max_steps": 1,
        },
    ),
    _heads(
        "trainer.parallel",
        "fsdp2",
        "fault",
        shows=fault("trainer.parallel=fsdp2 needs at least 2 ranks"),
        reason=RANKS,
    ),
    _heads(
        "trainer.parallel",
        "zero1",
        "fault",
        shows=fault("trainer.parallel=zero1 needs at least 2 ranks"),
        reason=RANKS,
    ),
    _heads(
        "trainer.deepspeed_config",
        "buffers.json",
        "fault",
        shows=fault("trainer.deepspeed_config must be null for ddp"),
        reason=RANKS,
    ),
    _heads(
        "trainer.shard_target", True, "fault", shows=fault("needs 2 or more ranks"), reason=RANKS
    ),
    _heads("trainer.activation_checkpointing", True, "num_recomputed", "weights loss"),
    _heads("trainer.compile", True, "compiled", "weights", reason=GPU),
    _heads(
        "trainer.cuda_graphs",
        True,
        "fault",
        shows=fault("trainer.cuda_graphs=true needs"),
        reason=GPU,
    ),
]
PROBE = [
    Row("objective.unroll", "ttt", "probe", "speculated"),
    Row("objective.num_depths", 2, "probe", "speculated"),
    Row("head.num_mtp_modules", 4, "probe", "speculated"),
]
MATRIX = [
    _matrix("num_mtp_modules", [2], "cells heads"),
    _matrix("unrolls", ["ttt"], "cells heads"),
    _matrix("policies", ["eagle"], "cells", "heads"),
    _matrix("seeds", [4], "cells heads"),
    _matrix("recycle_norms", ["pre_norm"], "cells heads"),
    Row(
        "matrix.max_differing_share",
        1.0,
        "broken_matrix",
        "fault",
        shows=lambda a, b: "NumericFault" in a["fault"] and b["fault"] is None,
    ),
    _matrix("num_prompts", 3, "prompts rounds", "heads"),
    _matrix("prompts", ["other documents"], "prompts rounds", "heads"),
    _matrix("max_new_tokens", 24, "rounds", "heads prompts"),
    _matrix(
        "num_workers",
        2,
        "workers fault",
        base={"matrix.seeds": [0, 1]},
        shows=fault("2 processes"),
        reason="processes, which tests/studies/test_policy_matrix.py has",
    ),
    _matrix("dtype", "bfloat16", "dtype"),
    Row("objective.num_depths", 2, "matrix", "depths heads"),
    Row("head.recycle_norm", "pre_norm", "matrix", "cells heads"),
    Row("trainer.learning_rate", 1e-3, "matrix", "heads"),
]
REST = [
    _heads("logger.wandb", "offline", "wandb", "weights"),
    _heads("logger.project", "mine", "wandb", "weights", base={"logger.wandb": "offline"}),
    _heads("logger.tags", ["mine"], "wandb", "weights", base={"logger.wandb": "offline"}),
    Row("logger.project", "mine", "matrix", "wandb", "heads", base={"logger.wandb": "offline"}),
    Row(
        "launcher.kind",
        "slurm",
        "train_entry",
        "job started_in",
        "code",
        base={"output_dir": "run"},
    ),
    Row(
        "launcher.submit",
        False,
        "train_entry",
        "submitted",
        "job code",
        base={"launcher.kind": "slurm", "output_dir": "run"},
    ),
    _slurm("partition", "gpu"),
    _slurm("num_nodes", 2),
    _slurm("gpus_per_node", 4),
    _slurm("cpus_per_node", 8),
    _slurm("max_minutes", 9),
    _slurm("grace_s", 30),
    _heads("seed", 3, "rows noise weights", "rates"),
    _heads("seed", 3, "start", base={"head.init": "random"}),
    Row("seed", 3, "target", "rows start weights", "rates"),
    Row("seed", 3, "matrix", "rows cells heads draws"),
    Row("output_dir", "mine", "train_entry", "started_in", "code"),
    _heads("task", "cache", "files", base={"data.hidden_cache": "written cache"}),
]
TRAIN_ROWS = [*MODEL, *PRETRAIN, *DATA, *HEAD, *OBJECTIVE, *TRAINER, *PROBE, *MATRIX, *REST]
